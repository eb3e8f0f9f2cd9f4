"""The training loop that all algorithms share: collect, score, advantages, optimize, finish.

An algorithm defines only how scores become advantages, and the loss. Two runs of the same budget with different
algorithms therefore differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter

from accelerate import PartialState
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.algorithms.experience import Experience
from rlhf.algorithms.kl_control import kl_controller
from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.examples import GivenPrompt
from rlhf.data.prompts import Prompt
from rlhf.data.sampler import PromptSampler, metric_names
from rlhf.distributed.group import agree, copy_from_first, largest
from rlhf.models.actor_critic import Actor, set_adapter_dropout
from rlhf.models.device import autocast_dtype, memory_in_use, reset_peak_memory
from rlhf.models.reference import Reference
from rlhf.models.save import load_policy_weights, save_policy
from rlhf.rewards.functions import RewardFunction
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.completions import Rollout
from rlhf.settings.fields import name_table, settings_of
from rlhf.settings.training import MAX_CONSECUTIVE_SKIPS, Config
from rlhf.settings.translate import refused_arguments
from rlhf.trainer.collect import RolloutCollector
from rlhf.trainer.dynamic_sampling import DynamicSampler
from rlhf.trainer.evaluation import Evaluation, PolicyEvaluator
from rlhf.trainer.events import Events, HostEvents, is_of_transformers
from rlhf.trainer.metrics import Metrics, mean_metrics, rollout_metrics
from rlhf.trainer.optimize import PolicyOptimizer
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.progress import Progress
from rlhf.trainer.safety import SkipUpdate, advise_on_bad_logits, check_finite, checked_beta, require_finite_weights
from rlhf.trainer.trl_host import make_host
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.processes import is_first
from rlhf.utils.system import keep_freed_memory


class OnPolicyLoop:
    """Trains with one algorithm. A TRL trainer, `host`, owns the accelerator, optimizer, scheduler and state.

    Random numbers depend on (seed, update, purpose) only. Exception: vLLM has a separate random stream.
    """

    def __init__(
        self,
        config: Config,
        policy: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        train: Sequence[Prompt],
        evaluation: Sequence[Prompt],
        rewards: Rewards | Sequence[RewardFunction | nn.Module],
        callbacks: Sequence = (),
    ):
        self.config, self.processing_class = config, tokenizer
        self.train_prompts, self.evaluation_prompts = list(train), list(evaluation)
        self.sampler = PromptSampler(config, self.train_prompts)
        everything = (*self.train_prompts, *self.evaluation_prompts)
        self.topic_tags = metric_names(p.example.topic for p in everything) if self.sampler.topics else {}
        self.kl_coef, self.progress, self.trained = config.kl.kl_coef, Progress(), False
        self.evaluations: list[Evaluation] = []
        self.this_epoch: list[dict[str, float]] = []
        # returns the advice at the end of an error message; the argument is True if a reward function is the cause
        self.recovery: Callable[[bool], str] = lambda by_score: (
            "Fix the reward function" if by_score else "Train again with a smaller learning_rate"
        )
        self.session: Callable[[], AbstractContextManager] = nullcontext  # entered by train(): rlhf.run.python_run
        self.algorithm = ALGORITHMS[config.algorithm].build(config)
        given = isinstance(rewards, Rewards)
        self.rewards = rewards if given else Rewards(rewards, None, tokenizer, config.reward.reward_timeout)
        self._construct_host(policy)
        self._construct_components()
        self.events = Events()
        for callback in callbacks:
            self.add_callback(callback)

    def _construct_host(self, policy: PreTrainedModel | PeftModel) -> None:
        """Construct the TRL trainer and the frozen reference, which must be copied before the policy is wrapped."""
        config, device = self.config, PartialState().device
        if device.type == "cpu":
            keep_freed_memory()
        self.dtype = autocast_dtype(config.model.bf16, device)
        self.reference = Reference.before_training(policy, self.dtype)
        tokenizer, planned = self.processing_class, self.sampler.updates
        host = make_host(config, policy, tokenizer, planned, self.reference, self.train_prompts, self.rewards)
        set_adapter_dropout(host.actor, config.model.lora_dropout, host.actor.dropout)
        self.host, self.model, self.accelerator, self.args = host, host.model, host.accelerator, host.args
        self.hosted, self.kl_targets = HostEvents(host), kl_controller(config, planned)
        self.optimizer, self.lr_scheduler, self.state = host.optimizer, host.lr_scheduler, host.state

    def _construct_components(self) -> None:
        """Construct the forward passes, the collector, the optimizer of the policy, and the evaluator."""
        config, host, tokenizer = self.config, self.host, self.processing_class
        batch, model = config.batch, config.model
        one_step = batch.minibatches == 1 and not (model.gradient_checkpointing or model.has_adapter_dropout)
        self.passes = passes = ForwardPasses(
            host.actor, self.reference, config.sampling.temperature, self.dtype,
            packed=config.speed.packed, max_rows=batch.micro_batch_size, share_first=one_step,
        )  # fmt: skip
        self.collector = RolloutCollector(config, host, tokenizer, self.rewards, passes)
        self.learner = PolicyOptimizer(config, host, self.algorithm, passes, self.progress)
        self.resampler = DynamicSampler(config, self.sampler, self.collector, self.progress)
        self.evaluator = PolicyEvaluator(config, tokenizer, self.collector, self.evaluation_prompts, self.topic_tags)

    @property
    def actor(self) -> Actor:
        """The policy, with the critic if the algorithm has one."""
        return self.host.actor

    @property
    def episodes(self) -> int:
        """The number of completions sampled for training so far, with those that dynamic sampling replaced."""
        return self.state.global_step * self.config.episodes_per_update + self.progress.resampled_episodes

    @property
    def updates(self) -> int:
        """The number of updates in the run: as planned, or fewer if --episodes are spent or a callback ends it."""
        planned, budget = self.sampler.updates, self.config.run.episodes
        ends = self.hosted.stopped or (budget is not None and self.episodes >= budget)
        return min(planned, self.state.global_step) if ends else planned

    def add_callback(self, callback) -> None:
        """Add a callback of this project (rlhf.callbacks.base.Callback), a function (epoch, metrics), or a
        TrainerCallback of transformers."""
        if is_of_transformers(callback):
            self.host.add_callback(callback)
        else:
            self.events.add(callback)

    def train(self, *unexpected, **named) -> dict[str, float]:
        """Run all updates. Returns the metrics of the last update and of the last evaluation. Raises RunError if
        training fails. Arguments are accepted only to raise a helpful UserError."""
        if unexpected or named:
            raise UserError(refused_arguments(unexpected, named, name_table(settings_of(Config))))
        if self.trained:
            raise RunError(f"already trained, {self.state.global_step} updates: train(). Create a new trainer")
        with self.session(), advise_on_bad_logits(self.state, self.recovery):
            self.trained = True
            return agree(self._run)

    def _run(self) -> dict[str, float]:
        reset_peak_memory(self.accelerator.device)
        copy_from_first(weight.data for weight in self.model.parameters() if weight.requires_grad)
        self.hosted.call("on_train_begin")
        self.events.call("on_train_begin", self)
        if not self.evaluations:  # a resumed run already has the evaluation of the start model
            self.evaluate()
        metrics: dict[str, float] = {}
        while (update := self.state.global_step + 1) <= self.updates:
            metrics = self.update_step(update)
            self.events.call("on_update_done", update)
        self.hosted.call("on_train_end")
        self.events.call("on_train_end")
        return Metrics(metrics | self.evaluations[-1].metrics())

    def update_step(self, update: int) -> dict[str, float]:
        """Run one update: one rollout and all its optimizer steps. Returns the logged metrics."""
        self.hosted.call("on_step_begin")
        times, experience = [perf_counter()], None
        rollout = self.collector.collect(self.prompts_of(update), update)
        times.append(perf_counter())
        try:
            check_finite(logprobs=rollout.logprobs, ref_logprobs=rollout.ref_logprobs, values=rollout.values)
            scores = self.collector.score(rollout)
            rollout, scores = self.resampler.replace_equal_groups(rollout, scores, update)
            scores = scores.for_control(self.config.reward.control, self.config.run.seed, update)
            times.append(perf_counter())
            experience = self.advantages(rollout, scores.shaped)
            self.events.call("on_batch", update, experience, scores)
            stats = self.learner.run(experience, update)
        except SkipUpdate as reason:
            return self.skip_update(update, reason.rollout or rollout, experience, reason)
        self.progress.count_update(scores, rollout.completions.tokens)
        require_finite_weights(self.model, update, self.recovery)
        times.append(perf_counter())
        tag = self.topic_tags.get(self.sampler.topic_of(update))
        metrics = rollout_metrics(experience, scores, self.config.group_size, tag)
        return self.finish_step(update, {**metrics, **stats}, times, rollout.completions.tokens)

    def prompts_of(self, update: int) -> list[tuple[int, Prompt]]:
        """Return the episodes of an update as (number in the run, prompt). Episodes of one group are neighbours."""
        prompts = [prompt for prompt in self.sampler.prompts_of(update) for _ in range(self.config.group_size)]
        return list(enumerate(prompts, (update - 1) * len(prompts)))

    def advantages(self, rollout: Rollout, scores: Tensor) -> Experience:
        """Compute the algorithm's experience from scores (B,), with the current KL coefficient."""
        return self.algorithm.advantages(rollout, scores, self.kl_coef)

    def skip_update(self, update: int, rollout: Rollout, experience: Experience | None, why: SkipUpdate) -> dict:
        """Skip the rest of an update; its earlier optimizer steps remain. Raises RunError after too many in a row."""
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.progress.count_update(None, rollout.completions.tokens)
        require_finite_weights(self.model, update, self.recovery)
        self.events.call("on_update_skipped", update, rollout, experience, why)
        if self.progress.skipped_in_a_row >= MAX_CONSECUTIVE_SKIPS:
            raise RunError(
                f"{self.progress.skipped_in_a_row} updates in a row were skipped: update {update} ({why}). "
                f"{self.recovery(why.by_score)}"
            )
        self._count(update)
        self._close(update)
        return {"updates/skipped": float(self.progress.skipped)}

    def finish_step(self, update: int, metrics: dict[str, float], times: Sequence[float], tokens: int) -> dict:
        """Log the metrics, call the callbacks (KL control sets the next beta), and evaluate if it is due. `times` and
        `tokens` as in `speed_metrics`."""
        self.update_peak_memory()
        metrics |= {
            **self.resampler.metrics(update, times, tokens),
            "kl_coef": self.kl_coef if self.config.kl.kl_placement != "none" else 0.0,
            **({"kl_divergence/target": self.kl_targets.target_of(update).nats} if self.config.kl.steered else {}),
            "optimizer_steps": float(self.progress.optimizer_steps),
            "updates/skipped": float(self.progress.skipped),
            "memory/peak_gib": self.progress.peak_memory / 2**30,
        }
        self._count(update)
        self.host.log(dict(metrics))  # appends to the log history, and calls the callbacks of transformers
        self.events.call("on_update_end", update, metrics)
        self.this_epoch.append(metrics)
        self._close(update)
        return metrics

    def _count(self, update: int) -> None:
        self.state.global_step = update
        self.state.episode = self.episodes
        self.state.epoch = self.sampler.epochs(update)

    def _close(self, update: int) -> None:
        self.hosted.call("on_step_end")
        self._finish_epoch(update)
        if update % self.config.run.eval_every == 0 or update == self.updates:
            self.evaluate()

    def _finish_epoch(self, update: int) -> None:
        """At the end of an epoch, call the callbacks with the mean of each metric over the updates that logged it."""
        before, passes = (int(self.sampler.epochs(u)) for u in (update - 1, update))
        if passes > before and self.this_epoch:
            self.hosted.call("on_epoch_end")
            self.events.call("on_epoch_end", passes, mean_metrics(self.this_epoch))
            self.this_epoch = []

    def set_kl_coef(self, beta: float) -> None:
        """Set the beta of the next update. An adaptive KL schedule replaces it after that update. Raises RunError for
        what --kl-coef refuses."""
        self.kl_coef = checked_beta(beta)

    def update_peak_memory(self) -> None:
        """Update the peak memory of the run. It is that of the process with the largest."""
        self.progress.peak_memory = max(self.progress.peak_memory, largest(memory_in_use(self.accelerator.device)))

    def evaluate(self, prompts: Sequence[GivenPrompt] | None = None) -> dict[str, float]:
        """Evaluate the policy and return the metrics. Results on the evaluation prompts are logged and appended to
        `evaluations`. Results on other `prompts`, in a form that `examples_of` reads, are not. Raises UserError for
        prompts that cannot be read."""
        if prompts is not None:
            return self._evaluated(self.evaluator.read(prompts)).metrics()
        result = self._evaluated(self.evaluation_prompts)
        self.evaluations.append(result)
        self.update_peak_memory()
        self.host.log(result.metrics())
        self.hosted.call("on_evaluate", metrics=result.metrics())
        self.events.call("on_evaluation", result)
        return result.metrics()

    def _evaluated(self, prompts: Sequence[Prompt]) -> Evaluation:
        """Evaluate on some prompts. Raises RunError if the KL or the perplexity is not finite."""
        update = self.state.global_step
        result = self.evaluator.evaluate(prompts, update)
        if result.not_finite:
            advice = self.recovery(False) if update else "Check the start model, --temperature and --eval-text"
            raise RunError(
                f"{result.not_finite}: the evaluation after update {update}. The model is not saved. {advice}"
            )
        return result

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or adapter), the tokenizer and the value head. Only the first process writes."""
        if is_first():
            save_policy(self.actor, self.processing_class, output_dir or self.config.run.output)

    def load_model(self, folder: str | Path) -> None:
        """Load the weights (or adapter) and the value head that `save_model` wrote. Raises UserError if they belong to
        another model."""
        self.evaluator.fix_text()  # while the policy is still the start model
        load_policy_weights(self.actor, folder)
