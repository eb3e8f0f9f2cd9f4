"""Predicts the peak memory of a run.

The forecast is computed before a run from the shapes of its models, the settings and the lengths of the prompts. It
assumes that every completion has --max-new-tokens tokens. Each phase counts its largest tensors only: weights and
their copies, gradients, activations, a chunk of logits, the KV cache. On a GPU the peak is the memory that torch
allocates. On a CPU it is the resident memory of the process. Results and `memory/peak_gib` have the same meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.sampler import PromptSampler
from rlhf.models.budget import VLLM_MEMORY_SHARE, Budget, budget_of
from rlhf.models.device import autocast_dtype, installed
from rlhf.rollout.choice import KEPT_SHARE, choose_engine, graph_slots
from rlhf.settings.training import Config, SamplingSettings
from rlhf.setup.shape import FLOAT, Row, Shape
from rlhf.utils.console import gib

# Bytes outside our tensors. CPU: library code and tables that are loaded on use (measured with a tiny model). GPU:
# cuBLAS's workspace (its documentation: 32 MiB on Hopper, 8 MiB elsewhere).
LIBRARIES = {"cpu": 60 * 2**20, "cuda": 32 * 2**20}
IMPORTED = 570 * 2**20  # resident bytes after all imports; --dry-run imports less
# Heap fragmentation on a CPU: the share of a layer's temporary tensors whose memory is not reused. The free block of a
# tensor between two that are kept is too small for a tensor of the same size, because glibc's posix_memalign first
# looks for room to align it. Measured with glibc 2.36: 0.4 to 0.7, for two shapes with all weights and adapters.
HOLES = 0.57
UNFUSED = 5  # copies of a chunk's logits if autograd differentiates the softmax


@dataclass(frozen=True)
class Phase:
    """A part of an update or of an evaluation."""

    name: str
    parts: dict[str, int]  # purpose -> bytes

    @property
    def size(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Forecast:
    """The predicted memory of a run, in bytes."""

    held: dict[str, int]  # held throughout the run
    phases: list[Phase]  # needed in addition, one phase after another
    episodes: int  # of the largest micro-batch
    tokens: int  # of the largest micro-batch

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.size)

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + self.largest.size

    def rows(self, device: torch.device) -> list[tuple[str, str]]:
        """Return the plan's rows: the peak, its parts, and the peak of each phase."""
        held, parts = sum(self.held.values()), {**self.held, **self.largest.parts}
        named = sorted(((size, name) for name, size in parts.items() if size >= 2**20), reverse=True)
        return [
            (
                "memory",
                f"predicted peak {gib(self.peak)} of {gib(installed(device))} GiB (phase: {self.largest.name}); "
                f"largest micro-batch {self.episodes} episodes, {self.tokens:,} tokens",
            ),
            ("  parts, GiB", ", ".join(f"{name} {gib(size)}" for size, name in named)),
            ("  phases, GiB", ", ".join(f"{phase.name} {gib(held + phase.size)}" for phase in self.phases)),
        ]


@dataclass(frozen=True)
class Estimator:
    """Predicts the memory of a run for any settings, from its models and prompts."""

    policy: Shape
    reward_model: Shape | None
    device: torch.device
    train: Sequence[Any]  # prompts
    evaluation: Sequence[int]  # prompt lengths in tokens; empty: evaluations are ignored
    updates: int
    libraries: int = 0  # bytes in use before the models were loaded
    packs: bool = True  # the policy's episodes can be packed

    def __call__(self, config: Config) -> Forecast:
        """Return the forecast for these settings."""
        lengths = [len(p.ids) for p in longest_batch(config, self.train, self.updates)]
        return _Run(config, self, budget_of(self.device, config)).forecast(lengths)


def longest_batch(config: Config, prompts: Sequence[Any], updates: int) -> list[Any]:
    """Return the prompts of the update that has the most prompt tokens, one per episode, as the loop samples them."""
    return [
        prompt for prompt in PromptSampler(config, prompts).longest_batch(updates) for _ in range(config.group_size)
    ]


