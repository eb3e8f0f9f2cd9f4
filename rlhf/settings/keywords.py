"""The keyword arguments of `make_config`, for editors and type checkers.

Written by `python -m tests.settings.write_keywords` from the declared settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class TrainingSettings(TypedDict, total=False):
    """All settings of a training run, by their first names. Other names of the settings work, too."""

    actor_model: str
    """Start model: a folder, a GGUF file, package:NAME (an installed package with one GGUF file) or a hub name."""

    rm_model: str | None
    """Reward model: a folder or a hub name; none: use only the reward functions (--reward-func)."""

    allow_weak_reward_model: bool
    """Accept a reward model whose held-out accuracy is below 0.6, or below that of a choice by length alone."""

    use_lora: bool
    """Train low-rank adapters (LoRA) instead of all weights; a block `lora:` in a YAML file also turns this on."""

    lora_r: int
    """Rank of the LoRA adapters; no effect without use_lora."""

    lora_alpha: float
    """Scaling of the LoRA adapters: their output is multiplied by alpha / r; no effect without use_lora."""

    lora_dropout: float
    """Dropout on the inputs of the LoRA adapters, in optimizer steps only; no effect without use_lora."""

    lora_targets: Sequence[str] | str
    """Modules that get a LoRA adapter; all-linear: every linear layer except the language-model head; no effect
    without use_lora."""

    load_in_4bit: bool
    """Load the frozen weights in 4 bits (NF4), which cannot be trained; no effect without use_lora."""

    bf16: bool | None
    """Bfloat16 autocast; unset: on for a GPU that computes in bfloat16, and on a CPU if a measurement at the start
    finds it at least 1.2 times as fast as float32 (tiny models: float32)."""

    gradient_checkpointing: bool
    """Recompute activations in the backward pass: uses less memory, is slower."""

    prompts: str
    """Prompts, chats or preference pairs: a file (JSONL, JSON, CSV, TSV, Parquet, Arrow), a folder or a hub
    dataset."""

    split: str | None
    """Percent of the questions for reward model / RL / evaluation; unset: 45/45/10, or 0/90/10 for data without
    preference pairs. With --eval-dataset, the questions for evaluation are trained on."""

    eval_dataset: str | None
    """Evaluation prompts: a data file, a folder or a hub dataset, read with the same --columns (and for a hub dataset
    --dataset-config); its split `test`, if it has splits; unset: the questions of --prompts that --split holds out."""

    dataset_config: str | None
    """Configuration of a hub dataset, such as `main` of openai/gsm8k."""

    dataset_split: str | None
    """Split of a hub dataset or a folder that is read; unset: train, or the only split of a folder."""

    columns: Sequence[str] | str
    """New names for columns of the data, as NEW=OLD: `--columns prompt=question answer=solution`."""

    skip_bad_rows: float | None
    """Percent of the rows that may be skipped because they cannot be used, for example because the prompt is empty;
    unset: 0 for files, 1 for hub datasets."""

    steps_per_topic: int | None
    """Train by topic (column `topic` of the prompts): this many updates on one topic, then on the next one, in rounds;
    unset: topics are ignored."""

    plain_prompts: bool
    """Do not apply the start model's chat template: the completion continues the text of the prompt, as with a base
    model."""

    max_prompts: int
    """Largest number of training prompts."""

    keep_pass_rate: Sequence[float] | None
    """LOW HIGH: train only on prompts whose pass rate (mean score) with the start model is in this range, measured
    before training with --scan-samples completions per prompt; needs scores from 0 to 1; unset: all prompts (Bae et
    al. 2025, arXiv 2504.03380)."""

    prompt_length: int
    """Largest length of a prompt, in tokens; longer prompts are skipped and counted."""

    eval_prompts: int
    """Largest number of evaluation prompts."""

    eval_text: str | None
    """Text file on which the perplexity is computed; unset: the chosen completions of held-out pairs, or without
    pairs, completions that the start model generated once."""

    max_new_tokens: int
    """Largest length of a completion, in tokens."""

    temperature: float
    """Sampling temperature; log-probabilities and KL are computed at the same temperature."""

    top_k: int
    """Sample from the k most likely tokens only; 0: off."""

    top_p: float
    """Nucleus sampling: sample from the smallest set of tokens with this total probability; below 1, the KL is
    computed within that set and underestimates the distance to the start model."""

    batch_size: int
    """Prompts per update; GRPO and RLOO sample K completions for each."""

    ppo_epochs: int
    """Passes over each rollout; every algorithm uses it."""

    minibatches: int
    """Optimizer steps per pass over the rollout; must divide the number of episodes per update."""

    micro_batch_size: int
    """Episodes per forward pass; 0: as many as fit into 16,384 tokens on a GPU, 1,024 on a CPU. Changes the memory
    use, not the result."""

    gradient_accumulation_steps: int | None
    """Micro-batches per optimizer step, instead of --minibatches: a step uses this number times --micro-batch-size
    episodes; if --micro-batch-size is 0, all episodes in this number of parts; unset: --minibatches is used."""

    clip_range: float
    """Clip range of the policy ratio: it is clipped to 1 +- this value."""

    epsilon_high: float | None
    """Clip range of the policy ratio above 1, if it differs from the one below 1: the ratio is clipped to [1 - --clip-
    range, 1 + this value] (DAPO, arXiv 2503.14476: 0.28); unset: --clip-range."""

    delta: float | None
    """Two-sided clip: largest policy ratio at a negative advantage, so that the loss is bounded (INTELLECT-2, arXiv
    2505.07291; dual-clip PPO, arXiv 1912.09729: 3); above 1 + --epsilon-high; unset: no limit; no effect with
    loss_type cispo."""

    mask_truncated_completions: bool
    """Leave completions without EOS out of the loss (overlong filtering, DAPO, arXiv 2503.14476); their scores still
    count in the mean of their group."""

    entropy_coef: float
    """Weight of the entropy bonus (mean entropy per token, nats)."""

    rollout_engine: Literal["auto", "plain", "slots", "graph", "vllm"]
    """How completions are sampled. plain: the whole batch until its longest completion ends; slots: continuous
    batching, a finished completion makes room for the next prompt; graph: slots, with the decoding step as a CUDA
    graph; vllm: by vLLM, if it is installed; auto: graph on a GPU, slots on a CPU."""

    rollout_slots: int
    """Completions sampled at the same time; 0: 256 on a GPU, 64 on a CPU; no effect with rollout_engine plain or with
    rollout_engine vllm."""

    packed: bool
    """Sequence packing: no computation on padding, and a prompt is computed once for all of its completions."""

    fused_head: bool
    """Compute logits and gradients of the language-model head in chunks, to use less memory."""

    fit: str | None
    """Choose settings whose predicted peak memory fits this size, such as 8GB: the micro-batch, the rollout slots,
    gradient checkpointing, 8-bit Adam and, if it must be, LoRA; prints what it chose; unset: nothing is chosen."""

    critic: Literal["shared", "separate", "reward-model"]
    """Network of the critic. shared: a value head on the policy's hidden states; separate: a second network, which
    doubles the weights, the optimizer state and the backward pass; reward-model: a second network that starts from the
    reward model (--rm-model), which must have the start model's tokenizer."""

    value_coef: float
    """Weight of the value loss (0.5 x mean squared error)."""

    value_clip_range: float
    """Clip range of the value: it is clipped to its value at the rollout +- this value, in score units."""

    gamma: float
    """Discount per token."""

    lam: float
    """GAE lambda."""

    critic_warmup: int
    """Updates at the start of the run in which only the critic is trained: the policy and beta do not change."""

    whiten_rewards: bool
    """Scale the rewards of all tokens in the batch to variance 1 and keep their mean, as in TRL: (r - mean) / std +
    mean. A token whose reward is 0 then gets mean - mean / std."""

    whiten_advantages: bool
    """Shift and scale the advantages to mean 0 and variance 1 in the batch."""

    kl_penalty_at: Literal["token", "eos"]
    """Where the reward contains the KL penalty: at each token, or its sum at the last token (eos); no effect without
    kl_placement reward."""

    K: int | None
    """Completions per prompt: a group, whose scores are compared with each other."""

    dynamic_sampling: int
    """Groups whose scores are all equal teach nothing about the score: replace them by groups of other prompts, at
    most this many times per update; 0: off. The additional episodes count for --episodes."""

    scale_rewards: Literal["none", "group", "batch"]
    """Divide the advantages, r - mean(r) of the group, by the standard deviation of the group, of the batch, or not
    (none)."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"]
    """Policy loss. dapo: clipped loss, averaged over all tokens; grpo: over the tokens of each completion, then over
    the completions; dr_grpo: summed over tokens and divided by a constant length; gspo: one ratio per completion;
    cispo: clipped ratios as weights of the log-probabilities."""

    reward_func: Sequence[str] | str
    """Reward functions, in addition to the reward model: length_penalty, word_penalty, keyword_bonus, exact_match,
    last_number, trl:NAME for a function of trl.rewards, or FILE.py:NAME with the signature of TRL's reward
    functions."""

    eval_func: Sequence[str] | str
    """Evaluation functions: metrics that training never sees, logged as eval/NAME at every evaluation. The same names
    and signature as --reward-func, for example exact_match, which compares with the column answer."""

    reward_weights: Sequence[float] | None
    """Weights of the reward model (if there is one) and of each --reward-func, in this order; unset: all 1."""

    reward_timeout: float
    """Time limit of a reward function for one batch of completions, in seconds; the run stops after it; no effect
    without reward_func or eval_func."""

    keywords: Sequence[str] | str
    """Keyword_bonus gives 1 to a completion that contains one of these words, in upper or lower case; no effect
    without reward_func keyword_bonus or eval_func keyword_bonus."""

    missing_eos_penalty: float
    """Subtracted from the score of a completion without EOS, in score units."""

    normalize_scores: bool
    """Normalize the scores with running estimates of their mean and standard deviation."""

    score_ema: float
    """Decay of the running estimates of --normalize-scores: the weight of the old estimate; no effect without
    normalize_scores."""

    control: Literal["none", "shuffled"]
    """Train a control run. shuffled: in each update, exchange the scores between all completions at random, across
    prompts, before they reach the algorithm. Mean and spread of the scores stay, and the signal is gone. Evaluations
    use the true scores (Shao et al. 2025, arXiv 2506.10947)."""

    kl_coef: float
    """Beta, the KL coefficient, at the start of the run, in score units per nat; no effect with kl_placement none."""

    kl_placement: Literal["reward", "loss", "none"]
    """Add the KL penalty to the reward, or to the loss (k3 x ratio, docs/kl.md); none: only log the KL."""

    kl_schedule: Literal["fixed", "adaptive", "phased"]
    """How beta changes. fixed: not at all; adaptive: towards one KL target; phased: several targets, one after the
    other; no effect with kl_placement none."""

    kl_target: Sequence[str] | str | None
    """KL to the start model to aim at, in nats with a unit (6/sequence or 0.05/token); several targets with --kl-
    schedule phased; unset: 6/sequence, or for phased 0.05/token 0.02/token 0.01/token; no effect with kl_schedule
    fixed or with kl_placement none."""

    kl_boundaries: Sequence[float] | None
    """Shares of the run (0 to 1) at which the next KL target starts; unset: phases of equal length; no effect without
    kl_schedule phased or with kl_placement none."""

    kl_horizon: int | None
    """Episodes over which beta reacts; a smaller number reacts faster; unset: 1/12 of the episodes of the shortest
    phase, at least those of two updates and at most 10,000, so that beta can change about 11-fold in a phase; no
    effect with kl_schedule fixed or with kl_placement none."""

    learning_rate: float
    """Learning rate at the start, or after the warm-up."""

    lr_schedule: Literal["cosine", "linear", "constant"]
    """Schedule of the learning rate over the run."""

    warmup_steps: float
    """Updates in which the learning rate rises linearly from 0; below 1: their share of the run."""

    weight_decay: float
    """Weight decay of AdamW: each optimizer step shrinks the weights by this value times the learning rate; biases and
    norms are excluded."""

    optim: Literal["adamw", "adamw_8bit"]
    """Optimizer. adamw: AdamW of torch, 8 bytes of state per trained weight; adamw_8bit: AdamW of bitsandbytes
    (Dettmers et al. 2022, arXiv 2110.02861), about 2 bytes per weight; embeddings and small tensors keep 8."""

    max_grad_norm: float
    """Gradient clipping: largest norm of the gradient."""

    seed: int
    """Random seed; all random numbers of the run depend on it; no effect with seeds."""

    deterministic: bool
    """Use deterministic algorithms: on one GPU, the same seed gives bit-identical weights, and a run is slower. On a
    CPU, runs are bit-identical without it."""

    seeds: Sequence[int] | None
    """Train one run per seed, one after the other, into OUTPUT_seed42 and so on; finished runs are skipped."""

    epochs: float | None
    """Length of the run: passes over the training prompts, or rounds over all topics with --steps-per-topic; unset: 3
    passes, or 1 round; no effect with num_iterations or with episodes."""

    num_iterations: int | None
    """Length of the run in updates, instead of --epochs; no effect with episodes."""

    episodes: int | None
    """Length of the run in generated completions, instead of --num-iterations: an equal budget for all algorithms."""

    eval_every: int
    """Updates between evaluations; the start model and the final weights are always evaluated."""

    eval_samples: int
    """Completions per evaluation prompt; above 1, pass@k is logged for --eval-func functions with values 0 and 1."""

    best_rule: str
    """How the best checkpoint is chosen, among those with a KL of at most 1.5 times the target (no such limit if beta
    is fixed). score: the highest score within --perplexity-gate; perplexity: the lowest perplexity; the name of an
    --eval-func: its highest value within --perplexity-gate."""

    perplexity_gate: float | None
    """Largest perplexity of the best checkpoint, as a multiple of the start model's (not with --best-rule perplexity);
    unset: 1.15 if a reward model gives scores, and no limit if only reward functions do, or if the text is the start
    model's own and there is a KL target; no effect with best_rule perplexity."""

    output: str
    """Run folder."""

    overwrite: bool
    """Replace the run in the output folder; the old run is removed when the new run is finished."""

    save_every: int
    """Updates between checkpoints; the last update is always saved."""

    keep: int
    """Number of checkpoints to keep, the newest ones."""

    resume: bool
    """Resume the run in the output folder from its newest valid checkpoint, with its settings."""

    parallel: bool
    """Train the runs of --seeds or --sweep at the same time, one per GPU, or on a CPU one per core; no effect without
    seeds or sweep."""

    sweep: Sequence[str] | str
    """Train one run per combination of these values, and per seed: NAME=VALUE,VALUE for any settings that change what
    is learned; in a setting that takes several values, separate these with spaces and quote the argument."""

    print_json: bool
    """Print the result as one JSON object in the last line of the output, for other programs; no effect with dry_run
    or with check or with scan."""

    ddp_timeout: float
    """Seconds after which a run on several processes ends if one of them does not answer."""

    rollback_on_kl: bool
    """After 3 updates in a row with a KL above 4 times the target, load the newest checkpoint from before them; no
    effect with kl_schedule fixed or with kl_placement none."""

    replay: str | None
    """Folder of an incident (a skipped update): repeat that update, print where the error starts, and stop."""

    resume_anyway: bool
    """Accept settings, data or library versions that differ from those of the resumed run; no effect without
    resume."""

    dry_run: bool
    """Print the plan and stop."""

    check: bool
    """Load everything, try one update, print the result of each check, and stop; the exit status is 2 if a check
    fails. Nothing is written to the output folder."""

    scan: bool
    """Sample completions of some training prompts with the start model, print what can be learned from them and
    recommended settings, and stop; the exit status is 2 if nothing can be learned. Nothing is written to the output
    folder."""

    scan_samples: int
    """Completions per prompt of --scan (at least K) and of --keep-pass-rate; no effect without scan or
    keep_pass_rate."""

    scan_prompts: int
    """Largest number of training prompts that --scan samples, the same number of each topic; no effect without
    scan."""

    report_to: Sequence[str] | str | None
    """Trackers that receive the run, in addition to TensorBoard, which is always written: wandb, trackio, mlflow
    (docs/trackers.md)."""

    record_tokens: bool
    """Save the log-probabilities, KL, advantage and other values of each token of some episodes, in RUN/tokens."""

    record_format: Literal["jsonl", "parquet"]
    """Format of the token record: one JSON object per line, or a Parquet table; no effect without record_tokens."""

    record_every: int
    """Updates between token records; the first update is always recorded; no effect without record_tokens."""

    record_prompts: int
    """Prompts in each token record, with all of their completions; no effect without record_tokens."""

    merge_lora: bool
    """Merge the LoRA adapter into its base model, in float32, and save the result in RUN/merged; no effect without
    use_lora."""

    export_from: Literal["final", "best"]
    """Weights to merge and to upload: those of the last update, or the best checkpoint; no effect without merge_lora
    or push_to_hub."""

    push_to_hub: str | None
    """Upload weights (the merged model with --merge-lora), tokenizer, model card and run.json to the Hugging Face hub,
    as owner/name."""

    hub_private: bool
    """Create the repository of --push-to-hub as private; an existing repository is not changed; no effect without
    push_to_hub."""
