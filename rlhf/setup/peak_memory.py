"""The tensors that each phase of an update holds, in bytes."""

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
from rlhf.models.logprobs import backbone_of, base_of
from rlhf.models.packing import MicroBatch
from rlhf.rollout.completions import Completions
from rlhf.rollout.continuous_batching import KV_BLOCK
from rlhf.rollout.cpu_weights import prepackable_layers
from rlhf.rollout.engine import default_engine
from rlhf.rollout.vllm import MEMORY_SHARE
from rlhf.settings.training import Config
from rlhf.setup.footprint import FLOAT, Network, linear_floats, weights_of
from rlhf.trainer.evaluation import fixed_text

# Bytes that are no tensor of ours: libraries' code and tables touched in use (found with a tiny model); on a card
# cuBLAS's workspace (its documentation: 32 MiB on Hopper, 8 elsewhere).
LIBRARIES = {"cpu": 60 * 2**20, "cuda": 32 * 2**20}
# On a processor, the share of a forward pass's dropped tensors whose place is not filled again: the C library's heap
# keeps gaps. Found at SmolLM2-135M's shape with glibc 2.36: 0.30 (bfloat16) to 0.66 (float32). A card has none.
GAPS = {"cpu": 0.5, "cuda": 0.0}
# Bytes of a logit while a token is drawn: float32, and probabilities in float64 twice; filters sort, too.
DRAWN, FILTERED = FLOAT + 16, FLOAT + 26
CACHED_FORWARD, GAPS_LEFT = "first step's pass", "gaps in the heap"
# Copies of a chunk's logits where autograd goes through the softmax: entropy bonus, or --no-fused-head.
UNFUSED = 5


