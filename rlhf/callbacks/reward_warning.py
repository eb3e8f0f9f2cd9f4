"""Warns before the first update if the reward fails, or pays for a hack."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.callbacks.base import Callback
from rlhf.rewards.probes import FEW, RIGHT, probe_rewards
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen
from rlhf.utils.processes import alone

MOST_SECONDS = 2.0  # a run skips the probes if they may take longer


@dataclass
class RewardWarning(Callback):
    """Prints one line before the first update if a function fails with a probe, or if a hack is paid at least as much
    as the right answer for each of FEW prompts.

    The evaluation of the start model has measured the functions. If the probes may take longer than MOST_SECONDS, no
    function is called: it may be slow, or remote.
    """

    trainer: OnPolicyLoop
    screen: Screen

    def on_evaluation(self, evaluation):
        trainer = self.trainer
        seconds, completions = trainer.rewards.last_call
        takes_long = FEW * seconds * max(1, (len(RIGHT) + 8) / completions) > MOST_SECONDS
        plays = trainer.collector.environment is not None  # its rewards are those of episodes, not of texts
        if evaluation.update or takes_long or plays or not trainer.rewards.functions:
            return
        prompts = trainer.train_prompts or trainer.evaluation_prompts
        given = trainer.rewards, prompts, trainer.processing_class, FEW
        with alone():  # only the first process has this callback
            report = probe_rewards(trainer.config, *given)
        for problem in report.problems(every=True)[:1]:
            self.screen.say(f"warning: {problem}. --check reward prints a table")
