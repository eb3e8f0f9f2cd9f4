"""Your settings. Edit a value, and the next training run uses it.

These are the values of the default recipe, smollm2-orca. You can add any other setting under its name:
`python train_ppo.py --help-all` prints all of them. Flags override this file. With another --recipe, this file is not
used.
"""

# Models and prompts: a folder, a file or a hub name
actor_model = "HuggingFaceTB/smollm2-135M-SFT-Only"
rm_model = "./reward_model_output"
prompts = "Intel/orca_dpo_pairs"
use_lora = False

# Sampling
max_new_tokens = 128  # largest length of a completion
temperature = 0.7
top_k = 0  # 0: off
top_p = 1.0  # 1: off

# One update: a rollout (batch of completions), and the optimizer steps on it
batch_size = 4  # prompts per update
# K = 8  # completions per prompt; unset: 8 for GRPO and RLOO, 1 for PPO and REINFORCE++
ppo_epochs = 4  # passes over each rollout
minibatches = 1  # optimizer steps per pass
clip_range = 0.2  # the policy ratio is clipped to 1 +- this value

# Critic and generalized advantage estimation, GAE (PPO)
gamma = 1.0
lam = 0.95
value_coef = 0.1
value_clip_range = 0.2

# KL to the start model
kl_coef = 0.05  # beta, the KL coefficient, at the start of the run
kl_schedule = "adaptive"  # or "fixed", or "phased" with a list of targets
kl_target = "6/sequence"  # nats per completion, or for example "0.05/token": nats per token

# Training
learning_rate = 5e-6
lr_schedule = "cosine"  # or "linear", "constant"
max_grad_norm = 1.0
epochs = 3  # passes over the prompts; instead of it, you can set num_iterations or episodes
seed = 42
eval_every = None  # updates between evaluations; None: five evaluations, at each quarter of the run
save_every = None  # updates between checkpoints; None: one every 5 minutes
