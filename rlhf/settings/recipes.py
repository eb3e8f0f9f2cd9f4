"""The recipes: each is a diff from the defaults in config.py and names its source. What is not named is the default.

`training` is for all algorithms, so that they are compared under one recipe; `ppo`, `grpo` and `rloo` are for one of
them; `reward_model` is for `python -m reward_model.train`.
"""

# how a command is recognised that has a reference document's flags, but not its recipe
SIGNS = {
    "rank1-voice": lambda config: config.data.steps_per_topic is not None,
    "phased-kl": lambda config: config.kl.kl_schedule == "phased",
    "qwen3-tldr": lambda config: config.data.prompts == RECIPES["qwen3-tldr"]["training"]["prompts"],
}

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
            "learning_rate": 5e-6,
            "lr_schedule": "cosine",
            "epochs": 3,
            "eval_every": 50,
            "save_every": 50,
            "lora_r": 16,
            "lora_alpha": 32,
        },
        "ppo": {"gamma": 1.0, "lam": 0.95},
        "grpo": {"K": 8},
        "rloo": {"K": 8},
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
            "save_every": 50,
            "best_rule": "perplexity",
        },
        "ppo": {
            "critic": "separate",  # "4-bit + value head" beside the actor
            "entropy_coef": 0.01,
            "value_coef": 1.0,  # the source's 0.5 x plain MSE; ours has the half inside
            "gamma": 0.99,
            "lam": 0.95,
            "kl_penalty_at": "eos",  # "EOS-only reward shaping"
        },
        "grpo": {"K": 6, "scale_rewards": "none", "kl_horizon": 480},  # 20 updates of 4 x 6 episodes
        "rloo": {"K": 6, "kl_horizon": 480},
        "reward_model": {
            "base_model": "checkpoints/sft_merged_model",
            "actor_model": "checkpoints/sft_merged_model",
            "rm_output": "checkpoints/rm_model_bt",
        },
    },
    # A voice trained topic by topic with adapters of rank 1 (reference system seed_004). It names a start model and
    # lengths no more than the number of topics or the prompts: lengths, schedule, horizon and intervals are ours.
    "rank1-voice": {
        "training": {
            "actor_model": "checkpoints/sft_merged_model",
            "rm_model": "checkpoints/reward_model",
            "prompts": "data/voice_prompts.jsonl",  # rows with a column `topic`
            "steps_per_topic": 50,  # and one round of all topics
            "prompt_length": 256,
            "reply_length": 128,
            "temperature": 1.0,
            "use_lora": True,
            "lora_r": 1,
            "lora_alpha": 1.0,
            "lora_targets": ["o_proj", "v_proj", "up_proj", "down_proj"],
            "batch_size": 4,
            "minibatches": 1,
            "ppo_epochs": 4,
            "clip_range": 0.2,
            "kl_coef": 0.2,
            "kl_schedule": "adaptive",
            "kl_target": "6/sequence",  # its `target_kl: 6.0`; in TRL's first PPO that name was an early stop
            "kl_horizon": 80,  # 20 updates of 4 episodes: beta can grow to 1.6 times in a topic, to 145 times in ten
            "learning_rate": 1.41e-5,
            "lr_schedule": "constant",  # as TRL's first PPO, so that the last topic learns as much as the first
            "eval_every": 50,
            "save_every": 50,
        },
        "ppo": {"gamma": 1.0, "lam": 0.95},
        "grpo": {"K": 8, "kl_horizon": 640},  # 20 updates of 4 x 8 episodes
        "rloo": {"K": 8, "kl_horizon": 640},
        "reward_model": {
            "base_model": "checkpoints/sft_merged_model",
            "actor_model": "checkpoints/sft_merged_model",
            "rm_output": "checkpoints/reward_model",
        },
    },
    # Summaries by a base model that reads plain text, a reward model's score plus rules (reference system seed_003).
    # Prompts are texts that end in "TL;DR:"; its 10 epochs are over a list, whose place 1,000 prompts take here.
    # Passes, lengths of prompts, temperature, schedule and intervals are ours.
    "qwen3-tldr": {
        "training": {
            "actor_model": "Qwen/Qwen3-0.6B-Base",
            "rm_model": "./reward_model_output_tldr",
            "prompts": "trl-lib/tldr-preference",
            "plain_prompts": True,  # its tokenizer comes with a chat template that the base model never read
            "max_prompts": 1_000,
            "prompt_length": 512,
            "reply_length": 50,
            "temperature": 1.0,
            "use_lora": True,
            "lora_r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "batch_size": 4,
            "minibatches": 1,
            "ppo_epochs": 4,
            "clip_range": 0.2,
            "reward_func": ["word_penalty", "keyword_bonus"],
            "keywords": ["helpful"],
            "reward_weights": [1.0, 0.1, 0.2],  # the score, a word, "helpful": as its CustomRewardModel adds them
            "kl_coef": 0.1,
            "kl_schedule": "fixed",
            "kl_horizon": 80,  # for who sets --kl-schedule adaptive: 20 updates of 4 episodes
            "learning_rate": 1e-5,
            "lr_schedule": "constant",
            "epochs": 10,
            "eval_every": 50,
            "save_every": 50,
        },
        "ppo": {"critic": "separate", "gamma": 0.99, "lam": 0.95},
        "grpo": {"K": 8, "kl_horizon": 640},
        "rloo": {"K": 8, "kl_horizon": 640},
        "reward_model": {
            "base_model": "Qwen/Qwen3-0.6B-Base",
            "actor_model": "Qwen/Qwen3-0.6B-Base",
            "pairs": "trl-lib/tldr-preference",
            "plain_prompts": True,
            "rm_output": "./reward_model_output_tldr",
            "reply_length": 50,
            "calibration_prompt_length": 512,
            "temperature": 1.0,
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
            "save_every": 50,
            "eval_prompts": 128,
            "perplexity_gate": 1.3,  # the start's is 1.47, near 1: a fifth of a nat a token is already 1.2 times that
        },
        "ppo": {},
        "grpo": {"batch_size": 16, "K": 4},  # 64 episodes an update, as under PPO
        "rloo": {"batch_size": 16, "K": 4},
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
