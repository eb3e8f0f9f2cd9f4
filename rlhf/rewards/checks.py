"""Checks rewards before their use: functions on a chat; accuracy, context, training questions and tokenizer of a
reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from rlhf.checkpoints.model_folder import METRICS_FILE, read_record, text_in
from rlhf.data.chat_template import SOME_CHAT, date_of, encode_completion, encode_prompt, encode_whole, kwargs_of
from rlhf.data.prompts import Prompt, PromptSets
from rlhf.data.row import Example
from rlhf.data.splits import question_hash
from rlhf.data.tokenizer import config_values, context_problems, load_tokenizer
from rlhf.rewards.arguments import RewardFunction, check_columns, named_by
from rlhf.rewards.call import TakesText
from rlhf.settings.training import RM_TEXTS, Config
from rlhf.settings.types import Split
from rlhf.utils.console import Screen
from rlhf.utils.errors import RunError, UserError, raise_if
from rlhf.utils.statistics import interval, share_interval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.rewards.reward_model import RewardModel

LOWEST_ACCURACY = 0.6
COIN = 0.5  # accuracy of guessing
DEFAULT_SPLIT = Split(45, 45, 10)


def check_functions(functions: Sequence[RewardFunction | nn.Module], examples: Sequence[Example], *place: str) -> None:
    """Check the columns of the data as `check_columns`. If rows are chats, call the functions with one completion.

    Raises UserError if a function takes the list of messages for a text. All other errors are left to the run: a
    function may need more than one completion.
    """
    check_columns(functions, examples, *place)
    chats = [Prompt((), example) for example in examples if example.conversational][:1]
    called = [function for function in functions if not isinstance(function, nn.Module)]
    called = [function for function in called if "environments" not in named_by([function])]  # there are none yet
    if chats and called:
        from rlhf.rewards.rewards import Rewards  # slow to import

        try:
            Rewards(called, None, None, limit_s=10.0).score(chats, ["yes"], [[0]], [True], logprobs=lambda: [[0.0]])
        except TakesText as error:
            raise UserError(error.problems) from None
        except RunError:
            return  # the run reports it


def check_reward_folder(
    folder: str, prompts: PromptSets, tokenizer: PreTrainedTokenizerBase, config: Config, screen: Screen
) -> None:
    """Check a reward model without loading it: its context, its tokenizer and the record in its folder, if it has one.

    Raises UserError if the context is too short for the prompts with completions, or the accuracy too low. Warns if
    its tokenizer is not the start model's `tokenizer`, because completions are then encoded again.
    """
    rows = [*prompts.train, *prompts.evaluation]
    name = config.model.rm_model
    own = load_tokenizer(folder, date=date_of(tokenizer), kwargs=config.data.chat_template_kwargs)
    # most reward models have the start model's tokenizer, and encoding many prompts again takes seconds
    lengths = [len(p.ids) for p in rows] if encodes_alike(own, tokenizer) else None
    length = config.sampling.max_new_tokens
    place = f"--rm-model {name}"
    check_reward_context(folder, [p.example for p in rows], length, place, lengths, config.model.rm_text)
    if own.get_vocab() != tokenizer.get_vocab():
        screen.say(
            f"warning: the reward model's tokenizer differs from the start model's: --rm-model {name}. "
            "Completions are decoded to text and encoded again with the reward model's tokenizer"
        )
    record = read_record(Path(folder))
    if record is not None:
        check_accuracy(record, METRICS_FILE, name, config.model.allow_weak_reward_model, screen)
        parts = {"evaluation": prompts.evaluation, "training": prompts.train}
        check_leaks(record, {name: [p.example for p in part] for name, part in parts.items()}, "reward model", screen)


def encodes_alike(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True if both tokenizers make the same ids of every prompt: the same rules, tokens and chat template, with
    equal variables."""
    if not (one.is_fast and other.is_fast) or one.chat_template != other.chat_template:
        return False
    if date_of(one) != date_of(other) or kwargs_of(one) != kwargs_of(other):
        return False
    same_special = one.special_tokens_map == other.special_tokens_map
    return same_special and one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()


