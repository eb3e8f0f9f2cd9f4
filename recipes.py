"""The recipes: each is a diff from the defaults in config.py and names its source. What is not named is the default.

`training` is for both algorithms, so that they are compared under one recipe; `ppo` and `grpo` are what only one of
them is told; `reward_model` is for `python -m reward_model.train`.
"""

RECIPES = {
    # SmolLM2-135M on orca pairs (reference system seed_001). Spelled out, so that the defaults may move without it.
    "smollm2-orca": {
        "training": {
            "actor_model": "HuggingFaceTB/smollm2-135M-SFT-Only",
            "rm_model": "./reward_model_output",
            "prompts": "Intel/orca_dpo_pairs",
            "max_prompts": 10_000,
            "prompt_length": 256,
            "reply_length": 128,
            "temperature": 0.7,
            "top_p": 1.0,  # the source has 0.9: a KL within the nucleus sees a quarter of the drift (NOTES.md)
            "batch_size": 4,
            "ppo_epochs": 4,
            "minibatches": 1,
            "clip_range": 0.2,
            "kl_coef": 0.05,
            "kl_schedule": "adaptive",  # to 6 nats per sequence; phased, say, has other targets
            "kl_horizon": 2_000,  # Ziegler's 10,000 would let beta grow by 1.4 in the whole run; this, by 5.7
            "learning_rate": 5e-6,
            "lr_schedule": "cosine",
            "epochs": 3,
            "eval_every": 50,
            "lora_r": 16,
            "lora_alpha": 32,
        },
        "ppo": {"gamma": 1.0, "lam": 0.95},
        "grpo": {"K": 8},
        "reward_model": {
            "base_model": "HuggingFaceTB/smollm2-135M-SFT-Only",
            "pairs": "Intel/orca_dpo_pairs",
        },
    },
    # Targets that tighten by phases (reference systems seed_000 for PPO, seed_002 for GRPO). Their reply and prompt
    # lengths, batch and learning rate are not given there: these are ours.
    "phased-kl": {
        "training": {
            "actor_model": "checkpoints/sft_merged_model",
            "rm_model": "checkpoints/rm_model_bt",
            "prompts": "data/processed/rl/rl_prompts.jsonl",
            "prompt_length": 256,
            "reply_length": 128,
            "temperature": 1.0,
            "use_lora": True,
            "lora_r": 16,
            "load_in_4bit": True,
            "batch_size": 4,
            "minibatches": 1,
            "ppo_epochs": 1,
            "clip_range": 0.2,
            "entropy_coef": 0.0,
            "max_grad_norm": 0.5,
            "normalize_scores": True,
            "score_ema": 0.99,
            "kl_placement": "reward",
            "kl_schedule": "phased",
            "kl_target": ["0.05/token", "0.02/token", "0.01/token"],
            "kl_horizon": 80,  # 20 updates of 4 episodes
            "num_iterations": 800,
            "eval_every": 50,
            "best_rule": "perplexity",
        },
        "ppo": {
            "entropy_coef": 0.01,
            "value_coef": 1.0,  # the source's 0.5 x plain MSE; ours has the half inside
            "gamma": 0.99,
            "lam": 0.95,
            "kl_penalty_at": "eos",  # "EOS-only reward shaping"
        },
        "grpo": {"K": 6, "scale_rewards": "none", "kl_horizon": 480},  # 20 updates of 4 x 6 episodes
        "reward_model": {
            "base_model": "checkpoints/sft_merged_model",
            "actor_model": "checkpoints/sft_merged_model",
            "rm_output": "checkpoints/rm_model_bt",
        },
    },
    # Everything real, only small: offline, on a CPU, in minutes. The figures that chose it stand in NOTES.md.
    "demo": {
        "training": {
            "actor_model": "./demo_parts/start_model",
            "rm_model": "./demo_parts/reward_model",
            "prompts": "./demo_parts/pairs.jsonl",
            "split": "60/30/10",
            "reply_length": 32,
            "prompt_length": 64,
            "temperature": 1.0,
            "batch_size": 64,
            "ppo_epochs": 2,
            "minibatches": 4,
            "kl_coef": 0.03,
            "kl_target": "3/sequence",
            "kl_horizon": 640,
            "learning_rate": 3e-4,
            "num_iterations": 150,
            "eval_every": 25,
            "eval_prompts": 128,
            "perplexity_gate": 1.3,  # the start's is 1.47, near 1: a fifth of a nat a token is already 1.2 times that
        },
        "ppo": {},
        "grpo": {"batch_size": 16, "K": 4},  # 64 episodes an update, as under PPO
        "reward_model": {
            "base_model": "./demo_parts/start_model",
            "actor_model": "./demo_parts/start_model",
            "pairs": "./demo_parts/pairs.jsonl",
            "split": "60/30/10",
            "rm_output": "./demo_parts/reward_model",
            "reply_length": 32,
            "calibration_prompt_length": 64,
            "temperature": 1.0,
            "pair_length": 128,
            "rm_learning_rate": 5e-4,
            "rm_epochs": 2,
            "rm_batch_size": 32,
        },
    },
}
