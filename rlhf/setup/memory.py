"""Estimates the peak memory of a run.

The estimate is computed before a run from the shapes of its models, the settings and the lengths of the prompts. It
assumes that every completion has --max-new-tokens tokens, counts the largest tensors (weights, gradients, optimizer,
activations, logits, KV cache), and is rounded up: it is usually above the measured peak. On a GPU the peak is the
memory that torch allocates. On a CPU it is the resident memory of the process, which can grow further in a long run,
because the heap fragments. Results and `memory/peak_gib` have the same meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.prompts import or_longest
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
# A CPU's heap does not reuse all the memory of a layer's temporary tensors. torch's allocator on a GPU does.
NOT_REUSED = {"cpu": 0.5, "cuda": 0.0}  # times the activations
ROUNDED_UP = 1.2  # the estimate of a decoder is at most so many times its size
UNFUSED = 5  # copies of a chunk's logits if autograd differentiates the softmax


@dataclass(frozen=True)
class Forecast:
    """The estimated memory of a run, in bytes."""

    held: dict[str, int]  # purpose -> bytes held throughout the run
    phases: dict[str, dict[str, int]]  # part of an update or of an evaluation -> purpose -> bytes in addition
    episodes: int  # of the largest micro-batch
    tokens: int  # of the largest micro-batch

    @property
    def parts(self) -> dict[str, int]:
        """Purpose -> bytes at the peak."""
        return self.held | max(self.phases.values(), key=lambda parts: sum(parts.values()))

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    def rows(self, total: int) -> list[tuple[str, str]]:
        """Return the plan's rows: the peak and its parts. `total` is the device's memory in bytes."""
        named = sorted(((size, name) for name, size in self.parts.items() if size >= 2**20), reverse=True)
        return [
            (
                "memory",
                f"predicted peak {gib(self.peak)} of {gib(total)} GiB; largest micro-batch {self.episodes} episodes, "
                f"{self.tokens:,} tokens",
            ),
            ("  parts, GiB", ", ".join(f"{name} {gib(size)}" for size, name in named)),
        ]


@dataclass(frozen=True)
class Estimator:
    """Estimates the memory of a run for any settings, from its models and prompts."""

    policy: Shape
    reward_model: Shape | None
    device: torch.device
    train: Sequence[Any]  # prompts
    evaluation: Sequence[int]  # prompt lengths in tokens; empty: evaluations are ignored
    updates: int
    libraries: int = 0  # bytes in use before the models were loaded
    packs: bool = True  # the policy's episodes can be packed
    memory: int | None = None  # bytes of the device; None: those of this machine
    teacher: Shape | None = None
    environment: Any = None  # None: without one

    @property
    def total(self) -> int:
        """Bytes of the device's memory."""
        return installed(self.device) if self.memory is None else self.memory

    def __call__(self, config: Config) -> Forecast:
        """Return the forecast for these settings."""
        given = self
        if self.environment is not None:  # `reset` can make every prompt as long as --prompt-length
            given = replace(self, train=[], evaluation=[config.data.prompt_length] * len(self.evaluation))
        lengths = [len(p.ids) for p in longest_batch(config, given.train, self.updates)]
        return _Run(config, given, budget_of(self.device, config)).forecast(lengths)


