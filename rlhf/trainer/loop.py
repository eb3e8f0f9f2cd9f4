"""The training loop that all algorithms share: sample, score, log-probs, advantages, optimize, next beta.

An algorithm defines only how scores become advantages, and the loss. Two runs of the same budget with different
algorithms therefore differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.algorithms.classes import class_of
from rlhf.algorithms.experience import Experience
from rlhf.algorithms.objectives import kl_k1, last_token
from rlhf.data.examples import GivenPrompt, examples_of, worked_examples
from rlhf.data.prompts import Prompt, encode_prompts, or_longest
from rlhf.data.sampler import PromptSampler, metric_names
from rlhf.distributed.group import agree, copy_from_first, gather, largest
from rlhf.environments.environment import Environment
from rlhf.models.actor_critic import Actor, ActorCritic, set_adapter_dropout
from rlhf.models.attention import packable
from rlhf.models.device import autocast_dtype, memory_in_use, reset_peak_memory, selected_device
from rlhf.models.reference import Reference
from rlhf.models.save import load_policy_weights, save_policy
from rlhf.rewards.functions import RewardFunction
from rlhf.rewards.rewards import Rewards
from rlhf.rewards.scores import Scores
from rlhf.rollout.completions import Rollout
from rlhf.rollout.episodes import Episode
from rlhf.settings.training import MAX_CONSECUTIVE_SKIPS, Config
from rlhf.trainer.collect import RolloutCollector
from rlhf.trainer.dynamic_sampling import DynamicSampler
from rlhf.trainer.evaluation import Evaluation, Gold, figures_of
from rlhf.trainer.evaluator import Evaluator, Played, fixed_text
from rlhf.trainer.events import Events, agree_on_stop
from rlhf.trainer.given import GENERATE, PLAY, STEP, bind, given_scores, items_of, order_of, prompts_of, sampling_of
from rlhf.trainer.kl import KLControl
from rlhf.trainer.metrics import Metrics, environment_metrics, mean_metrics, rollout_metrics, speed_metrics
from rlhf.trainer.optimize import PolicyOptimizer
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.progress import Progress, evaluation_updates
from rlhf.trainer.safety import SkipUpdate, advise_on_bad_logits, check_finite, require_finite_weights
from rlhf.trainer.session import Session
from rlhf.trainer.state import load_trainer_state, save_trainer_state
from rlhf.trainer.trl_host import make_host
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.files import update_dir_atomically
from rlhf.utils.processes import is_first, size
from rlhf.utils.signals import TrainingInterrupted
from rlhf.utils.statistics import scored
from rlhf.utils.system import keep_freed_memory
from rlhf.utils.timing import timed


class Begin(NamedTuple):
    """What is known at the begin of an update."""

    update: int
    time: float  # of `perf_counter`
    seconds: dict[str, float]  # of the parts of the run
    progress: Progress


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
        eval_functions: Rewards | None = None,
        gold: Gold | None = None,
        session: Session | None = None,
        teacher: Reference | None = None,
        environment: Environment | None = None,
    ):
        """
        Args:
            config: the settings of the run.
            policy: the start model, with adapters if the settings have them. It is trained in place.
            tokenizer: the policy's.
            train: training prompts.
            evaluation: evaluation prompts.
            rewards: reward functions and modules.
            callbacks: as `add_callback` takes them.
            eval_functions: evaluation functions, which training never calls.
            gold: the demo's judge, which training never calls.
            session: saves, prints and stops; None: nothing is saved.
            teacher: a frozen model that scores each token.
            environment: answers the policy's turns; None: an episode is one turn.
        """
        self.config = config
        self.processing_class = tokenizer
        self.session = session or Session()
        self.train_prompts = list(train)
        self.evaluation_prompts = list(evaluation)
        self.sampler = PromptSampler(config, self.train_prompts)
        everything = (*self.train_prompts, *self.evaluation_prompts)
        self.topic_tags = metric_names(p.example.topic for p in everything) if self.sampler.topics else {}
        self.kl = KLControl(config, self.sampler.updates)
        self.progress = Progress()
        self.trained = False
        self.by_hand: ExitStack | None = None  # the run that `begin` opened
        self.running: Begin | None = None  # the update that runs
        self.generated = 0  # episodes that `generate` has started in it
        self.groups = 0  # a number that no group has
        self.evaluations: list[Evaluation] = []
        self.this_epoch: list[dict[str, float]] = []
        self.algorithm = class_of(config.algorithm)(config)
        if not isinstance(rewards, Rewards):
            rewards = Rewards(rewards, None, tokenizer, config.reward.reward_timeout)
        self.rewards = rewards
        self._construct_host(policy)
        self._construct_components(eval_functions, gold, teacher, environment)
        self.events = Events(self.host)
        for callback in callbacks:
            self.add_callback(callback)

    def _construct_host(self, policy: PreTrainedModel | PeftModel) -> None:
        """Construct the TRL trainer and the frozen reference, which must be copied before the policy is wrapped."""
        config = self.config
        device = selected_device()
        if device.type == "cpu":
            keep_freed_memory()
        self.dtype = autocast_dtype(config.model.bf16, device)
        self.reference = Reference.before_training(policy, self.dtype)
        tokenizer = self.processing_class
        planned = self.sampler.updates
        train = or_longest(self.train_prompts, config.data)
        self.host = make_host(config, policy, tokenizer, planned, self.reference, train, self.rewards)
        set_adapter_dropout(self.actor, config.model.lora_dropout, self.actor.dropout)

    def _construct_components(
        self,
        eval_functions: Rewards | None,
        gold: Gold | None,
        teacher: Reference | None,
        environment: Environment | None,
    ) -> None:
        """Construct the forward passes, the collector, the optimizer of the policy, and the evaluator."""
        config = self.config
        host = self.host
        tokenizer = self.processing_class
        batch = config.batch
        model = config.model
        one_minibatch = batch.minibatches == 1 and not model.has_adapter_dropout
        for functions in filter(None, (self.rewards, eval_functions)):
            functions.trainer_state = host.state
        self.passes = passes = ForwardPasses(
            host.actor,
            self.reference,
            config.sampling.temperature,
            self.dtype,
            packed=config.speed.packed,
            max_rows=batch.micro_batch_size,
            max_tokens=batch.micro_batch_tokens,
            share_first=one_minibatch and not model.gradient_checkpointing,
            oom_hint=self.session.memory_advice,
        )
        without_critic = replace(passes, actor=Actor(host.actor.policy))
        self.teacher = None
        if teacher is not None:
            packed = passes.packed and packable(teacher.copy)
            self.teacher = replace(without_critic, reference=teacher, packed=packed)
        # the text of `reset` makes prompts longer
        train = or_longest([] if environment else self.train_prompts, config.data)
        longest = max(len(prompt.ids) for prompt in [*train, *self.evaluation_prompts])
        given = config, host, tokenizer, self.rewards, passes, self.progress, longest, environment, self.session.say
        self.collector = RolloutCollector(*given)
        self.policy_optimizer = PolicyOptimizer(config, host, self.algorithm, passes, self.progress)
        self.deferrable = one_minibatch and not isinstance(host.actor, ActorCritic) and teacher is None
        self.dynamic_sampler = DynamicSampler(config, self.sampler, self.collector)
        self.gold = gold
        player = replace(self.collector.player, engine=None, phase="an evaluation", in_parts=True)
        self.evaluator = Evaluator(
            player,
            without_critic,  # an evaluation needs no values
            tokenizer,
            self.rewards,
            judges=[eval_functions] if eval_functions is not None else [],
            purpose="evaluate",
            teacher=self.teacher,
            keeps_graphs=True,
        )

    @property
    def actor(self) -> Actor:
        """The policy, with the critic if the algorithm has one."""
        return self.host.actor

    @property
    def kl_coef(self) -> float:
        """The beta of the next update, score units per nat."""
        return self.kl.beta

    @property
    def episodes(self) -> int:
        """The number of completions sampled for training so far, with those that dynamic sampling replaced."""
        return self.progress.episodes

    @property
    def updates(self) -> int:
        """The number of updates in the run: as planned, or fewer if it has ended before."""
        return self.sampler.updates if self.reason_to_end() is None else self.host.state.global_step

    def reason_to_end(self) -> str | None:
        """Return why no update follows; None: another one does."""
        budget = self.config.run.episodes
        progress = self.running.progress if self.running else self.progress  # before the update that runs
        if self.host.state.global_step >= self.sampler.updates:
            return "all updates are done"
        if budget is not None and progress.episodes >= budget:
            return "--episodes are spent"
        return "a callback asked for it" if self.host.control.should_training_stop else None

    def add_callback(self, callback) -> None:
        """Add a callback of this project (rlhf.callbacks.base.Callback), a function (epoch, metrics), or a
        TrainerCallback of transformers."""
        self.events.add(callback)

    @property
    def update(self) -> int:
        """The number of updates that are done."""
        return self.host.state.global_step

    def train(self) -> dict[str, float]:
        """Run all updates. Returns the metrics of the last update and of the last evaluation. Raises RunError if
        training fails, and UserError without training prompts."""
        if not self.train_prompts:
            raise UserError("no training prompts", "train()", "Pass prompts, or use generate() and step()")
        with self._opened("train()"):
            return agree(self._run)

    @contextmanager
    def _opened(self, where: str) -> Iterator[None]:
        """Context manager around a run: its session, and the evaluation of the start model."""
        state = self.host.state
        if self.trained:
            raise RunError(f"already trained, {state.global_step} updates", where, "Create a new trainer")
        with self.session.opened(self), advise_on_bad_logits(state, self.session.advice):
            self.trained = True
            agree(self._begin)
            yield

    def _run(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        while self.apply_requests() is None:  # a beta, or the end of the run, that a callback asked for
            metrics = self.update_step(self.update + 1)
            self._after_update()
        return Metrics(metrics | self._end())

    def _begin(self) -> None:
        """Prepare the processes and the callbacks, and evaluate the start model."""
        reset_peak_memory(self.host.accelerator.device)
        copy_from_first(weight.data for weight in self.host.model.parameters() if weight.requires_grad)
        self.events.call("on_train_begin", self)
        if self.evaluation_prompts and self.update == 0:  # a resumed run has the evaluation of the start model
            self.evaluations = []
            self.evaluate()

    def _end(self) -> dict[str, float]:
        """Evaluate the final weights, if that is not done. Returns the metrics of the last evaluation."""
        if self.evaluations and self.evaluations[-1].update < self.update:  # a callback asked for the end
            self.evaluate()
        self.events.call("on_train_end")
        return self.evaluations[-1].metrics() if self.evaluations else {}

    def update_step(self, update: int) -> dict[str, float]:
        """Run one update: one rollout and all its optimizer steps. Returns the logged metrics."""
        with self.passes.weights.in_use():
            self._begin_update(update)
            # 1. sample: one completion per episode
            return self._learn(self.collector.sample(self.episodes_of(update), update))

    def _begin_update(self, update: int) -> None:
        """Begin an update, on the first call."""
        if self.running is None or self.running.update != update:
            began = perf_counter()
            self.events.call("on_update_begin", update)
            self.running = Begin(update, began, timed.seconds(), replace(self.progress))
            self.generated = 0

    def _learn(self, rollout: Rollout, given: Scores | None = None) -> dict[str, float]:
        """Run the rest of an update: all but sampling. `given` are the scores of the rollout; None: the reward
        functions give them. Returns the logged metrics."""
        update, began, *_ = begin = self.running
        self.running = None
        experience = None
        try:
            # 2. score: reward model and reward functions, then dynamic sampling and the control
            scores = self.collector.score(rollout, given=given)
            rollout, scores = self.dynamic_sampler.replace_equal_groups(rollout, scores, update)
            scores = scores.for_control(self.config.reward.control, self.config.run.seed, update)
            rollout.function_scores = scores.each
            rollout.function_weights = scores.weights
            # 3. log-probs: those of the completions that are kept, the reference's, and the critic's values
            rollout, deferred = self.with_logprobs(rollout, scores.shaped)
            rollout, scores = self.with_teacher(rollout, scores)
            with timed("optimizer steps"):
                # 4. advantages: from the scores and, with the penalty in the reward, beta times the KL
                experience = self.advantages(rollout, scores.shaped)
                experience.deferred = deferred
                self.events.call("on_batch", update, experience, scores)
                # 5. optimize: passes over shuffled minibatches
                stats = self.policy_optimizer.run(experience, update)
        except SkipUpdate as reason:
            return self.skip_update(update, reason.rollout or rollout, experience, reason)
        finally:
            self.passes.clear()  # also if a reward function raised: a notebook keeps the trainer
        self.progress.count_update(scores)
        self.progress.spend("updates", began)
        with timed("optimizer steps"):
            require_finite_weights(self.host.model, update, self.session.advice)
        metrics = self.metrics_of(begin, experience, scores) | environment_metrics(rollout.episodes) | stats
        # 6. next beta: towards the KL target
        self.adjust_beta(update, metrics)
        self.count_update(update)
        self.events.call("on_update_end", update, metrics)
        self.this_epoch.append(metrics)
        self.finish_epoch(update)
        return metrics

    # --- the loop by hand --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the run: its folder, or the run that is resumed, and evaluate the start model. `generate` and `step`
        call it. Raises UserError for settings that only `train` can follow."""
        if self.by_hand is not None:
            return
        refused = {
            "several processes": size() > 1,
            "dynamic sampling": self.config.group.dynamic_sampling,
            f"{self.config.label}, which samples greedy completions,": self.config.greedy,
        }
        for what in (name for name, found in refused.items() if found):
            raise UserError(f"{what} in a loop by hand", "begin()", "Use train()")
        with ExitStack() as stack:
            stack.enter_context(self._opened("begin()"))
            self.by_hand = stack.pop_all()

    def generate(
        self,
        prompts_or_episodes: Sequence[GivenPrompt | Sequence[int] | Episode],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        greedy: bool = False,
        logprobs: bool = False,
    ) -> list[Episode]:
        """Sample one turn of each episode with the present weights.

        A random number depends on the seed, the update in which the episode began, its number in that update, and the
        number of the policy's tokens in it, not on the call: two calls for 8 tokens give what one for 16 gives. An
        episode whose turns were sampled with different weights counts as one of the oldest. Raises UserError.

        Args:
            prompts_or_episodes: prompts as in `make_trainer`, or as ids: K episodes of each are returned, which are
                neighbours. Or episodes: they are continued, unless they are done, and returned.
            max_new_tokens: largest length of the turn; None: that of the configuration.
            stop: texts that end the turn, besides EOS; None: those of the configuration.
            greedy: take the most likely token.
            logprobs: compute `Episode.logprobs`.
        """
        self.begin()
        sampling = sampling_of(self.config.sampling, max_new_tokens, stop, greedy)
        given = items_of(prompts_or_episodes, GENERATE)
        update = self.update + 1
        if any(isinstance(one, Episode) for one in given):
            bind(given, self.collector.rules, GENERATE)
            episodes = given
        else:
            episodes = self._new(given)
        waiting = [episode for episode in episodes if not episode.done]
        again = any(episode.spans for episode in waiting)
        if self.collector.vllm is not None and (again or sampling != self.config.sampling):
            raise UserError(
                "vLLM samples one turn of an episode, with the settings of the run",
                GENERATE,
                "Use rollout_engine='auto'",
            )
        if waiting:
            with self.passes.weights.in_use():
                self._begin_update(update)
                self._number([episode for episode in waiting if episode.number is None])
                self.collector.turn(waiting, sampling, logprobs)
        return episodes

    def play(self, prompts: Sequence[GivenPrompt | Sequence[int]]) -> list[Episode]:
        """Play K episodes of each prompt with the environment, to their end, as `train` does: `step` then trains on
        them. Episodes of one prompt are neighbours. Random numbers are those of `generate`. Raises UserError."""
        self.begin()
        episodes = self._new(items_of(prompts, PLAY))
        if episodes:
            with self.passes.weights.in_use():
                self._begin_update(self.update + 1)
                self._number(episodes)
                self.collector.play(episodes)
        return episodes

    def _new(self, given: Sequence) -> list[Episode]:
        """Return K episodes of each prompt, without a turn and a number."""
        data = self.config.data
        prompts = prompts_of(given, self.collector.rules, data.prompt_length, worked_examples(data.few_shot))
        rows = [prompt for prompt in prompts for _ in range(self.config.group_size)]
        return self.collector.started([(None, row) for row in rows], self.update + 1)

    def _number(self, episodes: Sequence[Episode]) -> None:
        """Give new episodes their number in the update, and their group."""
        update = self.update + 1
        for i, episode in enumerate(episodes):
            episode.number = (update - 1) * self.config.episodes_per_update + self.generated + i
            episode.stream = update
            if episode.group is None:
                episode.group = self.groups + i // self.config.group_size
        self.generated += len(episodes)
        self.groups += len(episodes)

    def step(
        self,
        episodes: Sequence[Episode],
        scores: Sequence[float | None] | None = None,
        *,
        turn_scores: Sequence[Sequence[float]] | None = None,
        token_scores: Sequence[Sequence[float]] | None = None,
        assume_on_policy: bool = False,
    ) -> dict[str, float]:
        """Run one update on episodes: log-probs, advantages, optimizer steps and the next beta. Returns its metrics.

        It takes the episodes of one update: `batch_size` x K, in groups of K if the algorithm compares them. Episodes
        that were not sampled with the present weights need `logprobs`: they are the old policy of the ratio. Their KL
        is not logged, and does not move beta. Raises UserError, before anything changes, for what does not fit.

        Args:
            episodes: of `generate` or `Episode.of`; they may be done or not.
            scores: one per episode, None for one without a score. Without any scores, the reward functions give them.
            turn_scores: of each episode, one score per turn, paid at the turn's last token; added to the others.
            token_scores: of each episode, one score per token, 0 on an environment's tokens; added to the others.
            assume_on_policy: take the log-probs of the present weights as those of all episodes without `logprobs`.
        """
        self.begin()
        given = items_of(episodes, STEP)
        update = self.update + 1
        why = self.apply_requests()
        if why is not None:
            raise UserError(f"no update follows: {why}", STEP, "Call finish(), or raise num_iterations")
        bind(given, self.collector.rules, STEP)
        order = order_of(given, self.config.episodes_per_update, self.config.group_size)
        stale = [row for row, episode in enumerate(given) if episode.update != update]
        unknown = [row for row in stale if given[row].logprobs is None]
        if unknown and not assume_on_policy:
            raise UserError(
                f"{len(unknown)} episodes were not sampled with the present weights, and have no log-probs",
                f"{STEP}, episode {unknown[0]}",
                "Give Episode.of(logprobs=), or generate(logprobs=True), or step(assume_on_policy=True)",
            )
        if self.collector.vllm is not None and any(not episode.sampled_logprobs for episode in given):
            raise UserError("episodes that vLLM has not sampled", STEP, "Use rollout_engine='auto'")
        chosen = [given[row] for row in order]
        try:
            found = given_scores(given, scores, turn_scores, token_scores, order)
        except (TypeError, ValueError) as error:
            raise UserError(f"no lists of numbers ({error})", f"{STEP}, scores", "Give one per episode") from None
        with self.passes.weights.in_use():
            self._begin_update(update)
            rollout = self.collector.rollout(chosen)
            rollout.stale = [row for row, episode in enumerate(chosen) if episode.update != update]
            self.progress.episodes += sum(episode.update is None for episode in chosen)  # no sampler has counted these
            metrics = self._learn(rollout, found)
        for episode in given:
            episode.trained = True
        return metrics

    def save_state(self, folder: str | Path) -> None:
        """Write everything that the next update depends on: a loop by hand without `output` continues from there."""
        update_dir_atomically(Path(folder), lambda into: save_trainer_state(self, into))

    def load_state(self, folder: str | Path) -> None:
        """Load what `save_state` wrote into a new trainer with the same configuration and callbacks."""
        load_trainer_state(self, Path(folder))

    def after_step(self) -> None:
        """Evaluate and save after an update, if that is due. After a stop signal, ends the run and raises
        TrainingInterrupted."""
        self.begin()
        try:
            if self.update:
                self._after_update()
        except TrainingInterrupted:
            with self._closing():
                raise

    def _closing(self) -> ExitStack:
        """Return the run that `begin` opened, to end it."""
        stack, self.by_hand = self.by_hand, None
        return stack

    def _after_update(self) -> None:
        """Evaluate and save after an update, if that is due."""
        update = self.update
        due = self.reason_to_end() is not None or update in evaluation_updates(self.config.run, self.sampler.updates)
        if due and self.evaluation_prompts and self.evaluations[-1].update < update:
            self.evaluate()
        self.events.call("on_update_done", update)
        self.session.save(update, last=self.reason_to_end() is not None)  # after a stop signal, ends the run

    def finish(self) -> dict[str, float]:
        """End a run by hand: evaluate the final weights, and write its results. Returns the metrics of the last
        evaluation."""
        self.begin()
        if self.reason_to_end() is None:
            self.request_stop()
            if self.update:
                self.session.save(self.update, last=True)
        with self._closing():
            return Metrics(self._end())

    def episodes_of(self, update: int) -> list[tuple[int, Prompt]]:
        """Return the episodes of an update as (number in the run, prompt). Episodes of one group are neighbours."""
        prompts = [prompt for prompt in self.sampler.prompts_of(update) for _ in range(self.config.group_size)]
        return list(enumerate(prompts, (update - 1) * len(prompts)))

    def with_logprobs(self, rollout: Rollout, scores: Tensor) -> tuple[Rollout, bool]:
        """Return the rollout with its log-probs, those of the reference, and values. Log-probs that nothing reads are
        NaN. True is returned if the first optimizer step computes those of the completions with a gradient. `scores`
        are those of `advantages`. Raises SkipUpdate, with the rollout, if a number is not finite."""
        beta = self.kl.beta
        every = self.config.reference_every(beta)
        # not before the advantages if a critic, the KL in the reward or the weights for vLLM need them
        sampled = rollout.completions.sampled_logprobs
        deferred = self.deferrable and sampled is None and not self.algorithm.beta_in_reward(beta)
        deferred = deferred and not rollout.stale
        counted = self.algorithm.counted(rollout, scores, beta)
        logged = torch.arange(len(counted), device=counted.device) % every == 0
        chosen = logged & ~counted if deferred else logged | counted
        reads_all = self.teacher is not None or self.events.read_batches or self.config.record.record_tokens
        if any(gather(reads_all)):
            chosen = torch.ones_like(chosen)
        chosen &= rollout.mask.any(1)  # not greedy completions
        rows = chosen.nonzero().flatten().tolist()
        found = self.collector.logprobs(rollout, every, rows)
        for row in rollout.stale:
            old = rollout.episodes[row].logprobs
            if old is not None:  # the policy that sampled them is the old one of the ratio
                found.logprobs[row, : len(old)] = torch.tensor(old).to(found.logprobs)
        try:
            check_finite(logprobs=found.logprobs[rows], ref_logprobs=found.ref_logprobs[::every], values=found.values)
        except SkipUpdate as reason:
            raise SkipUpdate(str(reason), rollout=found) from None
        return found, deferred

    @timed("log-probs")
    def with_teacher(self, rollout: Rollout, scores: Scores) -> tuple[Rollout, Scores]:
        """Return the rollout with the teacher's score of each token, log p_teacher - log p_policy in nats, added to
        what is paid there, and the scores with their sums. Raises SkipUpdate if one is not finite."""
        if self.teacher is None:
            return rollout, scores
        mask = rollout.mask
        kl = kl_k1(rollout.logprobs, self.teacher.reference_logprobs(rollout.completions), mask)
        check_finite(teacher_kl=kl)
        whole = kl.sum(1)
        of_policy = whole.clone()
        of_policy[rollout.stale] = torch.nan  # their KL is another policy's
        given = scores.shaped.nan_to_num()  # the teacher scores every completion
        paid = rollout.token_scores
        if paid is None:
            paid = torch.where(last_token(mask), given.unsqueeze(1), 0.0)
        scores = replace(scores, raw=scores.raw.nan_to_num() - whole, shaped=given - whole, teacher_kl=of_policy)
        return replace(rollout, token_scores=paid - kl), scores

    def advantages(self, rollout: Rollout, scores: Tensor) -> Experience:
        """Compute the algorithm's experience from scores (B,), with the current beta."""
        experience = self.algorithm.advantages(rollout, scores, self.kl.beta)
        experience.counted = self.algorithm.counted(rollout, scores, self.kl.beta).tolist()
        return experience

    def adjust_beta(self, update: int, metrics: dict[str, float]) -> None:
        """Let the KL control set the next beta. After several updates with a KL far above the target,
        --rollback-on-kl loads the weights from before them."""
        only_critic = update <= self.config.critic.critic_warmup
        for warning in self.kl.after_update(update, metrics, only_critic):
            self.session.say(warning)
        if self.config.run.rollback_on_kl and self.kl.runaways >= MAX_CONSECUTIVE_SKIPS:
            self.session.roll_back(update - self.kl.runaways)
            self.kl.runaways = 0

    def skip_update(self, update: int, rollout: Rollout, experience: Experience | None, why: SkipUpdate) -> dict:
        """Skip the rest of an update; its earlier optimizer steps remain. Raises RunError after too many in a row."""
        self.host.optimizer.zero_grad()
        self.host.lr_scheduler.step()
        self.progress.count_update(None)
        require_finite_weights(self.host.model, update, self.session.advice)
        self.count_update(update)
        self.events.call("on_update_skipped", update, rollout, experience, why)
        if self.progress.skipped_in_a_row >= MAX_CONSECUTIVE_SKIPS:
            raise RunError(
                f"{self.progress.skipped_in_a_row} updates in a row were skipped",
                f"update {update} ({why})",
                self.session.advice(why.by_score),
            )
        self.kl.after_skipped_update()
        self.finish_epoch(update)
        return {"updates/skipped": float(self.progress.skipped)}

    def metrics_of(self, begin: Begin, experience: Experience, scores: Scores) -> dict[str, float]:
        """Return the metrics of an update, without those of its optimizer steps."""
        self.update_peak_memory()
        kl = self.config.kl
        update = begin.update
        tokens = self.progress.completion_tokens - begin.progress.completion_tokens
        episodes = self.progress.episodes - begin.progress.episodes
        drawn = (episodes - self.config.episodes_per_update) / self.config.group_size
        counts = {"rewards/resampled_groups": drawn, "episodes": float(self.episodes)}
        tag = self.topic_tags.get(self.sampler.topic_of(update))
        return {
            **rollout_metrics(experience, scores, self.config.compared, tag),
            **speed_metrics(timed.since(begin.seconds), tokens, episodes),
            **(counts if self.config.group.dynamic_sampling else {}),
            "kl_coef": experience.kl_coef if kl.kl_placement != "none" else 0.0,
            **({"kl_divergence/target": self.kl.target_of(update).nats} if kl.steered else {}),
            "optimizer_steps": float(self.progress.optimizer_steps),
            "updates/skipped": float(self.progress.skipped),
            **({"episodes/stale": float(len(experience.stale))} if experience.stale else {}),
            **({"episodes/assumed_on_policy": float(experience.assumed)} if experience.assumed else {}),
            "memory/peak_gib": self.progress.peak_memory / 2**30,
        }

    def count_update(self, update: int) -> None:
        """Set the counters of transformers' TrainerState to this update."""
        state = self.host.state
        state.global_step = update
        state.episode = self.episodes
        state.epoch = self.sampler.epochs(update)

    def finish_epoch(self, update: int) -> None:
        """At the end of an epoch, call the callbacks with the mean of each metric over the updates that logged it."""
        epoch = int(self.sampler.epochs(update))
        if epoch > int(self.sampler.epochs(update - 1)) and self.this_epoch:
            self.events.call("on_epoch_end", epoch, mean_metrics(self.this_epoch))
            self.this_epoch = []

    def set_kl_coef(self, beta: float) -> None:
        """Ask for another beta from the next update on. An adaptive KL schedule continues from it. Raises RunError for
        a value that --kl-coef refuses."""
        self.kl.request(beta)

    def request_stop(self) -> None:
        """Ask for the end of the run after the current update."""
        self.host.control.should_training_stop = True

    def apply_requests(self) -> str | None:
        """Apply what callbacks have asked for since the last update. Returns why no update follows, or None."""
        self.kl.apply_request()
        agree_on_stop(self.host.control)
        return self.reason_to_end()

    def update_peak_memory(self) -> None:
        """Update the peak memory of the run. It is that of the process with the largest."""
        now = largest(memory_in_use(self.host.accelerator.device))
        self.progress.peak_memory = max(self.progress.peak_memory, now)

    def evaluate(self, prompts: Sequence[GivenPrompt] | None = None) -> dict[str, float]:
        """Evaluate the policy and return the metrics. Results on the evaluation prompts are logged and appended to
        `evaluations`. Results on other `prompts`, in a form that `examples_of` reads, are not. Raises UserError for
        prompts that cannot be read."""
        if prompts is not None:
            return self._evaluated(self._read(prompts)).metrics()
        if not self.evaluation_prompts:
            raise UserError("no evaluation prompts", "evaluate()", "Pass prompts")
        began = perf_counter()
        result = self._evaluated(self.evaluation_prompts)
        self.evaluations.append(result)
        self.update_peak_memory()
        self.events.call("on_evaluation", result)
        self.progress.spend("evaluations", began)
        return result.metrics()

    def _read(self, given: Sequence[GivenPrompt]) -> list[Prompt]:
        """Return prompts in a form that `examples_of` reads, without those that are too long. Raises UserError if
        none is left, or they cannot be read."""
        longest = self.config.data.prompt_length
        examples = examples_of(given)
        if not examples:
            raise UserError("an empty list", "evaluate()", "Pass texts or chats")
        shots = worked_examples(self.config.data.few_shot)
        kept = encode_prompts(self.processing_class, examples, longest, shots)
        if not kept:
            raise UserError(f"no prompt of at most {longest} tokens", "evaluate()", "Give shorter ones")
        return kept

    def fix_text(self, start: Played | None = None) -> None:
        """Choose the text for the perplexity, on the first call. The policy must still be the start model then.
        `start` returns its episodes of prompts; None: they are played."""
        if self.evaluator.text is None:
            start = start or self.evaluator.start_completions
            file = self.config.data.eval_text
            self.evaluator.text = fixed_text(self.processing_class, self.evaluation_prompts, start, file)

    def _evaluated(self, prompts: Sequence[Prompt]) -> Evaluation:
        """Evaluate on some prompts. Raises RunError if no completion has a score, or if the KL or the perplexity is
        not finite."""
        update = self.host.state.global_step
        where = f"the evaluation after update {update}"
        run = self.config.run
        samples = run.eval_samples
        # the numbers of the first completion of each prompt do not depend on how many there are
        rows = [(k * len(prompts) + i, prompt) for i, prompt in enumerate(prompts) for k in range(samples)]
        sampling = None if run.eval_temperature is None else self.config.eval_sampling
        with timed("evaluation"), self.passes.weights.in_use(), self.passes.raise_on_oom("an evaluation"):
            self.passes.clear()  # sampling needs the memory
            if prompts is not self.evaluation_prompts or sampling not in (None, self.config.sampling):
                self.fix_text()
            result = self.evaluator.evaluate(
                rows,
                samples,
                sampling,
                # of the first evaluation, the first completions of the prompts are the text
                sampled=lambda played: self.fix_text(lambda few: played[: len(few) * samples : samples]),
            )
        if not scored(result.scores).size:
            names = ", ".join(self.rewards.names)
            raise RunError(
                f"no completion has a score, because every reward function returned None ({names})",
                where,
                "Use prompts to which a reward function applies, or another function",
            )
        if result.not_finite:
            start = "Check the start model, --temperature and --eval-text"
            advice = self.session.advice(by_score=False) if update else start
            raise RunError(result.not_finite, where, f"The model is not saved. {advice}")
        topics = [[self.topic_tags.get(prompt.example.topic)] * samples for prompt in prompts]
        return replace(
            result,
            update=update,
            topics=topics if any(map(any, topics)) else None,
            figures={name: figures_of(values, run.seed) for name, values in result.judged.items()},
            gold=None if self.gold is None else result.gold_of(prompts, self.gold),
        )

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or adapter), the tokenizer and the value head. Only the first process writes."""
        if is_first():
            folder = output_dir or self.config.run.output
            save_policy(self.actor, self.processing_class, self.config.sampling, folder)

    def load_model(self, folder: str | Path) -> None:
        """Load the weights (or adapter) and the value head that `save_model` wrote. Raises UserError if they belong to
        another model."""
        self.fix_text()  # while the policy is still the start model
        load_policy_weights(self.actor, folder)
