"""What can be known before the first step to be wrong, said before it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import torch
from accelerate import PartialState

from reward_model.scorer import METRICS_FILE, RewardModel, pair_accuracy
from rlhf.console import Screen
from rlhf.errors import UserError
from rlhf.prompts import Example

CUDA_WHEELS = "https://download.pytorch.org/whl/cu128"  # PyTorch's own index of CUDA builds
LOWEST_ACCURACY = 0.6


def start_device(screen: Screen) -> torch.device:
    """The device that accelerate picks; one line where an NVIDIA card is there that this torch cannot use."""
    hint = unused_card()
    if hint:
        screen.say(hint)
    return PartialState().device


def unused_card() -> str | None:
    """The line that mends a torch without CUDA beside an NVIDIA card, or a torch that is too old for the card."""
    command = f"pip install --force-reinstall torch --index-url {CUDA_WHEELS}"
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return None
        return f"an NVIDIA card is here, but this torch ({torch.__version__}) cannot use it. Mend it with: {command}"
    major, minor = torch.cuda.get_device_capability()
    newest = max(
        (int(arch.removeprefix("sm_")) for arch in torch.cuda.get_arch_list() if arch[3:].isdigit()), default=0
    )
    if newest and major * 10 + minor > newest and major > newest // 10:
        return f"this torch ({torch.__version__}) is too old for the card (sm_{major}{minor}). Mend it with: {command}"
    return None


def check_reward_model(
    model: RewardModel, name: str, pairs: Sequence[Example], allow_weak: bool, screen: Screen
) -> None:
    """Refuse a reward model that is hardly better than chance, or no better than the replies' length.

    Its own metrics.json says how good it is; a foreign one is measured on held-out `pairs` where there are any.
    """
    if model.record is not None:
        accuracy, baseline, source = model.record["accuracy"], model.record["length_baseline"], METRICS_FILE
    else:
        known = [p for p in pairs if p.chosen is not None]
        if not known:
            screen.say(
                f"warning: no {METRICS_FILE} beside {name}, and no pairs to measure it on: its scores are unproved"
            )
            return
        measured = pair_accuracy(model, known)
        accuracy, baseline, source = measured.accuracy, measured.length_baseline, f"{len(known)} held-out pairs"
        screen.say(f"warning: no {METRICS_FILE} beside {name}: measured on {source}, accuracy {accuracy:.3f}")
    if accuracy >= max(LOWEST_ACCURACY, baseline):
        return
    fault = (
        f"a weak reward model (accuracy {accuracy:.3f}, length baseline {baseline:.3f}, from {source}): "
        f"--rm-model {name}"
    )
    if not allow_weak:
        raise UserError(f"{fault}. Train a better one, or add --allow-weak-reward-model")
    screen.say(f"warning: {fault}; going on as asked")
