"""Compares the tensors in a file with those that a model needs. Without this, libraries fill missing ones with random
numbers, and drop unknown ones. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlhf.utils.errors import UserError

WRAPPERS = (  # parts of names
    "_orig_mod.",  # torch.compile
    "_fsdp_wrapped_module.",
    "pretrained_model.",  # TRL's value-head wrapper
    "base_model.model.",  # peft
    "language_model.",  # a model with images
    "module.",  # DataParallel
)
LM_HEADS = (  # of causal models and of encoders; not part of a reward model
    *("lm_head.", "embed_out.", "cls.", "predictions.", "lm_predictions.", "mask_predictions."),
    *("vocab_", "generator_", "discriminator_", "decoder.weight", "decoder.bias"),
)
# of reward models: new in training
NEW_HEADS = ("score.", "classifier.", "pooler.", "bert.pooler.", "albert.pooler.", "pre_classifier.")
# causal masks in files that older releases of transformers wrote
MASKS = (".attn.bias", ".attn.masked_bias", ".attn.causal_mask", ".attention.bias", ".attention.masked_bias")
INCOMPLETE = (
    "Tensors or a shard are missing, or config.json belongs to another architecture. Download or save the model again"
)


def tensor_differences(saved: Mapping[str, Any], needed: Mapping[str, Any]) -> dict[str, Collection]:
    """Return the differences between two sets of named tensors, in the form of transformers' loading info."""
    both = saved.keys() & needed.keys()
    return {
        "missing_keys": needed.keys() - saved.keys(),
        "unexpected_keys": saved.keys() - needed.keys(),
        "mismatched_keys": {
            (name, saved[name].shape, needed[name].shape) for name in both if saved[name].shape != needed[name].shape
        },
    }


def check_loaded(
    found: Mapping[str, Collection],
    place: str | Path,
    new: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
    fix: str = INCOMPLETE,
) -> None:
    """Raise UserError if tensors are missing, unknown, or of another shape.

    Args:
        found: transformers' loading info, without tied weights and those that the model's class declares as unused.
        place: file, folder or hub name, for the error message.
        new: beginnings of names that may be missing.
        unused: beginnings of names that may be unknown.
        fix: end of the error message, if the names do not tell the cause.
    """
    missing = sorted(name for name in found["missing_keys"] if not name.startswith(new))
    unknown = sorted(name for name in found["unexpected_keys"] if not name.startswith(unused))
    unknown = [name for name in unknown if not name.endswith(MASKS)]
    reshaped = sorted(found["mismatched_keys"])
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing, first {missing[0]}")
    if unknown:
        problems.append(f"{len(unknown)} unknown, first {unknown[0]}")
    if reshaped:
        name, saved, needed = reshaped[0]
        problems.append(f"{len(reshaped)} of another shape, first {name} {[*saved]}, not {[*needed]}")
    if problems:
        cause = _cause(set(missing), unknown) or fix
        raise UserError(f"the tensors are not those of the model ({'; '.join(problems)})", place, cause)


def _cause(missing: Collection[str], unknown: Collection[str]) -> str | None:
    """Return the cause and how to fix it, if the names tell the cause."""
    for wrapper in WRAPPERS:
        if any(name.replace(wrapper, "") in missing for name in unknown):
            return f"Names contain {wrapper} of a wrapper. Save the model inside the wrapper, or rename the tensors"
    if any(name.startswith(("v_head.", "score.weight")) for name in unknown):
        return "The file has the head of a critic or reward model. Save the model without this head"
    return None