@dataclass(frozen=True)
class MemoryPlan:
    """What the phases of a run have in common."""

    config: Config
    device: torch.device
    policy: PreTrainedModel | PeftModel
    network: Network

    @property
    def budget(self) -> Budget:
        """How much the device computes at once."""
        return budget_of(self.device)

    # --- what is held ------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> int:
        """Trained weights, the value head's among them; as much for their gradients, and for each of two moments."""
        head = (self.network.hidden + 1) * FLOAT if ALGORITHMS[self.config.algorithm].has_critic else 0
        return weights_of(self.policy, trained=True) + self.critic(trained=True) + head

    def critic(self, trained: bool | None = None) -> int:
        """Weights of a critic's own backbone."""
        return weights_of(backbone_of(self.policy), trained) if self.config.separate_critic else 0

    @property
    def passes(self) -> int:
        """Backbones whose tensors are kept together for the backward pass."""
        return 1 + self.config.separate_critic

    @property
    def autocast_copies(self) -> int:
        """What autocast's copies take of the linear layers' weights."""
        return sum(w.numel() for w in linear_floats(base_of(self.policy))) * 2 if self.network.rounded else 0

    @property
    def head(self) -> int:
        """The same of the language-model head."""
        return self.network.vocabulary * self.network.hidden * 2 if self.network.rounded else 0

    def held(self, reward_model: PreTrainedModel | None) -> dict[str, int]:
        """Throughout the run, from the first optimizer step on."""
        lora, whole = isinstance(self.policy, PeftModel), weights_of(self.policy)
        adapted = weights_of(self.policy, trained=True) if lora else 0
        return {
            "policy": whole - adapted,
            "adapters": adapted,
            "critic": self.critic(),
            "value head": (self.network.hidden + 1) * FLOAT if ALGORITHMS[self.config.algorithm].has_critic else 0,
            "reference": 0 if lora else whole - self.autocast_copies,
            "reward model": weights_of(reward_model) if reward_model is not None else 0,
            "optimizer": 2 * self.trained,
            "vLLM": int(MEMORY_SHARE * installed(self.device)) if self.config.speed.rollout_engine == "vllm" else 0,
            "libraries": LIBRARIES[self.device.type],
        }

    # --- what is run -------------------------------------------------------------------------------------------------

    def micro_batches(self, prompts: Sequence[Prompt], minibatches: int = 1) -> list[MicroBatch]:
        """The forward passes over a minibatch of these prompts with full replies; their prompts are as long as any."""
        rows = sorted(prompts, key=lambda p: len(p.ids), reverse=True)[::minibatches]
        ids = torch.zeros(len(rows), self.config.sampling.max_new_tokens, dtype=torch.long)
        completions = Completions.of(rows, ids, eos=-1, pad=0, vocabulary=self.network.vocabulary)
        packed = self.config.speed.packed and packable(base_of(self.policy))
        most = self.config.batch.micro_batch_size, self.budget.tokens_per_micro_batch
        parts = completions.split(range(len(rows)), *most, packed)
        return [completions.micro_batch(part, packed) for part in parts]

    def allowed_tokens(self, completions: int) -> int:
        """A bit for each token that might have been sampled."""
        sampling = self.config.sampling
        return completions * sampling.max_new_tokens * self.network.vocabulary // 8 if sampling.filters else 0

    def rollout(self, prompts: Sequence[Prompt]) -> dict[str, int]:
        """Sampling a reply to each."""
        speed, network = self.config.speed, self.network
        plain = speed.rollout_engine == "plain" or default_engine(self.policy, self.device) == "plain"
        slots = len(prompts) if plain else min(len(prompts), speed.rollout_slots or self.budget.rollout_slots)
        longest = max(len(p.ids) for p in prompts)
        columns = -(-(longest + self.config.sampling.max_new_tokens) // KV_BLOCK) * KV_BLOCK
        asked = slots * longest if plain else sum(map(len, {p.ids for p in prompts[:slots]}))
        drawing = slots * network.vocabulary * (FILTERED if self.config.sampling.filters else DRAWN)
        return {
            "KV cache": network.cache(slots * columns),
            "pass over the prompts, or sampling": max(network.forward_peak(asked), drawing),
            **({"rounded weights": (self.autocast_copies + self.head) * network.whole} if plain else self.prepacked),
        }

    @property
    def prepacked(self) -> dict[str, int]:
        """Copies of linear layers' weights, ordered as a processor multiplies few rows; else rounded ones."""
        layers = prepackable_layers(base_of(self.policy), self.device)
        if not layers:
            return {"rounded weights": (self.autocast_copies + self.head) * self.network.whole}
        return {"blocked weights": sum(layer.weight.numel() for layer in layers) * self.network.element}

    def cached_forward(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """The first optimizer step's forward pass, if it is cached from the rollout."""
        network = self.network
        if self.config.batch.minibatches > 1 or len(micro_batches) > 1 or network.checkpointing or network.dropout:
            return {}
        kept = network.saved_activations(micro_batches[0]) + self.autocast_copies
        return {CACHED_FORWARD: self.passes * kept, GAPS_LEFT: self.gaps(micro_batches[0])}

    def gaps(self, micro_batch: MicroBatch) -> int:
        return int(GAPS[self.device.type] * self.network.freed_in_forward(micro_batch.ids.numel()))

    def logprob_pass(self, micro_batches: Sequence[MicroBatch]) -> dict[str, int]:
        """Log-probs under policy and reference, without gradients."""
        longest, most = max(p.ids.numel() for p in micro_batches), max(len(p.tokens) for p in micro_batches)
        cached_forward = self.cached_forward(micro_batches)
        return {
            "pass, or logits": max(self.network.forward_peak(longest), self.allowed_mask(most) + self.logits(most)),
            "rounded weights": self.head
            + (0 if cached_forward else (self.autocast_copies + self.head) * self.network.whole),
            **cached_forward,
        }

    def logits(self, tokens: int, entropy: bool = False) -> int:
        """At once: in the forward's precision; of some the float32 copy, exponentials, and those times the logits."""
        numbers = tokens * self.network.vocabulary
        together = min(numbers, self.budget.logits_per_chunk) * self.network.element
        return together + min(numbers, self.budget.floats_per_chunk) * FLOAT * (1 + self.network.rounded + entropy)

    def allowed_mask(self, tokens: int) -> int:
        """Bytes of the mask of allowed tokens, one per logit."""
        return tokens * self.network.vocabulary * self.config.sampling.filters

    def backward(self, micro_batch: MicroBatch, first: bool) -> dict[str, int]:
        """Gradients of one micro-batch, the `first` of its minibatch or a later one: at the head, when all layers'
        tensors are kept, at the first layer, or at the embeddings, when all gradients are there; what needs most."""
        network, tokens = self.network, micro_batch.ids.numel()
        logits, left = self.chunk(micro_batch)
        copies = 0 if network.checkpointing else self.autocast_copies * self.passes
        at_head = {
            "activations": network.saved_activations(micro_batch) * self.passes,
            "logits": logits + self.allowed_mask(len(micro_batch.tokens)),
            "gradients": left if first else self.trained,
            "rounded weights": copies + self.head,
            GAPS_LEFT: self.gaps(micro_batch),
        }
        layers = (self.trained - self.head_gradient) // network.layers
        at_first_layer = {
            "activations": network.saved_by_layer(micro_batch) + network.backward_peak(tokens),
            "gradients": self.trained - layers * first,
            "rounded weights": self.autocast_copies // network.layers,
            GAPS_LEFT: at_head[GAPS_LEFT],
        }
        at_embeddings = {"gradients": self.trained + self.head_gradient}
        at_policy = {  # the critic's backbone is behind it: autograd goes back in the order of the passes, reversed
            "activations": network.saved_activations(micro_batch) * (self.passes - 1),
            "gradients": self.critic(trained=True) if first else self.trained,
            "rounded weights": copies // self.passes,
        }
        return max(at_head, at_policy, at_first_layer, at_embeddings, key=lambda parts: sum(parts.values()))

    @property
    def head_gradient(self) -> int:
        """Of the language-model head, or of the embeddings; none where they are not trained."""
        return self.network.vocabulary * self.network.hidden * FLOAT * self.network.whole

    def chunk(self, micro_batch: MicroBatch) -> tuple[int, int]:
        """Of one chunk's logits, with their way back; and the head's gradient where chunks before it have left one."""
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
        """The text of which the perplexity is taken."""
        text = fixed_text(tokenizer, prompts, lambda _: [], self.config.data.eval_text)
        sizes = [(len(p.ids), len(r)) for p, r in zip(text.prompts, text.completions, strict=True)]
        sizes = sorted(
            sizes or [(len(p.ids), self.config.sampling.max_new_tokens) for p in prompts], key=lambda s: s[1]
        )
        most = self.budget.eval_batch_size
        parts = [sizes[at : at + most] for at in range(0, len(sizes), most)]
        tokens, most = max(sum(map(sum, part)) for part in parts), max(sum(r for _, r in part) for part in parts)
        return {
            "pass, or logits": max(self.network.forward_peak(tokens), self.logits(most)),
            "rounded weights": self.autocast_copies * self.network.whole + self.head,
        }


def scoring(judge: Network, prompts: Sequence[Prompt], max_new_tokens: int, batch_size: int) -> dict[str, int]:
    """The reward model's pass over `batch_size` completions; its tokens are taken to be as many as the policy's."""
    rows = sorted(len(p.ids) + max_new_tokens for p in prompts)[-batch_size:]
    tokens = len(rows) * rows[-1]
    return {"reward model's pass": judge.forward_peak(tokens)}
