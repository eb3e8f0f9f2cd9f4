"""The keyword arguments of `make_config`, for editors and type checkers.

Written by `python -m tests.settings.write_keywords` from the declared settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class TrainingSettings(TypedDict, total=False):
    """All settings of a training run, by their first names. Other names of the settings work, too."""

    actor_model: str
    """Start model: a folder or a hub name."""

    rm_model: str | None
    """Reward model: a folder or a hub name; none: rules alone (--reward-func)."""

    allow_weak_reward_model: bool
    """Go on with a reward model whose held-out accuracy is under 0.6 or under its length baseline."""

    use_lora: bool
    """Train low-rank adapters instead of all weights; in a YAML file, a block `lora:` turns them on."""

    lora_r: int
    """Rank of the adapters."""

    lora_alpha: float
    """Scaling of the adapters: their output is multiplied by alpha / r."""

    lora_dropout: float
    """Share of the adapters' inputs dropped at random in optimizer steps, never in measuring."""

    lora_targets: Sequence[str] | str
    """Modules that get an adapter; all-linear: every linear layer but the head."""

    load_in_4bit: bool
    """Keep the frozen weights in 4 bits (NF4); needs --use-lora."""

    bf16: bool | None
    """Bfloat16 autocast; unset: on a CUDA card that really has it, else float32."""

    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, slower."""

    prompts: str
    """Pairs, prompts or chats: a JSONL file or a hub dataset."""

    split: str | None
    """Percent of questions for reward model / RL / evaluation; unset: 45/45/10, or 0/90/10 without pairs."""

    steps_per_topic: int | None
    """Updates on the prompts of one topic (their column `topic`) before the next topic's, round and round; unset:
    topics are not looked at."""

    plain_prompts: bool
    """Read prompts as plain text although the start model has a chat template: the reply follows at once, as base
    models are used."""

    max_prompts: int
    """Training prompts used at most."""

    prompt_length: int
    """Tokens; longer prompts are left out and counted."""

    eval_prompts: int
    """Evaluation prompts used at most."""

    eval_text: str | None
    """Text file whose perplexity is followed; unset: the held-out chosen replies, and without pairs one sample of the
    start model's replies."""

    max_new_tokens: int
    """New tokens per reply at most."""

    temperature: float
    """Sampling temperature; log-probabilities and KL are taken at it too."""

    top_k: int
    """Sample among the k likeliest tokens; 0 is off."""

    top_p: float
    """Sample within the smallest set of tokens that holds this probability; below 1 the KL is taken within that set
    and sees less of the drift."""

    batch_size: int
    """Prompts per update; with --K, so many completions of each."""

    ppo_epochs: int
    """Passes over each rollout, in every algorithm."""

    minibatches: int
    """Optimizer steps per pass; must divide the episodes of an update."""

    micro_batch_size: int
    """Episodes per forward pass; 0: as many as 16,384 tokens hold on a card, 1,024 on a CPU. Changes memory, not the
    result."""

    gradient_accumulation_steps: int | None
    """Micro-batches whose gradients add up to an optimizer step, in place of --minibatches: each step is on --micro-
    batch-size times as many episodes, or, where that is 0, in so many parts; unset: --minibatches."""

    clip_range: float
    """The ratio is clipped to 1 +- this."""

    entropy_coef: float
    """Weight of the entropy bonus, per nat per token."""

    rollout_engine: Literal["auto", "plain", "slots", "graph", "vllm"]
    """How replies are sampled: all to the end (plain), in slots that waiting prompts take over (slots), so with the
    decoding step as a CUDA graph (graph), or by an installed vLLM; auto: graph on a CUDA card, else slots."""

    rollout_slots: int
    """Replies sampled at a time; 0: 256 on a card, 32 on a CPU."""

    packed: bool
    """Run no padding through the layers, and a prompt once for all its replies."""

    fused_head: bool
    """Build the gradients of the language-model head chunk by chunk."""

    critic: Literal["shared", "separate"]
    """The value head reads the policy's hidden states (shared), or those of a second backbone, trained beside it:
    twice the weights and moments, and twice the backward pass (separate)."""

    value_coef: float
    """Weight of the value loss (0.5 x mean squared error)."""

    value_clip_range: float
    """The value moves at most this far per rollout, score units."""

    gamma: float
    """Discount per token."""

    lam: float
    """GAE lambda."""

    whiten_rewards: bool
    """Divide the rewards by their standard deviation over the batch."""

    whiten_advantages: bool
    """Shift and scale the advantages to mean 0, variance 1 over the batch."""

    kl_penalty_at: Literal["token", "eos"]
    """Charge the KL at each token, or its sum at EOS."""

    K: int | None
    """Completions per prompt: a group, compared with each other."""

    scale_rewards: Literal["none", "group", "batch"]
    """Divide the advantages r - mean(r) by the standard deviation of the group or of the batch, or not at all."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo", "gspo"]
    """The clipped loss averaged over tokens (dapo), over each completion's tokens and then the completions (grpo), or
    over a constant length (dr_grpo); one ratio per completion (gspo); capped ratios as weights (cispo)."""

    reward_func: Sequence[str] | str
    """Rules beside the reward model: length_penalty, word_penalty, keyword_bonus, or FILE.py:NAME in TRL's
    signature."""

    reward_weights: Sequence[float] | None
    """Weights of the reward model (where there is one) and of each --reward-func, in order; unset: all 1."""

    reward_timeout: float
    """Seconds that a rule may take for a batch of replies, or the run stops."""

    keywords: Sequence[str] | str
    """Words of which one earns keyword_bonus, in any case."""

    missing_eos_penalty: float
    """Subtracted from the score of a reply that does not end, score units."""

    normalize_scores: bool
    """Divide the scores by running estimates of their mean and spread."""

    score_ema: float
    """Weight of the old estimates in the running ones."""

    kl_coef: float
    """Beta at the start, score units per nat."""

    kl_placement: Literal["reward", "loss", "none"]
    """Charge the KL in the reward, in the loss (k3 x ratio, docs/kl.md), or only log it."""

    kl_schedule: Literal["fixed", "adaptive", "phased"]
    """How beta is steered."""

    kl_target: Sequence[str] | str | None
    """KL to hold, in nats with the unit, and several under phased; unset: 6/sequence, and under phased 0.05/token
    0.02/token 0.01/token."""

    kl_boundaries: Sequence[float] | None
    """Shares of the run at which the next target comes into force; unset: equal phases."""

    kl_horizon: int | None
    """Episodes over which beta reacts: a small number reacts fast; unset: a twelfth of the episodes of the shortest
    phase, at least two updates' and at most 10,000, so that beta can move about 11-fold in a phase."""

    learning_rate: float
    """Learning rate at the start."""

    lr_schedule: Literal["cosine", "linear", "constant"]
    """Learning rate over the run."""

    max_grad_norm: float
    """Gradients are scaled down to this norm."""

    seed: int
    """All randomness derives from it."""

    deterministic: bool
    """Use deterministic algorithms: on one GPU the same seed then gives the same weights to the bit, and a run is
    slower. On a CPU runs repeat to the bit without it."""

    seeds: Sequence[int] | None
    """One run after another with these seeds, into OUTPUT_seed42 and so on; finished ones are skipped."""

    epochs: float | None
    """Passes over the training prompts, with --steps-per-topic rounds of all topics; unset: 3 passes, or one round."""

    num_iterations: int | None
    """Updates, in place of --epochs."""

    episodes: int | None
    """Generated replies, in place of --num-iterations: an equal budget for all algorithms."""

    eval_every: int
    """Updates between evaluations; the start and the end are always evaluated."""

    best_rule: Literal["score", "perplexity"]
    """What makes the best checkpoint, among those of at most 1.5 times the KL target (where beta is steered): the
    highest score (within --perplexity-gate), or the lowest perplexity."""

    perplexity_gate: float
    """Largest perplexity of a best checkpoint under --best-rule score, times the start's."""

    output: str
    """Folder of the run."""

    overwrite: bool
    """Replace the run that is in the output folder; it is removed when the new run is finished."""

    save_every: int
    """Updates between checkpoints; the last update is always saved."""

    keep: int
    """Checkpoints kept, the newest ones."""

    resume: bool
    """Go on from the output folder's newest sound checkpoint, with that run's settings."""

    rollback_on_kl: bool
    """After 3 updates in a row beyond 4 times the KL target: back to the last checkpoint's weights from before."""

    replay: str | None
    """An incident's folder: do its update again, look for the fault, and stop."""

    resume_anyway: bool
    """With --resume: go on although settings, data or versions are not the run's."""

    dry_run: bool
    """Print the plan and stop."""

    check: bool
    """Load everything, try one update out, print what each check found and stop; exit status 2 where one fails.
    Nothing is written into the output folder."""

    record_tokens: bool
    """Keep what the trainer saw of every token of some episodes, in RUN/tokens."""

    record_format: Literal["jsonl", "parquet"]
    """A JSON object a line, or a Parquet table."""

    record_every: int
    """Updates between records; the first update is always recorded."""

    record_prompts: int
    """Prompts recorded of such an update, each with all its replies."""

    merge_lora: bool
    """Merge the adapter into its base, in float32, and save that whole model in RUN/merged; needs --use-lora."""

    export_from: Literal["final", "best"]
    """Of a run's weights, those that are merged and pushed."""

    push_to_hub: str | None
    """Upload weights (with --merge-lora the merged model's), tokenizer, model card and run.json to the Hugging Face
    hub, as owner/name."""

    hub_private: bool
    """A repository that --push-to-hub makes is private; one that is there stays as it is."""