def longest_batch(config: Config, prompts: Sequence[Any], updates: int) -> list[Any]:
    """Return the prompts of the update that has the most prompt tokens, one per episode, as the loop samples them."""
    return [
        prompt
        for prompt in PromptSampler(config, or_longest(prompts, config.data)).longest_batch(updates)
        for _ in range(config.group_size)
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

    @property
    def networks(self) -> list[Shape]:
        """The backbones that are trained."""
        return [shape for shape in (self.given.policy, self.critic) if shape is not None]

    @property
    def evaluated(self) -> list[int]:
        """Lengths in tokens of the prompts of an evaluation's completions, the shortest first."""
        return sorted([*self.given.evaluation] * self.config.run.eval_samples)

    def trained(self, shape: Shape) -> int:
        """Return the bytes of a network's trained weights."""
        m = self.config.model
        return FLOAT * (shape.adapters(m.lora_r, m.lora_targets) if m.use_lora else shape.parameters)

    def frozen(self, shape: Shape | None, four_bit: bool = False) -> int:
        """Return the bytes of a network whose weights are not trained; 0 without one."""
        if shape is None:
            return 0
        linear = shape.linear * (0.5 + FLOAT / 64) if four_bit else shape.linear * self.element  # a scale per 64
        return int(linear + FLOAT * (shape.parameters - shape.linear))

    @property
    def every_trained(self) -> int:
        value_head = FLOAT * (self.given.policy.hidden + 1) if ALGORITHMS[self.config.algorithm].has_critic else 0
        return sum(map(self.trained, self.networks)) + value_head

    def forecast(self, prompts: list[int]) -> Forecast:
        """Return the forecast for a batch of these prompt lengths."""
        row = self.micro_batch(prompts)
        phases = {
            "sampling": self.sampling(prompts),
            "evaluation": self.evaluation(),
            "scoring": self.scoring(prompts),
            "teacher": self.teacher_pass(row),
            "update": {
                "gradients": self.every_trained,
                "activations": self.activations(row),
                "logits": self.logits(row),
            },
        }
        return Forecast(self.held(), phases, row.episodes, row.tokens)

    def held(self) -> dict[str, int]:
        """Return purpose -> bytes held throughout the run, from the first optimizer step on."""
        m = self.config.model
        policy = self.given.policy
        own = self.trained(policy)
        critic = 0 if self.critic is None else self.trained(self.critic) + m.use_lora * self.frozen(self.critic)
        sampled = self.config.sampling
        evaluated = self.config.eval_sampling
        trained = self.config.most_episodes(1)  # with a draw of dynamic sampling, which is one more rollout
        masks = max(self.token_masks(trained, sampled), self.token_masks(len(self.evaluated), evaluated))
        return {
            "policy": self.frozen(policy, m.load_in_4bit) if m.use_lora else own,
            "adapters": own if m.use_lora else 0,
            "critic": critic,
            "reference": 0 if m.use_lora else self.frozen(policy),
            "weight copies": self.cast_weights(),
            "reward model": self.frozen(self.given.reward_model),
            "teacher": self.frozen(self.given.teacher),
            "optimizer": self.moments(),
            "token masks": masks,
            "vLLM": int(VLLM_MEMORY_SHARE * self.given.total) if self.engine == "vllm" else 0,
            "libraries": self.given.libraries + LIBRARIES[self.given.device.type],
            **(self.decoding() if self.keeps_decoder else {}),
        }

    def moments(self) -> int:
        """Return the bytes of Adam's moments. 8-bit Adam stores those of embeddings in float32."""
        if self.config.optimizer.optim != "adamw_8bit":
            return 2 * self.every_trained
        whole = [] if self.config.model.use_lora else self.networks
        embeddings = sum(FLOAT * (shape.parameters - shape.linear) for shape in whole)
        eight_bit = (self.every_trained - embeddings) // FLOAT * (1 + FLOAT / 256)  # a scale per 256
        return int(2 * (embeddings + eight_bit))

    def cast_weights(self) -> int:
        """Return the bytes of rlhf.models.cast_weights: the float32 weights of the products, in 16 bits."""
        policy = self.given.policy
        lora = self.config.model.use_lora
        if self.element == FLOAT:
            return 0
        head = policy.vocabulary * policy.hidden * (policy.tied or not lora)
        read = self.config.speed.packed and self.given.packs and not lora
        return self.element * (head + read * sum(shape.matrices for shape in self.networks))

    def token_masks(self, completions: int, sampling: SamplingSettings) -> int:
        """Return the bytes of the allowed-token masks (top-k, top-p): one bit per vocabulary entry and position, those
        of the sampler and those of the rollout."""
        tokens = self.config.episode_tokens
        return 2 * completions * tokens * self.given.policy.vocabulary // 8 if sampling.filters else 0

    # --- sampling and scoring ----------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Completions sampled at the same time, in training or in an evaluation."""
        evaluated = min(len(self.evaluated), self.budget.rollout_slots)
        most = max(self.config.most_episodes(1), evaluated)
        if self.engine == "plain":
            return most
        if self.engine == "graph":
            return graph_slots(most, self.budget.rollout_slots)
        return min(most, self.budget.rollout_slots)

    @property
    def columns(self) -> int:
        """Tokens of the longest text, for which the KV cache has room."""
        lengths = [len(prompt.ids) for prompt in or_longest(self.given.train, self.config.data)]
        return max([*lengths, *self.given.evaluation]) + self.config.episode_tokens

    def decoding(self) -> dict[str, int]:
        """Return purpose -> bytes of the KV cache and of the decoder's copies of the weights."""
        policy = self.given.policy
        cache = policy.layers * self.slots * self.columns * 2 * policy.kv * self.element
        head = policy.vocabulary * policy.hidden
        rotated = policy.layers * policy.hidden * (policy.q + policy.kv)  # once more, with exchanged halves
        copied = head if self.engine == "plain" or self.config.model.load_in_4bit else policy.matrices + head + rotated
        return {"KV cache": cache, "decoder's weights": copied * self.element}

    @property
    def keeps_decoder(self) -> bool:
        """True if CUDA graphs keep the decoder between rollouts."""
        if self.engine != "graph" or self.config.model.load_in_4bit:
            return False
        return sum(self.decoding().values()) <= ROUNDED_UP * KEPT_SHARE * self.given.total

    def sampling(self, prompts: list[int]) -> dict[str, int]:
        """Return purpose -> bytes for sampling one completion per prompt, or those of an evaluation."""
        if self.engine == "vllm":
            return {}  # its memory is held throughout the run
        policy = self.given.policy
        config = self.config
        together = sum(sorted(prompts)[-self.slots :]) // config.group_size
        if self.given.environment or config.batch.max_episode_tokens:
            together = self.slots * self.columns  # a later turn reads all texts again, and no two are equal
        tokens = max(together, sum(self.evaluated[-self.slots :]))
        drawing = self.slots * policy.vocabulary * FLOAT * (8 if config.sampling.filters else 3)
        passed = max(policy.forward_peak(tokens, self.element), drawing)
        return {"prompt pass or sampling": passed, **({} if self.keeps_decoder else self.decoding())}

    def evaluation(self) -> dict[str, int]:
        """Return purpose -> bytes for the perplexity of an evaluation."""
        length = self.config.episode_tokens
        rows = self.evaluated[-self.budget.eval_batch_size :]
        passed = self.given.policy.forward_peak(sum(rows) + len(rows) * length, self.element)
        return {"forward pass": passed, "logits": self.chunk(len(rows) * length)}

    def scoring(self, prompts: list[int]) -> dict[str, int]:
        """Return purpose -> bytes of the reward model's forward pass; {} without a reward model."""
        if self.given.reward_model is None:
            return {}
        longest = self.columns
        texts = min(self.budget.scored_together(longest), max(len(prompts), len(self.evaluated)))
        return {"reward model's forward pass": self.given.reward_model.forward_peak(texts * longest, self.element)}

    def teacher_pass(self, row: Row) -> dict[str, int]:
        """Return purpose -> bytes of the teacher's forward pass over a micro-batch; {} without a teacher."""
        if self.given.teacher is None:
            return {}
        passed = self.given.teacher.forward_peak(row.tokens, self.element)
        return {"teacher's forward pass": passed, "logits": self.chunk(row.completion)}

    # --- the optimizer step ------------------------------------------------------------------------------------------

    def micro_batch(self, prompts: list[int]) -> Row:
        """Return the largest micro-batch."""
        batch = self.config.batch
        length = self.config.episode_tokens
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

    def activations(self, row: Row) -> int:
        """Return the bytes that the forward pass over a micro-batch keeps until its backward pass."""
        m = self.config.model
        device = self.given.device.type
        targets = m.lora_targets if m.use_lora else None
        attention = FLOAT if device == "cpu" else self.element
        kept = 0
        for shape in self.networks:
            layer = shape.saved_by_layer(row, self.element, attention, targets)
            inputs = FLOAT * row.tokens * shape.hidden
            kept += shape.layers * inputs + layer if m.gradient_checkpointing else shape.layers * layer
            kept += int(NOT_REUSED[device] * shape.layers * layer)
        return kept

    def chunk(self, completion: int) -> int:
        """Return the bytes of a chunk of logits: in the forward's precision, and a part of them in float32."""
        numbers = completion * self.given.policy.vocabulary
        chunk = min(numbers, self.budget.logits_per_chunk)
        masks = numbers * self.config.sampling.filters
        return chunk * self.element + min(chunk, self.budget.floats_per_chunk) * FLOAT * 2 + masks

    def logits(self, row: Row) -> int:
        """Return the bytes of the logits of a micro-batch in its backward pass."""
        numbers = row.completion * self.given.policy.vocabulary
        numbers = min(numbers, max(self.budget.logits_per_chunk, numbers // row.episodes))
        if self.config.batch.entropy_coef > 0:
            return UNFUSED * numbers * FLOAT
        return max(self.chunk(row.completion), numbers * self.element)
