"""Self-test when a model is loaded: do this project's forward passes give the same results as the model's own?"""

from __future__ import annotations

import warnings

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.models import llama
from rlhf.models.attention import packable
from rlhf.models.logprobs import backbone_of, base_of, forward_dtype, scaled_logits
from rlhf.models.packing import pack_rows, run_packed
from rlhf.utils.errors import RLHFWarning, UserError

LENGTHS = (7, 5)  # tokens of the test texts
# largest difference that rounding can explain, relative to the largest absolute value
NEAR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@torch.no_grad()
def check_forward_matches(policy: PreTrainedModel | PeftModel, name: str) -> None:
    """Compare this project's forward passes with the model's own, on a few tokens.

    Raises UserError if the model changes its logits after the head in another way than by a soft cap (Cohere scales
    them). If a packed row gives other hidden states than separate texts (GPT-OSS has attention sinks, which `attend`
    does not support), the model is marked as not packable: it runs padded, with the "plain" rollout engine. If only
    the forward pass of rlhf.models.llama differs, the model's own layers are used. Both are warnings.
    """
    base = base_of(policy)
    backbone = backbone_of(policy)
    embeddings = base.get_input_embeddings()
    ids = torch.arange(sum(LENGTHS), device=embeddings.weight.device) * 7 % embeddings.num_embeddings
    texts = [text.unsqueeze(0) for text in ids.split(LENGTHS)]
    alone = [backbone(input_ids=text, use_cache=False).last_hidden_state for text in texts]
    if not _near(scaled_logits(policy, alone[0], 1.0), base(input_ids=texts[0], use_cache=False).logits):
        raise UserError(
            "the model changes its logits after the language-model head, so log-probabilities would be wrong",
            f"{name}, {type(base).__name__}",
            "Use a model of another architecture",
        )
    if packable(base):
        own = base.config._attn_implementation
        positions, layout = pack_rows(LENGTHS, ids.device)
        expected = torch.cat(alone, dim=1)[0]
        if llama.supports(backbone):
            if _near(run_packed(backbone, ids.unsqueeze(0), positions, layout), expected):
                return
            llama.disable(backbone)
            _warn_slower(f"{type(base).__name__} gives other hidden states in the project's layers: they are off")
        if not _near(run_packed(backbone, ids.unsqueeze(0), positions, layout), expected):
            base.config._attn_implementation = own
            base._supports_attention_backend = False
            _warn_slower(f"{type(base).__name__} gives other hidden states in a packed row: packing is off")


def _warn_slower(problem: str) -> None:
    warnings.warn(f"{problem}, training is slower", RLHFWarning, stacklevel=3)


def _near(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= NEAR[forward_dtype(expected)] * float(expected.abs().max())