def check_reward_context(
    folder: str,
    examples: Sequence[Example],
    max_new_tokens: int,
    source: str,
    lengths: Sequence[int] | None = None,
    text: str | None = None,
) -> None:
    """Raise UserError if prompts with completions of `max_new_tokens` tokens exceed a reward model's context.

    `text` is --rm-text. `lengths` has the prompts' numbers of tokens (None: they are counted with the tokenizer in
    `folder`). Reads only the tokenizer and the configuration. If the tokenizer is not the start model's, completions
    may have more tokens. `RewardModel.raw_scores` raises in that case.
    """
    context = config_values(folder).get("max_position_embeddings")
    if context is None or not examples:
        return
    tokenizer = load_tokenizer(folder)
    if lengths is None:
        lengths = [len(encode_prompt(tokenizer, e.messages)) for e in examples]
    more = 0 if (text_in(read_record(Path(folder))) or text) == "eos" else tokens_of_template(tokenizer)
    raise_if(context_problems(lengths, context, max_new_tokens, source, "reward model", more))


def tokens_of_template(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens a chat template writes around a completion, in addition to those of the prompt and to
    EOS, at least 0."""
    whole = encode_whole(tokenizer, SOME_CHAT, "yes")
    return max(0, len(whole) - len(encode_prompt(tokenizer, SOME_CHAT)) - len(encode_completion(tokenizer, "yes")))


def check_unrecorded(
    model: RewardModel, name: str, pairs: Sequence[Example], allow_weak: bool, screen: Screen
) -> None:
    """Evaluate a reward model that has no record on the held-out `pairs`, if there are any, and print which text it
    scores. Raises UserError if its accuracy is below 0.6 or below the length baseline; with `allow_weak` this is only
    a warning."""
    print_text(model, f"reward model {name}", screen)
    if model.record is None:
        found, source = known_accuracy(model, f"reward model {name}", pairs, screen)
        if found is not None:
            screen.say(f"warning: the reward model {name} has no {METRICS_FILE}: {accuracy_in(found)}")
            check_accuracy(found, source, name, allow_weak, screen)


def print_text(model: RewardModel, name: str, screen: Screen) -> None:
    """Print which text a reward model without a record scores, and if no score depends on whether a completion
    ended."""
    if model.record is None:
        end = model.tokenizer.decode(model.encode(SOME_CHAT, "yes")).rpartition("yes")[2]
        how = "the chat as its template renders it" if model.text == "template" else "the text up to EOS"
        screen.say(
            f"note: the {name} has no {METRICS_FILE}, so it scores {how}: after a completion follows {end!r}. If it "
            f"was trained on another text, give --rm-text {' or '.join(RM_TEXTS)}"
        )
        if model.tokenizer.cls_token and model.tokenizer.sep_token:
            screen.say(
                f"warning: the {name} has the tokenizer of an encoder. Encoders are usually trained on two segments, "
                f"prompt and completion, with {model.tokenizer.sep_token!r} between them. Here they receive one text, "
                "so the scores may be wrong. Use a reward model that is a decoder, or train one from your pairs"
            )
    if not model.sees_end:
        screen.say(
            f"note: the {name} gives a completion that was cut off the same score as one that ended: it reads the "
            "score before EOS, which is its pad token, or its chat template writes nothing after a completion"
        )


def known_accuracy(
    model: RewardModel, name: str, examples: Sequence[Example], screen: Screen
) -> tuple[dict | None, str]:
    """Return the accuracy and the length baseline of a reward model, and their source: its record, otherwise the
    held-out pairs among `examples` that fit its context. None if there are no pairs, which is printed."""
    from rlhf.rewards.pair_accuracy import pair_accuracy, pairs_that_fit  # imports transformers' models

    if model.record is not None:
        return model.record, METRICS_FILE
    usable = pairs_that_fit(model, [e for e in examples if e.chosen is not None])
    if usable:
        return pair_accuracy(model, usable), f"{len(usable)} held-out pairs"
    screen.say(
        f"warning: the {name} has no {METRICS_FILE}, and there are no pairs to evaluate it on: its accuracy is unknown"
    )
    return None, ""


def accuracy_in(found: dict | None) -> str:
    """Return the accuracy of a reward model in words."""
    if found is None:
        return "accuracy unknown"
    count = ""
    if "pairs" in found:
        within = interval(*share_interval(found["accuracy"], found["pairs"]), "")
        count = f" of {found['pairs']} held-out pairs (95% interval {within})"
    return f"accuracy {found['accuracy']:.3f}{count}, length baseline {found['length_baseline']:.3f}"


def check_accuracy(record: dict, source: str, name: str, allow_weak: bool, screen: Screen) -> None:
    """Raise UserError if a reward model is too weak. With `allow_weak` print a warning instead. If it is not too weak,
    print what its accuracy cannot show."""
    weak = weakness(record)
    if weak is None:
        return show_doubts(record, f"--rm-model {name}", screen)
    found = f"{weak}, from {source}"
    if not allow_weak:
        raise UserError(found, f"--rm-model {name}", "Train a better one, or add --allow-weak-reward-model")
    screen.say(f"warning: {found}: --rm-model {name}. Continuing because of --allow-weak-reward-model")


def weakness(record: dict) -> str | None:
    """Return why a reward model with this record is too weak for training, or None if it is not."""
    required = max(LOWEST_ACCURACY, record["length_baseline"])
    if record["accuracy"] >= required:
        return None
    return f"weak reward model ({accuracy_in(record)}; required {required:.3f})"


def show_doubts(record: dict, place: str, screen: Screen) -> None:
    """Warn if the record of a reward model is weak evidence: the interval of its accuracy contains that of a coin, or
    the pairs do not show that it knows more than the length of a completion. `place`: the reward model."""
    if "pairs" in record and share_interval(record["accuracy"], record["pairs"])[0] <= COIN:
        screen.say(
            f"warning: {accuracy_in(record)}, which a coin could have, too: {place}. Hold out more pairs: a larger "
            "last number of --split, or more data"
        )
    baseline = record["length_baseline"]
    against = record.get("accuracy_against_baseline", 1.0)  # None: the length is wrong in no pair
    knows_more = record["accuracy"] > baseline if against is None else against >= COIN
    if baseline >= LOWEST_ACCURACY and not knows_more:
        screen.say(
            f"warning: {accuracy_in(record)}: {place} may know only the length of a completion. It is not better than "
            "a coin on the held-out pairs that the length gets wrong, or there are none. Add pairs in which the "
            "rejected completion has the length of a good one"
        )


def check_leaks(record: dict, parts: Mapping[str, Sequence[Example]], model: str, screen: Screen) -> None:
    """Warn if the reward model or judge `model` was trained on questions of `parts`: its scores for them are too
    optimistic. The keys of `parts` are "evaluation" and "training"."""
    seen = set(record.get("train_questions", []))
    for name, part in parts.items():
        known = sum(question_hash(example) in seen for example in part)
        if known:
            screen.say(
                f"warning: the {model} was trained on {known} of the {len(part)} {name} prompts' questions, so "
                "its scores for them are too optimistic. Give both commands the same data and --split"
            )


def check_measured(model: RewardModel, name: str, examples: Sequence[Example], screen: Screen) -> str:
    """Check a reward model or judge of an evaluation, as training checks its reward model, but only warn. Returns its
    accuracy in words.

    Args:
        model: the reward model or judge.
        name: what it is, and its folder or hub name.
        examples: the evaluation prompts. If they are pairs, they show the accuracy of a model without a record.
        screen: prints the warnings.
    """
    print_text(model, name, screen)
    found, source = known_accuracy(model, name, examples, screen)
    weak = None if found is None else weakness(found)
    if weak is not None:
        screen.say(f"warning: {weak}, from {source}: {name}. Its scores may not show which completion is better")
    elif found is not None:
        show_doubts(found, name, screen)
    check_leaks(model.record or {}, {"evaluation": examples}, name, screen)
    return accuracy_in(found)
