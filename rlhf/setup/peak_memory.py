"""Computes the bytes that each phase of an update needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.prompts import Prompt
from rlhf.models.attention import packable
from rlhf.models.budget import Budget, budget_of
from rlhf.models.device import installed
from rlhf.models.logprobs import base_of
from rlhf.models.packing import MicroBatch
from rlhf.rollout.completions import Completions
from rlhf.rollout.continuous_batching import round_up
from rlhf.rollout.cpu_weights import prepackable_layers
from rlhf.rollout.engine import default_engine
from rlhf.rollout.vllm import MEMORY_SHARE
from rlhf.settings.training import Config
from rlhf.setup.footprint import FLOAT, Network, linear_floats, moments_8bit, weights_of
from rlhf.trainer.evaluation import fixed_text

# Bytes outside our tensors. CPU: library code and tables that are loaded on use (measured with a tiny model). GPU:
# cuBLAS's workspace (its documentation: 32 MiB on Hopper, 8 MiB elsewhere).
LIBRARIES = {"cpu": 60 * 2**20, "cuda": 32 * 2**20}
# Heap fragmentation on a CPU: the share of a forward pass's freed tensors whose memory is not reused. Measured for
# SmolLM2-135M with glibc 2.36: 0.30 (bfloat16) to 0.66 (float32). Not counted on a GPU.
GAPS = {"cpu": 0.5, "cuda": 0.0}
# Bytes per logit while a token is sampled: float32, and two float64 copies of the probabilities. Filters sort, too.
DRAWN, FILTERED = FLOAT + 16, FLOAT + 26
CACHED_FORWARD, GAPS_LEFT = "cached forward pass", "heap fragmentation"
# Copies of a chunk's logits if autograd differentiates the softmax: with an entropy bonus or --no-fused-head.
UNFUSED = 5


@dataclass(frozen=True)
class MemoryPlan:
    """Computes the memory of a run's phases from its settings and models."""

    config: Config
    device: torch.device
    policy: PreTrainedModel | PeftModel
    network: Network
    second: PreTrainedModel | None  # backbone of a critic that is a second network
    critic_network: Network | None  # its dimensions

    @property
    def budget(self) -> Budget:
        """The chunk sizes for this device."""
        return budget_of(self.device)

    # --- held throughout the run -------------------------------------------------------------------------------------

    @property
    def trained(self) -> int:
        """Bytes of the trained weights with the value head. Gradients take as many."""
        return weights_of(self.policy, trained=True) + self.critic(trained=True) + self.value_head

    @property
    def value_head(self) -> int:
        """Bytes of the value head."""
        hidden = (self.critic_network or self.network).hidden
        return (hidden + 1) * FLOAT if ALGORITHMS[self.config.algorithm].has_critic else 0

    @property
    def moments(self) -> int:
        """Bytes of AdamW's two moments. Those of the value head are float32 with 8-bit AdamW, too."""
        if self.config.optimizer.optim == "adamw":
            return 2 * self.trained
        critic = moments_8bit(self.second) if self.second is not None else 0
        return moments_8bit(self.policy) + critic + 2 * self.value_head

    def critic(self, trained: bool | None = None) -> int:
        """Return the bytes of a separate critic's backbone."""
        return weights_of(self.second, trained) if self.second is not None else 0

    def critic_activations(self, micro_batch: MicroBatch) -> int:
        """Return the bytes that a separate critic's backbone saves for the backward pass."""
        return self.critic_network.saved_activations(micro_batch) if self.critic_network is not None else 0

    @property
    def autocast_copies(self) -> int:
        """Bytes of autocast's 16-bit copies of the linear layers' weights."""
        return sum(w.numel() for w in linear_floats(base_of(self.policy))) * 2 if self.network.rounded else 0

    @property
    def critic_copies(self) -> int:
        """The same for a separate critic's backbone."""
        if self.second is None or not self.network.rounded:
            return 0
        return sum(w.numel() for w in linear_floats(self.second)) * 2

    @property
    def head(self) -> int:
        """Bytes of autocast's 16-bit copy of the language-model head."""
        return self.network.vocabulary * self.network.hidden * 2 if self.network.rounded else 0

    def held(self, reward_model: PreTrainedModel | None) -> dict[str, int]:
        """Return purpose -> bytes held throughout the run, from the first optimizer step on."""
        lora, whole = isinstance(self.policy, PeftModel), weights_of(self.policy)
        adapted = weights_of(self.policy, trained=True) if lora else 0
        return {
            "policy": whole - adapted,
            "adapters": adapted,
            "critic": self.critic(),
            "value head": self.value_head,
            "reference": 0 if lora else whole - self.autocast_copies,
            "reward model": weights_of(reward_model) if reward_model is not None else 0,
            "optimizer": self.moments,
            "vLLM": int(MEMORY_SHARE * installed(self.device)) if self.config.speed.rollout_engine == "vllm" else 0,
            "libraries": LIBRARIES[self.device.type],
        }

    # --- phases ------------------------------------------------------------------------------------------------------

    def micro_batches(self, prompts: Sequence[Prompt], minibatches: int = 1) -> list[MicroBatch]:
        """Return the micro-batches of the minibatch with the longest prompts, with completions of full length."""
        rows = sorted(prompts, key=lambda p: len(p.ids), reverse=True)[::minibatches]
        ids = torch.zeros(len(rows), self.config.sampling.max_new_tokens, dtype=torch.long)
        completions = Completions.of(rows, ids, eos=-1, pad=0, vocabulary=self.network.vocabulary)
        packed = self.config.speed.packed and packable(base_of(self.policy))
        most = self.config.batch.micro_batch_size, self.budget.tokens_per_micro_batch
        parts = completions.split(range(len(rows)), *most, packed)
        return [completions.micro_batch(part, packed) for part in parts]

    def allowed_tokens(self, completions: int) -> int:
        """Return the bytes of the allowed-token masks (top-k, top-p): one bit per vocabulary entry and position."""
        sampling = self.config.sampling
        return completions * sampling.max_new_tokens * self.network.vocabulary // 8 if sampling.filters else 0

    def rollout(self, prompts: Sequence[Prompt]) -> dict[str, int]:
        """Return purpose -> bytes for sampling one completion per prompt."""
        speed, network = self.config.speed, self.network
        plain = speed.rollout_engine == "plain" or default_engine(self.policy, self.device) == "plain"
        slots = len(prompts) if plain else min(len(prompts), speed.rollout_slots or self.budget.rollout_slots)
        longest = max(len(p.ids) for p in prompts)
        columns = round_up(longest + self.config.sampling.max_new_tokens, self.device)
        prompt_tokens = slots * longest if plain else sum(map(len, {p.ids for p in prompts[:slots]}))
        drawing = slots * network.vocabulary * (FILTERED if self.config.sampling.filters else DRAWN)
        return {
            "KV cache": network.cache(slots * columns),
            "prompt pass or sampling": max(network.forward_peak(prompt_tokens), drawing),
            **(
                {"16-bit weight copies": (self.autocast_copies + self.head) * network.whole}
                if plain
                else self.prepacked
            ),
        }

    @property
    def prepacked(self) -> dict[str, int]:
        """Bytes of the linear layers' copies in blocked layout for decoding on a CPU; otherwise autocast's copies."""
        layers = prepackable_layers(base_of(self.policy), self.device)
        if not layers:
            return {"16-bit weight copies": (self.autocast_copies + self.head) * self.network.whole}
        return {"blocked weight copies": sum(layer.weight.numel() for layer in layers) * self.network.element}

    def cached_forward(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Return purpose -> bytes of the first optimizer step's forward pass, if the rollout caches it."""
        network = self.network
        if self.config.batch.minibatches > 1 or len(micro_batches) > 1 or network.checkpointing or network.dropout:
            return {}
        kept = network.saved_activations(micro_batches[0]) + self.autocast_copies
        kept += self.critic_activations(micro_batches[0]) + self.critic_copies
        return {CACHED_FORWARD: kept, GAPS_LEFT: self.gaps(micro_batches[0])}

    def gaps(self, micro_batch: MicroBatch) -> int:
        return int(GAPS[self.device.type] * self.network.freed_in_forward(micro_batch.ids.numel()))

    def logprob_pass(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Return purpose -> bytes for computing log-probs under policy and reference model."""
        longest, most = max(p.ids.numel() for p in micro_batches), max(len(p.tokens) for p in micro_batches)
        cached_forward = self.cached_forward(micro_batches)
        return {
            "forward pass or logits": max(
                self.network.forward_peak(longest), self.allowed_mask(most) + self.logits(most)
            ),
            "16-bit weight copies": self.head
            + (0 if cached_forward else (self.autocast_copies + self.head) * self.network.whole),
            **cached_forward,
        }

    def logits(self, tokens: int, entropy: bool = False) -> int:
        """Return the peak bytes of logits: one chunk in the forward's precision, and float32 copies of a part of it
        (the logits, their exponentials, and with `entropy` the product of both)."""
        numbers = tokens * self.network.vocabulary
        together = min(numbers, self.budget.logits_per_chunk) * self.network.element
        return together + min(numbers, self.budget.floats_per_chunk) * FLOAT * (1 + self.network.rounded + entropy)

    def allowed_mask(self, tokens: int) -> int:
        """Return the bytes of the unpacked mask of allowed tokens, one per logit."""
        return tokens * self.network.vocabulary * self.config.sampling.filters

    def backward(self, micro_batch: MicroBatch, first: bool) -> dict[str, int]:
        """Return purpose -> bytes at the peak of one micro-batch's backward pass.

        The peak is at the language-model head (all activations saved), at the start of the policy's backbone after a
        separate critic's, at the first layer, or at the embeddings (all gradients exist).

        Args:
            micro_batch: the micro-batch.
            first: it is the first of its minibatch, so no gradients exist yet.
        """
        network, tokens = self.network, micro_batch.ids.numel()
        logits, left = self.chunk(micro_batch)
        copies = 0 if network.checkpointing else self.autocast_copies
        critic_copies = 0 if network.checkpointing else self.critic_copies
        at_head = {
            "activations": network.saved_activations(micro_batch) + self.critic_activations(micro_batch),
            "logits": logits + self.allowed_mask(len(micro_batch.tokens)),
            "gradients": left if first else self.trained,
            "16-bit weight copies": copies + critic_copies + self.head,
            GAPS_LEFT: self.gaps(micro_batch),
        }
        layers = (self.trained - self.head_gradient) // network.layers
        at_first_layer = {
            "activations": network.saved_by_layer(micro_batch) + network.backward_peak(tokens),
            "gradients": self.trained - layers * first,
            "16-bit weight copies": self.autocast_copies // network.layers,
            GAPS_LEFT: at_head[GAPS_LEFT],
        }
        at_embeddings = {"gradients": self.trained + self.head_gradient}
        at_policy = {  # the critic's backbone is done: autograd runs the forward passes in reverse order
            "activations": network.saved_activations(micro_batch) if self.second is not None else 0,
            "gradients": self.critic(trained=True) if first else self.trained,
            "16-bit weight copies": copies,
        }
        return max(at_head, at_policy, at_first_layer, at_embeddings, key=lambda parts: sum(parts.values()))

    @property
    def head_gradient(self) -> int:
        """Bytes of the gradient of the language-model head or of the embeddings; 0 if they are not trained."""
        return self.network.vocabulary * self.network.hidden * FLOAT * self.network.whole

    def chunk(self, micro_batch: MicroBatch) -> tuple[int, int]:
        """Return the bytes of one chunk's logits with their backward pass, and of the head's gradient if earlier
        chunks have accumulated one."""
        config, vocabulary, length = self.config, self.network.vocabulary, self.config.sampling.max_new_tokens
        most = max(1, self.budget.logits_per_chunk // vocabulary // length) * length
        tokens = min(len(micro_batch.tokens), most) if config.speed.fused_head else len(micro_batch.tokens)
        left = self.head_gradient if tokens < len(micro_batch.tokens) else 0
        if not config.speed.fused_head or config.batch.entropy_coef > 0:
            return UNFUSED * tokens * vocabulary * FLOAT, left
        probabilities = tokens * vocabulary * self.network.element
        back = self.head_gradient + (self.head if self.network.whole else 0)
        return max(self.logits(tokens, entropy=True), probabilities + back), left

    def reading(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> dict[str, int]:
        """Return purpose -> bytes for the perplexity of the evaluation text."""
        text = fixed_text(tokenizer, prompts, lambda _: [], self.config.data.eval_text)
        sizes = [(len(p.ids), len(r)) for p, r in zip(text.prompts, text.completions, strict=True)]
        sizes = sorted(
            sizes or [(len(p.ids), self.config.sampling.max_new_tokens) for p in prompts], key=lambda s: s[1]
        )
        most = self.budget.eval_batch_size
        parts = [sizes[at : at + most] for at in range(0, len(sizes), most)]
        tokens, most = max(sum(map(sum, part)) for part in parts), max(sum(r for _, r in part) for part in parts)
        return {
            "forward pass or logits": max(self.network.forward_peak(tokens), self.logits(most)),
            "16-bit weight copies": self.autocast_copies * self.network.whole + self.head,
        }


def scoring(judge: Network, prompts: Sequence[Prompt], max_new_tokens: int, batch_size: int) -> dict[str, int]:
    """Return purpose -> bytes of the reward model's pass over `batch_size` completions.

    Assumes that its tokenizer produces as many tokens as the policy's.
    """
    rows = sorted(len(p.ids) + max_new_tokens for p in prompts)[-batch_size:]
    tokens = len(rows) * rows[-1]
    return {"reward model's forward pass": judge.forward_peak(tokens)}