@dataclass(frozen=True)
class _Run:
    """The sums for one configuration."""

    config: Config
    given: Estimator
    budget: Budget

    @property
    def element(self) -> int:
        """Bytes of a number in the forward pass."""
        dtype = autocast_dtype(self.config.model.bf16, self.given.device)
        return FLOAT if dtype is None else dtype.itemsize

    @property
    def engine(self) -> str:
        """The rollout engine that samples."""
        return choose_engine(self.config.speed.rollout_engine, self.given.packs, self.given.device)

    @property
    def critic(self) -> Shape | None:
        """The backbone of a critic that is a second network."""
        if self.config.critic_from_reward_model and self.given.reward_model is not None:
            return self.given.reward_model
        return self.given.policy if self.config.separate_critic else None

    def trained(self, shape: Shape) -> int:
        """Return the bytes of a network's trained weights."""
        m = self.config.model
        return FLOAT * (shape.adapters(m.lora_r, m.lora_targets) if m.use_lora else shape.parameters)

    def frozen(self, shape: Shape, four_bit: bool = False) -> int:
        """Return the bytes of a network whose weights are not trained."""
        linear = shape.linear * (0.5 + FLOAT / 64) if four_bit else shape.linear * self.element  # a scale per 64
        return int(linear + FLOAT * (shape.parameters - shape.linear))

    @property
    def every_trained(self) -> int:
        value_head = FLOAT * (self.given.policy.hidden + 1) if ALGORITHMS[self.config.algorithm].has_critic else 0
        critic = self.trained(self.critic) if self.critic is not None else 0
        return self.trained(self.given.policy) + critic + value_head

    def held(self) -> dict[str, int]:
        """Return purpose -> bytes held throughout the run, from the first optimizer step on."""
        m, policy, reward_model = self.config.model, self.given.policy, self.given.reward_model
        own = self.trained(policy)
        critic = 0 if self.critic is None else self.trained(self.critic) + m.use_lora * self.frozen(self.critic)
        eight_bit = self.config.optimizer.optim == "adamw_8bit"
        whole = [] if m.use_lora else [policy, *filter(None, [self.critic])]
        embeddings = sum(FLOAT * (shape.parameters - shape.linear) for shape in whole)  # their moments are float32
        moments = 2 * (embeddings + (self.every_trained - embeddings) // FLOAT * (1 + FLOAT / 256))  # a scale per 256
        return {
            "policy": self.frozen(policy, m.load_in_4bit) if m.use_lora else own,
            "adapters": own if m.use_lora else 0,
            "critic": critic,
            "reference": 0 if m.use_lora else self.frozen(policy),
            "weight copies": self.cast_weights(),
            "reward model": self.frozen(reward_model) if reward_model is not None else 0,
            "optimizer": int(moments) if eight_bit else 2 * self.every_trained,
            "vLLM": int(VLLM_MEMORY_SHARE * installed(self.given.device)) if self.engine == "vllm" else 0,
            "libraries": self.given.libraries + LIBRARIES[self.given.device.type],
            **self.kept(),
        }

    def forecast(self, prompts: list[int]) -> Forecast:
        """Return the forecast for a batch of these prompt lengths."""
        row, m = self.micro_batch(prompts), self.config.model
        # an optimizer step on the whole batch in one micro-batch uses the forward pass of the log-probs
        reused = self.config.minibatch_size == row.episodes == len(prompts)
        kept = self.activations(row) if reused and not (m.gradient_checkpointing or m.has_adapter_dropout) else {}
        update = {
            "rollout": self.rollout(prompts, self.config.sampling),
            "log-probs": self.forward(row.tokens, row.completion) | kept,
            "scoring": self.scoring(prompts, kept),
            "backward pass": self.backward(row),
            "optimizer step": {"gradients": self.every_trained},
        }
        every = sorted([*self.given.evaluation] * self.config.run.eval_samples)
        rows, sampling = every[-self.budget.eval_batch_size :], self.config.eval_sampling
        length, masked = sampling.max_new_tokens, rows if self.config.run.eval_temperature == 0 else every
        evaluation = {
            "evaluation rollout": self.rollout(rows, sampling),
            "evaluation scoring": self.scoring(every, {}),
            "evaluation perplexity": self.forward(sum(rows) + len(rows) * length, len(rows) * length),
        }
        phases = [
            Phase(name, parts | {"token masks": self.token_masks(len(sampled), how)})
            for sampled, how, named in (
                (prompts, self.config.sampling, update),
                (masked, sampling, evaluation if every else {}),
            )
            for name, parts in named.items()
            if parts
        ]
        return Forecast(self.held(), phases, row.episodes, row.tokens)

    def micro_batch(self, prompts: list[int]) -> Row:
        """Return the largest micro-batch."""
        batch, length = self.config.batch, self.config.sampling.max_new_tokens
        packed = self.config.speed.packed and self.given.packs
        rows = sorted(prompts, reverse=True)[:: batch.minibatches]
        most = self.budget.tokens_per_micro_batch // max(1, length - 1) + 1  # episodes; fewer if prompts are long
        size = min(len(rows), batch.micro_batch_size or len(rows), most)
        shared = self.config.group_size if batch.minibatches == 1 and packed else 1
        while True:
            row = Row.of(rows[:size], length, packed, shared)
            if row.tokens <= self.budget.tokens_per_micro_batch or size == 1:
                return row
            size -= 1

    def token_masks(self, completions: int, sampling: SamplingSettings) -> int:
        """Return the bytes of the allowed-token masks (top-k, top-p): one bit per vocabulary entry and position."""
        return completions * sampling.max_new_tokens * self.given.policy.vocabulary // 8 if sampling.filters else 0

    def rollout(self, prompts: list[int], sampling: SamplingSettings) -> dict[str, int]:
        """Return purpose -> bytes for sampling one completion per prompt."""
        policy = self.given.policy
        plain = self.engine == "plain"
        if self.engine == "vllm" or not prompts:
            return {}  # vLLM's memory is held throughout the run
        slots = len(prompts) if plain else min(len(prompts), self.budget.rollout_slots)
        slots = graph_slots(slots, self.budget.rollout_slots) if self.engine == "graph" else slots
        prompt_tokens = slots * max(prompts) if plain else sum(sorted(prompts)[-slots:]) // self.config.group_size
        drawing = slots * policy.vocabulary * FLOAT * (8 if sampling.filters else 3)
        tokens = max(policy.forward_peak(prompt_tokens, self.element), drawing)
        decoding = {} if self.kept() else self.decoding(slots, max(prompts) + sampling.max_new_tokens)
        return {"prompt pass or sampling": tokens, **decoding}

    def decoding(self, slots: int, columns: int) -> dict[str, int]:
        """Return purpose -> bytes of the decoder and its KV cache."""
        cache = self.given.policy.layers * slots * columns * 2 * self.given.policy.kv * self.element
        return {"KV cache": cache, "decoder's weights": self.decoder_copies()}

    def kept(self) -> dict[str, int]:
        """Return purpose -> bytes that CUDA graphs keep between rollouts; {} if nothing is kept."""
        config, given, m = self.config, self.given, self.config.model
        if self.engine != "graph" or m.load_in_4bit:
            return {}
        length = max(config.sampling.max_new_tokens, config.eval_sampling.max_new_tokens)
        longest = max([*(len(prompt.ids) for prompt in given.train), *given.evaluation])
        evaluated = min(self.budget.eval_batch_size, len(given.evaluation) * config.run.eval_samples)
        rows = max(config.episodes_per_update, evaluated)
        slots = graph_slots(rows, self.budget.rollout_slots)
        parts = {**self.decoding(slots, longest + length), "kept masks": self.token_masks(rows, config.sampling)}
        return parts if sum(parts.values()) <= KEPT_SHARE * installed(given.device) else {}

    def scoring(self, prompts: list[int], kept: dict[str, int]) -> dict[str, int]:
        """Return purpose -> bytes for scoring a completion per prompt, with what is `kept` meanwhile; {} without a
        reward model."""
        reward_model, length = self.given.reward_model, self.config.sampling.max_new_tokens
        if reward_model is None or not prompts:
            return {}
        rows = sorted(prompts)[-self.budget.scored_together(max(prompts) + length) :]
        tokens = sum(rows) + len(rows) * length
        return {"reward model's forward pass": reward_model.forward_peak(tokens, self.element), **kept}

    def cast_weights(self) -> int:
        """Return the bytes of rlhf.models.cast_weights: the float32 weights of the products, in 16 bits."""
        policy, lora = self.given.policy, self.config.model.use_lora
        read = self.config.speed.packed and self.given.packs and self.element < FLOAT and not lora
        trained = sum(shape.matrices for shape in filter(None, [policy, self.critic]))
        return self.head_copy * (policy.tied or not lora) + self.element * trained * read

    @property
    def head_copy(self) -> int:
        """Bytes of a head that is stored in 32 bits, in 16 bits; 0 if the forward pass is in float32."""
        return self.given.policy.vocabulary * self.given.policy.hidden * self.element if self.element < FLOAT else 0

    def decoder_copies(self) -> int:
        """Return the bytes of the copies of weights that decoding uses."""
        policy, m, half = self.given.policy, self.config.model, self.element < FLOAT
        if self.engine == "plain" or m.load_in_4bit:
            return self.head_copy
        head, gpu = policy.vocabulary * policy.hidden, self.given.device.type == "cuda"
        targets = m.lora_targets if m.use_lora else ()
        apart = policy.adapters(m.lora_r, targets) if half else 0
        if gpu and (m.use_lora or not half):  # the weights are stored in the precision of the products
            merged = policy.layers * policy.copied_by_decoder(() if half else targets)
            return (merged + apart + (head if half and policy.tied else 0)) * self.element
        exchanged = policy.layers * policy.hidden * (policy.q + policy.kv) if gpu else 0
        return (policy.matrices + head + exchanged + apart) * self.element

    def logits(self, completion: int) -> int:
        """Return the bytes of a chunk of logits: in the forward's precision, and a part of them in float32."""
        numbers = completion * self.given.policy.vocabulary
        chunk, masks = min(numbers, self.budget.logits_per_chunk), numbers * self.config.sampling.filters
        return chunk * self.element + min(chunk, self.budget.floats_per_chunk) * FLOAT * 2 + masks

    def forward(self, tokens: int, completion: int) -> dict[str, int]:
        """Return purpose -> bytes of a pass without gradients."""
        passed = self.given.policy.forward_peak(tokens, self.element)
        reference = 0 if self.config.model.use_lora else self.head_copy
        return {"forward pass or logits": max(passed, self.logits(completion)), "reference's head": reference}

    def activations(self, row: Row) -> dict[str, int]:
        """Return purpose -> bytes that the forward pass over a micro-batch keeps until its backward pass."""
        m, parts, on_cpu = self.config.model, {}, self.given.device.type == "cpu"
        targets, attention = m.lora_targets if m.use_lora else None, FLOAT if on_cpu else self.element
        for owner, shape in (("", self.given.policy), ("critic's ", self.critic)):
            if shape is not None:
                each = shape.saved_by_layer(row, self.element, attention, targets)
                inputs = FLOAT * row.tokens * shape.hidden
                kept = shape.layers * inputs + each if m.gradient_checkpointing else shape.layers * each
                holes = HOLES * shape.layers * row.tokens * shape.temporary(self.element, targets or ())
                parts |= {f"{owner}activations": kept, f"{owner}heap fragmentation": on_cpu * int(holes)}
        return parts

    def backward(self, row: Row) -> dict[str, int]:
        """Return purpose -> bytes at the peak of the backward passes: at the head, in the first micro-batch or in the
        next one, which finds gradients; or at the policy's first layer, with all gradients and after the critic."""
        config, policy, saved = self.config, self.given.policy, self.activations(row)
        numbers = row.completion * policy.vocabulary  # logits of the whole micro-batch, or of a chunk of completions
        numbers = min(numbers, max(self.budget.logits_per_chunk, numbers // row.episodes))
        head = 0 if config.model.use_lora else FLOAT * policy.vocabulary * policy.hidden  # its gradient
        logits = max(self.logits(numbers // policy.vocabulary), numbers * self.element + head)
        if config.batch.entropy_coef > 0:
            logits = UNFUSED * numbers * FLOAT
        at_head = {**saved, "logits": logits}
        at_head["gradients"] = head * (numbers < row.completion * policy.vocabulary)  # of earlier chunks
        rest = min(1, self.config.minibatch_size / row.episodes - 1)  # share of the next micro-batch
        at_next_head = {name: int(rest * size) for name, size in at_head.items()} | {"gradients": self.every_trained}
        filled = policy.layers if config.model.gradient_checkpointing else 1  # the gradients fill other layers' holes
        at_first_layer = {
            "activations": policy.saved_by_layer(row, self.element, FLOAT, None) + 8 * row.tokens * policy.inner,
            "gradients": self.every_trained + head,
            "heap fragmentation": saved["heap fragmentation"] // filled,
        }
        return max(at_head, at_next_head, at_first_layer, key=lambda parts: sum(parts.values()))
