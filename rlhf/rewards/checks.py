"""Whether a reward model can be used: its accuracy, its context, the questions it was trained on."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlhf.data.chat_template import encode_prompt
from rlhf.data.examples import Example
from rlhf.data.prompts import PromptSets
from rlhf.data.splits import question_hash
from rlhf.models.load import context_of, context_problems, load_config, load_tokenizer
from rlhf.rewards.pair_accuracy import pair_accuracy, pairs_that_fit
from rlhf.rewards.reward_model import METRICS_FILE, RewardModel
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError, raise_if

LOWEST_ACCURACY = 0.6


def check_reward_context(folder: str, examples: Sequence[Example], max_new_tokens: int, source: str) -> None:
    """Raise UserError if prompts with completions of `max_new_tokens` tokens exceed a reward model's context.

    Reads its tokenizer and configuration alone. If its tokenizer is not the start model's, completions may turn out
    longer: then `RewardModel.raw_scores` raises.
    """
    context = context_of(load_config(folder))
    if context is None or not examples:
        return
    tokenizer = load_tokenizer(folder)
    lengths = [len(encode_prompt(tokenizer, e.messages)) for e in examples]
    raise_if(context_problems(lengths, context, max_new_tokens, source, "reward model"))


def check_reward_model(
    model: RewardModel, name: str, pairs: Sequence[Example], allow_weak: bool, screen: Screen
) -> None:
    """Refuse a reward model that is hardly better than chance, or no better than the replies' length.

    Its own metrics.json says how good it is; a foreign one is measured on held-out `pairs` where there are any.
    """
    if model.record is not None:
        accuracy, baseline, source = model.record["accuracy"], model.record["length_baseline"], METRICS_FILE
    else:
        known = pairs_that_fit(model, [p for p in pairs if p.chosen is not None], None)
        if not known:
            screen.say(
                f"warning: no {METRICS_FILE} beside {name}, and no pairs to measure it on: its scores are unproved"
            )
            return
        measured = pair_accuracy(model, known)
        accuracy, baseline, source = measured.accuracy, measured.length_baseline, f"{len(known)} held-out pairs"
        screen.say(f"warning: no {METRICS_FILE} beside {name}: measured on {source}, accuracy {accuracy:.3f}")
    weak = weakness({"accuracy": accuracy, "length_baseline": baseline})
    if weak is None:
        return
    fault = f"{weak}, from {source}: --rm-model {name}"
    if not allow_weak:
        raise UserError(f"{fault}. Train a better one, or add --allow-weak-reward-model")
    screen.say(f"warning: {fault}; going on as asked")


def weakness(record: dict) -> str | None:
    """Why training refuses a reward model with this record, in words; None if it does not."""
    accuracy, baseline = record["accuracy"], record["length_baseline"]
    if accuracy >= max(LOWEST_ACCURACY, baseline):
        return None
    return f"a weak reward model (accuracy {accuracy:.3f}, length baseline {baseline:.3f}; at least {LOWEST_ACCURACY})"


def check_leaks(model: RewardModel, prompts: PromptSets, screen: Screen) -> None:
    """Warn where the reward model was trained on questions that it is now to judge: its scores of those flatter."""
    seen = set((model.record or {}).get("train_questions", []))
    for name, part in (("evaluation", prompts.evaluation), ("training", prompts.train)):
        known = sum(question_hash(p.example) in seen for p in part)
        if known:
            screen.say(
                f"warning: the reward model was trained on {known} of the {len(part)} {name} prompts' questions. "
                "Give both commands the same data and --split"
            )


def check_tokenizers(model: RewardModel, name: str, tokenizer: PreTrainedTokenizerBase, screen: Screen) -> None:
    """Say where replies are encoded a second time."""
    if model.tokenizer.get_vocab() != tokenizer.get_vocab():
        screen.say(
            f"warning: the reward model's tokenizer is not the start model's: --rm-model {name}. "
            "Replies reach it as text, encoded again by its own"
        )
