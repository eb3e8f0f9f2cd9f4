"""Scores completions with the weighted sum of reward functions, in training and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf.data.prompts import Prompt
from rlhf.distributed.group import gather
from rlhf.distributed.shares import by_group, merge_rows, own_share
from rlhf.rewards.arguments import (
    PER_CALL,
    PER_COMPLETION,
    Arguments,
    RewardLog,
    distinct_names,
    is_of_trl,
    name_of,
    named_by,
    per_call,
    per_completion,
    required_columns,
    weighted_sum,
)
from rlhf.rewards.call import MAX_ABS_SCORE, BadScore, call_function
from rlhf.rewards.functions import LearnedReward, ModuleReward, NetworkReward, RewardFunction
from rlhf.rewards.scores import Scores
from rlhf.rollout.episodes import Episode, Turn
from rlhf.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from rlhf.rewards.reward_model import RewardModel


def not_known() -> list[list[float]]:
    """Raise RunError: log-probs are not known."""
    raise RunError("a function names completion_logprobs, which are not known here", fix="Use another function")


class Rewards:
    """Reward functions and their weights."""

    def __init__(
        self,
        functions: Sequence[RewardFunction | nn.Module],
        weights: Sequence[float] | None,
        tokenizer: PreTrainedTokenizerBase,
        limit_s: float | None = None,
        names: Sequence[str] | None = None,
        kind: str = "reward function",
    ):
        """Raise UserError if there is not one weight per function.

        Args:
            functions: reward functions and modules; without any, every score is 0.
            weights: one per function; None: all 1.
            tokenizer: the policy's, for modules without a tokenizer.
            limit_s: time limit in seconds per function and batch, except for the reward model; None: no limit.
            names: one per function, for metrics and messages; None: the functions' own names.
            kind: what the functions are called in messages.
        """
        if weights is not None and len(weights) != len(functions):
            raise UserError(
                f"{len(weights)} weights for {len(functions)} reward functions", "rewards", "Give one per function"
            )
        self.functions = [ModuleReward(f, tokenizer) if isinstance(f, nn.Module) else f for f in functions]
        self.weights = list(weights) if weights is not None else [1.0] * len(self.functions)
        self.limits_s = [None if isinstance(f, LearnedReward) else limit_s for f in self.functions]
        self.names = list(names) if names is not None else distinct_names([name_of(f) for f in self.functions])
        self.kind = kind
        self.named = named_by(self.functions)
        self.reads_logprobs = "completion_logprobs" in self.named
        self.last_call = (0.0, 1)  # seconds and completions of this process's last call of all functions
        self.trainer_state = TrainerState(global_step=1, max_steps=1)  # a training run replaces it by its own state

    def __str__(self) -> str:
        return weighted_sum(self.names, self.weights)

    @property
    def learned(self) -> tuple[RewardModel, float] | None:
        """The reward model and its weight; None without one."""
        pairs = zip(self.functions, self.weights, strict=True)
        return next(((f.model, w) for f, w in pairs if isinstance(f, LearnedReward)), None)

    @property
    def has_model(self) -> bool:
        """True if a reward model or a module gives scores, and not only functions."""
        return any(isinstance(f, NetworkReward) for f in self.functions)

    def score(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        ended: Sequence[bool],
        group_size: int = 1,
        logprobs: Callable[[], list[list[float]]] = not_known,
        episodes: Sequence[Episode] | None = None,
    ) -> Scores:
        """Return the scores of completions.

        Each process calls the functions with its share of the groups, and with whole groups if there are as many
        groups as processes.

        Raises RunError with the function's name if a function raises, exceeds its time limit or returns the wrong
        number of scores. Raises BadScore for a score or a weighted sum that is not finite or too large, so that it
        never reaches the optimizer. (TRL's GRPO ignores NaN in its sum.)

        Args:
            prompts: one per completion.
            texts: the completions as text.
            ids: the completions as ids, with EOS.
            ended: False if the completion was cut off at the length limit.
            group_size: so many neighbours are a group, completions of one prompt.
            logprobs: called if a function names them: returns those of each completion's tokens under the policy,
                nats. Those that an episode has replace them.
            episodes: the completions with their turns; None: each is one turn.
        """
        known = self.reads_logprobs and logprobs()
        whole = episodes or [None] * len(texts)
        spans = [[range(len(row))] if e is None else e.spans for row, e in zip(ids, whole, strict=True)]
        named = {
            "prompt_ids": lambda row: list(prompts[row].ids),
            "group": lambda row: row // group_size,
            "turns": lambda row: whole[row].turns if whole[row] else [Turn(texts[row], None, ended[row])],
            "completion_logprobs": lambda row: (whole[row] and whole[row].logprobs) or known[row],
            "environments": lambda row: whole[row] and whole[row].environment,
            "environment_rewards": lambda row: whole[row] and whole[row].environment_reward,
        }

        def call(rows: Sequence[int]) -> tuple[dict[str, list], RewardLog]:
            given = [[values[row] for row in rows] for values in (prompts, texts, ids, ended, whole, spans)]
            given.append({name: list(map(named[name], rows)) for name in self.named})
            own = RewardLog(len(rows))
            return self._call_functions(*given, self.columns_of(prompts), own), own

        shares = gather(own_share(by_group([row // group_size for row in range(len(texts))]), call))
        parts = [(rows, *found) for rows, found in shares if found is not None]
        log = RewardLog(len(texts))
        log.join([(rows, part) for rows, _, part in parts])
        scores = {name: [(rows, found[name]) for rows, found, _ in parts] for name in self.names}
        given = {name: merge_rows(entries, len(texts)) for name, entries in scores.items()}
        sums = {name: [sum(s) if isinstance(s, list) else s for s in column] for name, column in given.items()}
        total = self.weighted(sums) if sums else [0.0] * len(texts)
        total = [None if e is not None and e.failure else score for e, score in zip(whole, total, strict=True)]
        for value, text in zip(total, texts, strict=True):
            if value is not None and not abs(value) <= MAX_ABS_SCORE:
                raise BadScore(
                    f"the weighted sum {value:g} is not a number of at most {MAX_ABS_SCORE:g}",
                    f"{self}, completion {text!r:.80}",
                    "Use smaller weights",
                )
        paid = None if given == sums else self._by_token(given, ids, spans)
        return Scores(total, sums, log.extra, log.metrics, by_token=paid, weights=tuple(self.weights))

    def _by_token(
        self, scores: dict[str, list], ids: Sequence[Sequence[int]], spans: Sequence[Sequence[range]]
    ) -> list[list[float]]:
        """Return the weighted sum of what the functions pay at each token, as `Scores.by_token`."""
        paid = [[0.0] * len(row) for row in ids]
        for weight, column in zip(self.weights, scores.values(), strict=True):
            for amounts, score, turns in zip(paid, column, spans, strict=True):
                last = [(turns[-1][-1], score or 0.0)] if turns else []  # an episode that failed may have no turn
                for place, value in enumerate(score) if isinstance(score, list) else last:
                    amounts[place] += weight * value
        return paid

    def weighted(self, scores: dict[str, list[float | None]]) -> list[float | None]:
        """Return the weighted sum of each completion's scores by function, over the functions that apply to it;
        None if none does."""
        totals: list[float | None] = []
        for row in zip(*scores.values(), strict=True):
            known = [w * s for w, s in zip(self.weights, row, strict=True) if s is not None]
            totals.append(sum(known) if known else None)
        return totals

    def _call_functions(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        ended: Sequence[bool],
        episodes: Sequence[Episode | None],
        spans: list,
        named: dict,
        columns: Sequence[str],
        log: RewardLog,
    ) -> dict[str, list]:
        """Call each function with completions of this process. `spans` are those of `Episode`; `named` has the
        arguments among NAMED."""
        names = zip(self.functions, self.names, self.limits_s, strict=True)
        start = time.monotonic()
        rows = {
            always: per_completion(prompts, texts, ids, ended, episodes, columns, always) | named
            for always in {is_of_trl(function) for function in self.functions}
        }
        scores = {
            name: call_function(
                function,
                f"{self.kind} {name!r}",
                Arguments(rows[is_of_trl(function)], per_call(self.trainer_state, log), list(texts), spans),
                limit_s,
            )
            for function, name, limit_s in names
        }
        self.last_call = (time.monotonic() - start, len(texts))
        return scores

    def columns_of(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the names of the prompts' dataset columns and of the columns that a function requires."""
        found = dict.fromkeys(name for p in prompts for name in p.example.columns)
        required = dict.fromkeys(name for function in self.functions for name in required_columns(function))
        return [name for name in (found | required) if name not in (*PER_COMPLETION, *PER_CALL)]
