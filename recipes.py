"""The recipes: each is a diff from the defaults in config.py and names its source. What is not named is the default.

`training` is for train_ppo.py, `reward_model` for `python -m reward_model.train`.
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
            "gamma": 1.0,
            "lam": 0.95,
            "kl_coef": 0.05,
            "kl_schedule": "adaptive",
            "kl_target": "6/sequence",
            "kl_horizon": 2_000,  # Ziegler's 10,000 would let beta grow by 1.4 in the whole run; this, by 5.7
            "learning_rate": 5e-6,
            "lr_schedule": "cosine",
            "epochs": 3,
            "lora_r": 16,
            "lora_alpha": 32,
        },
        "reward_model": {
            "base_model": "HuggingFaceTB/smollm2-135M-SFT-Only",
            "pairs": "Intel/orca_dpo_pairs",
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
            "learning_rate": 4e-4,
            "num_iterations": 150,
            "eval_every": 25,
            "eval_prompts": 128,
        },
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
