"""The run that PPO and GRPO share, in named steps: rollout, score, advantages, update, finish.

What differs is an algorithm's own: how scores become advantages, and the loss. A difference between two runs at the
same budget is then a difference between two algorithms.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from accelerate import PartialState
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from config import IN_A_ROW, Config
from rlhf.algorithms import objectives
from rlhf.algorithms.experience import Experience, PolicyOutputs
from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.examples import GivenPrompt, examples_of
from rlhf.data.prompts import Prompt, encode_prompts
from rlhf.data.sampler import Dealing, tag_names
from rlhf.models.actor_critic import Actor, set_adapter_dropout
from rlhf.models.attention import packable
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast, autocast_dtype, memory_in_use, reset_peak_memory
from rlhf.models.logprobs import base_of
from rlhf.models.packing import Passage
from rlhf.models.reference import Reference
from rlhf.models.save import bad_weights, load_policy_weights, save_policy
from rlhf.rewards.call import BadScore
from rlhf.rewards.functions import RewardFunction
from rlhf.rewards.normalizer import ScoreNormalizer
from rlhf.rewards.rewards import Rewards
from rlhf.rollout.completions import Forward, Replies, Rollout
from rlhf.rollout.engine import check_engine, sample_replies
from rlhf.rollout.logprobs import measure
from rlhf.rollout.sampling import uniforms
from rlhf.rollout.vllm import VLLMEngine
from rlhf.trainer.evaluation import Evaluation, FixedText, evaluate, fixed_text
from rlhf.trainer.metrics import rollout_metrics
from rlhf.trainer.micro_batch import Limits
from rlhf.trainer.safety import Dropped, Drops, check_finite, check_step
from rlhf.trainer.scores import Scored
from rlhf.trainer.trl_host import make_host
from rlhf.utils.errors import RunError, UserError
from rlhf.utils.rng import generator
from rlhf.utils.system import keep_freed_memory

MOST_WEIGHT = 2.0  # of a token whose sampler was another program
EVENTS = (
    *("on_train_begin", "on_batch", "on_update_end", "on_evaluation", "on_epoch_end", "on_update_done"),
    *("on_drop", "on_train_end"),
)


class OnPolicyLoop:
    """Trains with one algorithm of the table. A TRL trainer, `host`, owns accelerator, optimizer, scheduler and state.

    Randomness comes from (seed, update, purpose). Dropout draws from torch's global streams, which `dropout_stream`
    seeds; vLLM has a stream of its own.
    """

    # what is counted over a run, for checkpoints
    COUNTERS = ("kl_coef", "optimizer_steps", "reply_tokens", "peak_memory", "proved")

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
        if PartialState().device.type == "cpu":
            keep_freed_memory()
        self.config = config
        self.train_prompts, self.evaluation_prompts = list(train), list(evaluation)
        reward = config.reward
        given = isinstance(rewards, Rewards)
        self.rewards = rewards if given else Rewards(rewards, None, tokenizer, reward.reward_timeout)
        self.normalizer = ScoreNormalizer(reward.score_ema) if reward.normalize_scores else None
        self.dealing = Dealing(config, self.train_prompts)
        everything = (*self.train_prompts, *self.evaluation_prompts)
        self.topic_tags = tag_names(p.example.topic for p in everything) if self.dealing.topics else {}
        self.updates = self.dealing.updates
        self.kl_coef = config.kl.kl_coef
        self.optimizer_steps, self.reply_tokens, self.peak_memory = 0, 0, 0
        self.evaluations: list[Evaluation] = []
        self.text: FixedText | None = None
        self.sampling = config.sampling
        self.dtype = autocast_dtype(config.model.bf16, PartialState().device)
        check_engine(config.speed.rollout_engine, policy, PartialState().device)
        self.packed = config.speed.packed and packable(base_of(policy))
        self.reference = Reference.before_training(policy, self.dtype)
        self.limits = Limits(config.batch.micro_batch_size, budget_of(PartialState().device).tokens_per_micro_batch)
        self.drops = Drops()
        self.proved = 0  # the weights from after this update gave a finite gradient in the next one
        # returns the advice for a run that gives up; the argument: whether reward functions are the reason
        self.recovery: Callable[[bool], str] = lambda by_score: (
            "Fix the reward function" if by_score else "Train again with a smaller learning_rate"
        )
        self.trained = False
        self.listeners: list = []
        self.this_epoch: list[dict[str, float]] = []
        self.algorithm = ALGORITHMS[config.algorithm].build(config)
        self.processing_class = tokenizer
        host = make_host(config, policy, tokenizer, self.updates, self.reference, self.train_prompts)
        self.host, self.model, self.accelerator = host, host.model, host.accelerator
        self.optimizer, self.lr_scheduler = host.optimizer, host.lr_scheduler
        self.args, self.state, self.control, self.callback_handler = (
            host.args, host.state, host.control, host.callback_handler
        )  # fmt: skip
        set_adapter_dropout(policy, config.model.lora_dropout)
        self.vllm = None
        if config.speed.rollout_engine == "vllm":
            parts = (self.actor.policy, self.accelerator, tokenizer, self.sampling, config.data.prompt_length)
            self.vllm = VLLMEngine(*parts)
        for printer in (PrinterCallback, ProgressCallback):
            host.remove_callback(printer)  # the console is ours
        self.state.max_steps = self.updates
        for callback in callbacks:
            self.add_callback(callback)

    @property
    def actor(self) -> Actor:
        """The policy, and the critic if there is one, in one forward."""
        return self.host.actor

    def advantages(self, rollout: Rollout, scores: Tensor) -> Experience:
        """The algorithm's experience from scores (B,), at the present KL coefficient."""
        return self.algorithm.advantages(rollout, scores, self.kl_coef)

    def log(self, metrics: dict[str, float]) -> None:
        """Hand metrics to TRL's log, which keeps the history and calls transformers' callbacks."""
        self.host.log(metrics)

    def add_callback(self, callback) -> None:
        """One of ours (rlhf.callbacks.base.Callback), a function of (epoch, metrics), or one of transformers'."""
        if isinstance(callback, TrainerCallback) or (
            isinstance(callback, type) and issubclass(callback, TrainerCallback)
        ):
            self.host.add_callback(callback)
        elif callable(callback) or any(hasattr(callback, event) for event in EVENTS):
            self.listeners.append(callback)
        else:
            raise UserError(f"hears nothing: callback {callback!r:.60}. Give it one of {', '.join(EVENTS)}")

    def tell(self, event: str, *details) -> None:
        """Call `event` on every callback that has it. A bare function hears the ends of epochs."""
        for listener in self.listeners:
            heard = getattr(listener, event, listener if event == "on_epoch_end" and callable(listener) else None)
            if heard is not None:
                heard(*details)

    # --- the run -----------------------------------------------------------------------------------------------------

    def train(self, *unexpected, **named) -> dict[str, float]:
        """All updates; returns the last update's metrics together with the last evaluation's.

        Takes no arguments, unlike other trainers: raises UserError that names where they belong.
        """
        if unexpected or named:
            raise UserError(
                f"train() takes no arguments: {', '.join([*map(repr, map(type, unexpected)), *named])}. Give prompts "
                "and callbacks to make_trainer(), and the length to make_config(epochs=) or (num_iterations=)"
            )
        if self.trained:
            raise RunError(f"already trained, {self.state.global_step} updates: train(). Make a new trainer")
        self.trained = True
        reset_peak_memory(self.accelerator.device)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self.tell("on_train_begin", self)
        if not self.evaluations:  # a resumed run has the start model's
            self.evaluate()
        metrics: dict[str, float] = {}
        for update in range(self.state.global_step + 1, self.updates + 1):
            metrics = self.one_update(update)
            self.tell("on_update_done", update)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.tell("on_train_end")
        return {**metrics, **self.evaluations[-1].metrics()}

    def one_update(self, update: int) -> dict[str, float]:
        """One rollout batch and all its optimizer steps; returns what was logged."""
        begun = time.perf_counter()
        rollout = self.rollout(self.prompts_of(update), update, "rollout")
        rolled = time.perf_counter()
        batch = None
        try:
            check_finite(logprobs=rollout.logprobs, ref_logprobs=rollout.ref_logprobs, values=rollout.values)
            scored = self.score(rollout)
            judged = time.perf_counter()
            batch = self.corrected(self.advantages(rollout, scored.used))
            self.tell("on_batch", update, batch, scored)
            stats = self.update(batch, update)
        except Dropped as found:
            return self.drop(update, rollout, batch, found)
        self.drops.note(dropped=False)
        self.require_finite_weights(update)
        times = {
            "time/rollout_s": rolled - begun,
            "time/score_s": judged - rolled,
            "time/update_s": time.perf_counter() - judged,
        }
        said = rollout_metrics(batch, scored, self.config.group_size)
        return self.finish_step(update, {**said, **self.of_topic(update, said), **stats, **times})

    def of_topic(self, update: int, said: dict[str, float]) -> dict[str, float]:
        """An update's score and KL once more, under its topic's name; nothing where topics are not looked at."""
        topic = self.dealing.topic_of(update)
        kinds = {"score": "rewards/mean", "kl": "kl_divergence"} if topic is not None else {}
        return {f"topic/{self.topic_tags[topic]}/{kind}": said[name] for kind, name in kinds.items()}

    def drop(self, update: int, rollout: Rollout, batch: Experience | None, found: Dropped) -> dict[str, float]:
        """The rest of an update is left out, and callbacks hear of it; optimizer steps that were taken stay. Raises
        RunError after some in a row."""
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.drops.note(dropped=True)
        self.require_finite_weights(update)
        self.tell("on_drop", update, rollout, batch, found)
        if self.drops.in_a_row >= IN_A_ROW:
            raise RunError(
                f"{self.drops.in_a_row} updates in a row were skipped: update {update}, {found}. "
                f"{self.recovery(found.by_score)}"
            )
        self._count(update)
        self._close(update)
        return {"updates/dropped": float(self.drops.count)}

    def require_finite_weights(self, update: int) -> None:
        """Raise RunError if an optimizer step of this update left weights that are not finite: no later update can
        repair them."""
        bad = bad_weights(self.model)
        if bad:
            raise RunError(
                f"{len(bad)} weights are not finite, the first is {bad[0]}: after update {update}. They are not "
                f"saved. {self.recovery(False)}"
            )

    def prompts_of(self, update: int) -> list[tuple[int, Prompt]]:
        """This update's episodes: their numbers in the run and their prompts; a group's stand together."""
        prompts = [prompt for prompt in self.dealing.prompts_of(update) for _ in range(self.config.group_size)]
        return list(enumerate(prompts, (update - 1) * len(prompts)))

    def rollout(self, episodes: Sequence[tuple[int, Prompt]], update: int, purpose: str) -> Rollout:
        """Sample a reply to every prompt; log-probs, values and reference log-probs under the training forward."""
        prompts = [prompt for _, prompt in episodes]
        uniform = uniforms(self.config.run.seed, update, purpose, [e for e, _ in episodes], self.sampling.reply_length)
        self.model.eval()  # in train mode, gradient checkpointing would drop the cache
        tokens = {"eos": self.processing_class.eos_token_id, "pad": self.processing_class.pad_token_id}
        with self.limits.within("the rollout"), autocast(self.accelerator.device, self.dtype):
            if self.vllm is not None and purpose == "rollout":  # evaluations sample the same replies every time
                replies = self.vllm.sample(prompts, **tokens, device=self.accelerator.device)
            else:
                replies = sample_replies(
                    self.actor.policy,
                    prompts,
                    uniform,
                    self.sampling,
                    **tokens,
                    device=self.accelerator.device,
                    engine="auto" if self.vllm is not None else self.config.speed.rollout_engine,
                    slots=self.config.speed.rollout_slots,
                )
        begun = self.begin(replies) if purpose == "rollout" else None
        measured = None
        with contextlib.suppress(*([] if begun is None else [torch.OutOfMemoryError])):
            measured = self.measure(replies, begun)
        if measured is None:  # what has begun takes the room: let go of it, and measure alone
            begun = None
            measured = self.measure(replies)
        return Rollout(replies, prompts, replies.texts(self.processing_class), *measured, begun)

    def measure(self, replies: Replies, begun: Forward | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, reference log-probs and values of sampled replies, each (B, T), as the loss will compute them,
        with nothing dropped at random; from the hidden states of a pass that has `begun`, or in as many passes as
        memory asks for."""
        self.model.eval()

        def in_parts(limits: Limits) -> tuple[Tensor, Tensor, Tensor | None]:
            most = limits.rows, self.packed, begun, limits.tokens
            with autocast(self.accelerator.device, self.dtype):
                return measure(self.actor, self.reference, replies, self.sampling.temperature, *most)

        if begun is not None:
            return in_parts(self.limits)
        rows = range(len(replies.mask))
        return self.limits.fitted("measuring", replies, rows, self.packed, in_parts)

    def begin(self, replies: Replies) -> Forward | None:
        """The first optimizer step's forward pass, where it is one pass over the whole rollout and drops nothing at
        random: it measures, too, and is kept. Under an autocast of its own, whose rounded weights know the way back to
        the weights."""
        batch, model = self.config.batch, self.config.model
        parts = self.limits.parts(replies, range(len(replies.mask)), self.packed)
        if batch.minibatches > 1 or len(parts) > 1 or model.gradient_checkpointing or self.drops_inputs:
            return None
        passage = replies.passage(parts[0], self.packed)
        try:
            with autocast(self.accelerator.device, self.dtype):
                return passage, self.actor.hidden(passage)
        except torch.OutOfMemoryError:
            return None  # measuring alone takes less

    @property
    def drops_inputs(self) -> bool:
        """Whether optimizer steps drop some of the adapters' inputs."""
        return self.config.model.use_lora and self.config.model.lora_dropout > 0

    def corrected(self, batch: Experience) -> Experience:
        """The batch with its advantages weighted for the gap between the sampler's probabilities and ours, where the
        sampler was not the policy's own forward."""
        rollout, sampled = batch.rollout, batch.rollout.replies.sampled_logprobs
        if sampled is None:
            return batch
        weights = objectives.sampler_weights(rollout.logprobs, sampled, rollout.mask, MOST_WEIGHT)
        return replace(batch, weights=batch.weights * weights)

    def score(self, rollout: Rollout) -> Scored:
        """Scores as the reward functions gave them, and as the algorithm takes them: less the missing-EOS penalty,
        normalised if asked. Raises Dropped where one is not finite."""
        replies, reward = rollout.replies, self.config.reward
        try:
            with self.limits.within("scoring"):
                given = self.rewards.score(rollout.prompts, rollout.texts, replies.rows(), replies.ended.tolist())
        except BadScore as error:
            raise Dropped(str(error), by_score=True) from None
        raw = torch.tensor(given.total, dtype=torch.float32, device=replies.ended.device)
        rollout.scores = raw
        try:
            check_finite(scores=raw)  # a large float64 is infinite here
        except Dropped as found:
            raise Dropped(str(found), by_score=True) from None
        used = raw - reward.missing_eos_penalty * (~replies.ended).float()
        if self.normalizer is not None:
            used = torch.tensor(self.normalizer(used.tolist()), dtype=torch.float32, device=raw.device)
        return Scored(raw, used, {name: fmean(scores) for name, scores in given.by_function.items()})

    # --- optimization ------------------------------------------------------------------------------------------------

    def update(self, batch: Experience, update: int) -> dict[str, float]:
        """E passes of shuffled minibatches, an optimizer step each; returns their mean statistics."""
        self.model.train()  # gradient checkpointing asks for it, and the adapters' dropout; a model's own is off
        self.learning_rate, steps = self.lr_scheduler.get_last_lr()[0], []
        with self.dropout_stream(update):
            for epoch in range(self.config.batch.ppo_epochs):
                for rows in self.minibatches(update, epoch):
                    steps.append(self.optimizer_step(batch, rows))
        self.lr_scheduler.step()
        means = torch.stack([torch.stack(list(s.values())) for s in steps]).mean(0).tolist()
        return dict(zip(steps[0], means, strict=True))

    @contextlib.contextmanager
    def dropout_stream(self, update: int) -> Iterator[None]:
        """Dropout draws from torch's global streams: while the context lasts these are of (seed, update), and
        afterwards what they were, as reward functions may draw from them."""
        if not self.drops_inputs:
            yield
            return
        cards = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(cards):
            torch.manual_seed(int(generator(self.config.run.seed, update, "dropout").integers(2**63)))
            yield

    def minibatches(self, update: int, epoch: int) -> Iterator[list[int]]:
        """Rows of each minibatch, shuffled by (seed, update, epoch)."""
        size = self.config.episodes_per_update
        order = generator(self.config.run.seed, update, "minibatches", epoch).permutation(size).tolist()
        return (order[at : at + self.config.minibatch_size] for at in range(0, size, self.config.minibatch_size))

    def optimizer_step(self, batch: Experience, rows: Sequence[int]) -> dict[str, Tensor]:
        """Gradients of one minibatch, clipped; then one step. Raises Dropped, with the weights as they were, where the
        gradients are not fit for one."""
        stats = self.minibatch_gradients(batch, rows)
        check_step(stats, rows)
        self.proved = self.state.global_step  # a rollout and a gradient of these weights were finite
        with self.limits.within("the optimizer step"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer_steps += 1
        return stats

    def minibatch_gradients(self, batch: Experience, rows: Sequence[int]) -> dict[str, Tensor]:
        """Those of one minibatch, micro-batch by micro-batch, clipped; its statistics."""
        replies = batch.rollout.replies
        tokens = torch.tensor(float(sum(replies.reply_lengths[r] for r in rows)), device=batch.kl.device)

        def all_parts(limits: Limits) -> dict[str, Tensor]:
            stats: dict[str, Tensor] = {}
            self.optimizer.zero_grad()  # of a pass that ran out of memory
            for part in limits.parts(replies, rows, self.packed):
                passage, hidden = batch.rollout.take_begun(part) or (replies.passage(part, self.packed), None)
                add(stats, self.gradients(batch, passage, tokens, hidden))
            return stats

        stats = self.limits.fitted("the backward pass", replies, rows, self.packed, all_parts)
        stats["policy/grad_norm"] = torch.as_tensor(
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        ).to(tokens.device)
        return stats

    def gradients(
        self, batch: Experience, passage: Passage, tokens: Tensor, hidden: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Adds one micro-batch's gradients to the weights'; returns its statistics.

        One backbone pass, unless its `hidden` states are there already; then head and loss chunk by chunk, down to the
        hidden states: logits never exist for more than a chunk. Last, all chunks' gradients go through the backbone
        together.
        """
        fused, entropy = self.config.speed.fused_head, "gradient" if self.config.batch.entropy_coef > 0 else "value"
        if hidden is None:
            with autocast(self.accelerator.device, self.dtype):
                hidden = self.actor.hidden(passage)
        allowed = batch.rollout.replies.allowed(passage)
        leaf = hidden.detach().requires_grad_() if fused else hidden
        stats: dict[str, Tensor] = {}
        for rows, cells in self.chunks(passage) if fused else [(slice(None), slice(None))]:
            limits = None if allowed is None else allowed[cells]
            with autocast(self.accelerator.device, self.dtype):
                outputs = self.actor.heads(
                    leaf[cells], passage.tokens[cells], passage.mask[rows], self.sampling.temperature, limits, entropy,
                    fused,
                )  # fmt: skip
            loss, part = self.algorithm.loss(batch, passage.index[rows], PolicyOutputs(*outputs), tokens)
            self.accelerator.backward(loss)
            add(stats, part)
        if fused:
            hidden.backward(leaf.grad)
        return stats

    def chunks(self, passage: Passage) -> Iterator[tuple[slice, slice]]:
        """Whole replies whose logits may exist together: which rows of the passage, which of its reply tokens."""
        vocabulary = base_of(self.actor.policy).get_input_embeddings().num_embeddings
        most = max(1, budget_of(passage.tokens.device).logits_per_chunk // vocabulary)
        first, start, end = 0, 0, 0
        for row, size in enumerate(passage.lengths):
            if end > start and end + size - start > most:
                yield slice(first, row), slice(start, end)
                first, start = row, end
            end += size
        yield slice(first, len(passage.lengths)), slice(start, end)

    # --- after the update --------------------------------------------------------------------------------------------

    def finish_step(self, update: int, metrics: dict[str, float]) -> dict[str, float]:
        """Log, so that callbacks hear of it (KL control sets the next update's beta); then evaluate where due."""
        spent = sum(v for k, v in metrics.items() if k.startswith("time/"))
        tokens = int(metrics.pop("reply/tokens"))
        self.reply_tokens += tokens
        metrics["kl_coef"] = self.kl_coef if self.config.kl.kl_placement != "none" else 0.0
        metrics["learning_rate"] = self.learning_rate
        metrics["throughput/tokens_per_s"] = tokens / spent
        metrics["throughput/episodes_per_s"] = self.config.episodes_per_update / spent
        metrics["optimizer_steps"] = float(self.optimizer_steps)
        metrics["updates/dropped"] = float(self.drops.count)
        self.note_memory()
        metrics["memory/peak_gib"] = self.peak_memory / 2**30
        self._count(update)
        self.log(dict(metrics))
        self.tell("on_update_end", update, metrics)
        self.this_epoch.append(metrics)
        self._close(update)
        return metrics

    def _count(self, update: int) -> None:
        self.state.global_step = update
        self.state.episode = update * self.config.episodes_per_update
        self.state.epoch = self.dealing.epochs(update)

    def _close(self, update: int) -> None:
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._finish_epoch(update)
        if update % self.config.run.eval_every == 0 or update == self.updates:
            self.evaluate()

    def _finish_epoch(self, update: int) -> None:
        """At the end of a pass over the training prompts, the callbacks hear the means of its updates' metrics; of
        what only some logged, a topic's own, the means over those."""
        before, passes = (int(self.dealing.epochs(u)) for u in (update - 1, update))
        if passes > before and self.this_epoch:
            names = dict.fromkeys(name for metrics in self.this_epoch for name in metrics)
            means = {name: fmean(m[name] for m in self.this_epoch if name in m) for name in names}
            self.tell("on_epoch_end", passes, means)
            self.this_epoch = []

    def set_kl_coef(self, beta: float) -> None:
        """Set the next update's beta, as KL control does."""
        self.kl_coef = beta

    def note_memory(self) -> None:
        self.peak_memory = max(self.peak_memory, memory_in_use(self.accelerator.device))

    def evaluate(self, prompts: Sequence[GivenPrompt] | None = None) -> dict[str, float]:
        """Metrics on the evaluation prompts, logged and kept in `evaluations`; or on others, as `examples_of` reads
        them, which are neither. With the same random numbers every time. Raises UserError for prompts that cannot be
        read."""
        if prompts is not None:
            kept, _ = encode_prompts(self.processing_class, examples_of(prompts), self.config.data.prompt_length)
            if not kept:
                raise UserError(f"no prompt of at most {self.config.data.prompt_length} tokens: evaluate(prompts)")
            return self.evaluation_of(kept).metrics()
        result = self.evaluation_of(self.evaluation_prompts)
        self.evaluations.append(result)
        self.note_memory()
        self.log(result.metrics())
        self.tell("on_evaluation", result)
        return result.metrics()

    def evaluation_of(self, prompts: Sequence[Prompt]) -> Evaluation:
        """Replies to some prompts, scored; perplexity on the run's fixed text."""
        self.fix_text()
        pad = self.processing_class.pad_token_id
        replies, topics = self.replies_to(prompts), [self.topic_tags.get(p.example.topic) for p in prompts]
        with self.limits.within("an evaluation"):
            parts = self.actor, self.rewards, self.text, pad, self.dtype, topics
            result = evaluate(replies, self.state.global_step, *parts)
        bad, update = result.not_finite, self.state.global_step
        if bad:
            advice = self.recovery(False) if update else "Check the start model, --temperature and --eval-text"
            raise RunError(f"{bad}: the evaluation after update {update}. The model is not saved. {advice}")
        return result

    def replies_to(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """The evaluation's replies, some prompts at a time."""
        rows, size = list(enumerate(prompts)), budget_of(self.accelerator.device).eval_batch_size
        return [self.rollout(rows[i : i + size], 0, "evaluate") for i in range(0, len(rows), size)]

    def fix_text(self) -> None:
        """Choose the text of this run's perplexity, while the policy still is the start model."""
        if self.text is None:
            self.text = fixed_text(
                self.processing_class, self.evaluation_prompts, self.replies_to, self.config.data.eval_text
            )

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Policy (or adapter) and tokenizer as plain Hugging Face files, the value head beside them."""
        save_policy(self.actor, self.processing_class, Path(output_dir or self.config.run.output))

    def load_model(self, folder: str | Path) -> None:
        """Take over the weights (or adapter), and the value head, that `save_model` wrote. Raises UserError where they
        are not this model's."""
        self.fix_text()
        load_policy_weights(self.actor, Path(folder))


def add(sums: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
    """Name by name."""
    for name, part in parts.items():
        sums[name] = sums[name] + part if name in sums else part
