"""TensorBoard, the progress line on the console, and the warning about equal scores."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rlhf.algorithms.kl_control import KLController
from rlhf.callbacks.base import Callback
from rlhf.data.sampler import shorten
from rlhf.settings.types import kl_text
from rlhf.trainer.eval_metrics import shown
from rlhf.trainer.loop import OnPolicyLoop
from rlhf.utils.console import Screen, clock, number

SOME_UPDATES = 10  # equal scores over this many updates are not a coincidence


class TensorBoardLog(Callback):
    """Writes every metric to TensorBoard. The x axis counts updates."""

    def __init__(self, folder: Path):
        self.folder, self.done, self.progress = folder, 0, None

    def on_train_begin(self, trainer):
        self.done, self.progress = trainer.state.global_step, trainer.progress

    @cached_property
    def writer(self) -> SummaryWriter:
        """The writer. After a resume `purge_step` hides what the interrupted session logged after its last
        checkpoint, because these updates are trained again."""
        purge_step = self.done + 1 if self.done else None
        return SummaryWriter(str(self.folder), flush_secs=10, purge_step=purge_step)

    def on_update_done(self, update):
        self.writer.flush()  # before the checkpoint: a resumed run does not log earlier updates again

    def on_update_end(self, update, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, update)

    def on_update_skipped(self, update, rollout, batch, reason):
        self.writer.add_text("dropped", str(reason), update)
        self.writer.add_scalar("updates/dropped", self.progress.skipped, update)

    def on_evaluation(self, evaluation):
        self.on_update_end(evaluation.update, evaluation.metrics())

    def on_train_end(self):
        self.writer.close()


class ProgressLine(Callback):
    """Prints the progress line of every update, and one line per evaluation."""

    def __init__(self, trainer: OnPolicyLoop, screen: Screen, controller: KLController):
        self.trainer, self.screen, self.controller = trainer, screen, controller
        self.started, self.first = time.monotonic(), 0

    def on_train_begin(self, trainer):
        self.started, self.first = time.monotonic(), trainer.state.global_step

    def on_update_end(self, update, metrics):
        updates, target = self.trainer.updates, self.controller.target_of(update)
        left = (time.monotonic() - self.started) / (update - self.first) * (updates - update)
        kl = metrics[target.metric]
        aim = "no target" if self.controller.horizon is None else f"target {target.nats:g}"
        topic = self.trainer.sampler.topic_of(update)
        score = f"score {metrics['rewards/mean']:+.2f}" if "rewards/mean" in metrics else "no score"
        shown_topic = "" if topic is None else f"topic {shorten(topic)} | "
        self.screen.progress(
            f"update {update}/{updates} | {shown_topic}{score} | KL "
            f"{kl_text(kl, target.per)} ({aim}) | beta {metrics['kl_coef']:.3g} | "
            f"length {metrics['completions/mean_length']:.0f} tokens | "
            f"{metrics['throughput/tokens_per_s']:,.0f} tokens/s | {clock(left)} left",
            last=update == updates,
        )

    def on_update_skipped(self, update, rollout, batch, reason):
        self.screen.say(f"warning: skipping the rest of update {update}: {reason}")

    def on_evaluation(self, evaluation):
        metrics = evaluation.metrics()
        self.screen.say(
            f"evaluation after update {evaluation.update}: score {metrics['eval/score']:+.2f}, "
            f"KL {kl_text(metrics['eval/kl_divergence'], 'sequence')}, "
            f"perplexity {number(metrics['eval/perplexity'])} on {self.trainer.evaluator.text.source}, "
            f"length {metrics['eval/reply_length']:.0f} tokens, {metrics['eval/eos_rate']:.0%} with EOS"
            + "".join(f", {name} {shown(figures)}" for name, figures in evaluation.figures.items())
        )


class SameScores(Callback):
    """Warns after some updates and at the end if all completions had the same score: nothing can be learned."""

    def __init__(self, trainer: OnPolicyLoop, screen: Screen):
        self.trainer, self.screen = trainer, screen
        self.seen: set[float] = set()

    def on_batch(self, update, batch, scores):
        known = scores.raw[~scores.raw.isnan()]
        if len(known):
            self.seen |= {float(known.min()), float(known.max())}

    def on_update_end(self, update, metrics):
        if len(self.seen) == 1 and update in (SOME_UPDATES, self.trainer.updates):
            self.screen.say(
                f"warning: all completions of {update} updates have the same score, {min(self.seen):g}, so the policy "
                f"learns nothing: {self.trainer.rewards}. Check the reward functions"
            )

    def state_dict(self) -> dict[str, list[float]]:
        return {"seen": sorted(self.seen)[:2]}  # two different scores are enough

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.seen = set(state["seen"])
