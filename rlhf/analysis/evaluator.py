"""Evaluates models on the same prompts, with the same rewards and the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.algorithms.objectives import kl_k1
from rlhf.analysis.models import (
    ModelRef,
    find_judge,
    find_start,
    has_start,
    in_4_bit,
    load_judge,
    load_model_ref,
    require_trusted_code,
    shared_settings,
)
from rlhf.config import config_of_run
from rlhf.data.chat_template import encode_prompt
from rlhf.data.examples import Example
from rlhf.data.prompts import Prompt, fingerprint, load_prompts
from rlhf.models.actor_critic import Actor
from rlhf.models.budget import budget_of
from rlhf.models.device import autocast, autocast_dtype
from rlhf.models.load import load_tokenizer
from rlhf.models.reference import Reference
from rlhf.rewards.build import RewardSources, find_rewards, make_rewards
from rlhf.rewards.checks import check_reward_context
from rlhf.rewards.rewards import check_columns
from rlhf.rollout.completions import Completions
from rlhf.rollout.engine import sample_completions
from rlhf.rollout.logprobs import compute_logprobs_and_values
from rlhf.rollout.sampling import uniform_noise
from rlhf.settings.evaluation import MeasureSettings
from rlhf.settings.training import Config
from rlhf.trainer.evaluation import FixedText, fixed_text, perplexity, text_of_file
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.rng import rng_for

EVERY_PROMPT = 10**9


@dataclass(frozen=True)
class GenerationResults:
    """One model's completions and their scores: P prompts, K completions of each."""

    label: str
    texts: list[list[str]]  # P lists of K
    scores: np.ndarray  # (P, K), in score units
    judged: np.ndarray | None  # (P, K) ratings of the judge; None without a judge
    kl: np.ndarray | None  # (P, K) k1 to the start model, nats/sequence; None if it cannot be computed
    lengths: np.ndarray  # (P, K) tokens, including EOS
    ended: np.ndarray  # (P, K) True if the completion ends with EOS
    perplexity: float | None  # at temperature 1, on the evaluator's text


@dataclass
class _Part:
    """Some prompts with their completions, in the form that `fixed_text` expects."""

    prompts: list[Prompt]
    completions: Completions


class ModelEvaluator:
    """Evaluates the start model and other models with the same prompts, sampling settings and scores."""

    def __init__(self, models: Sequence[ModelRef], settings: MeasureSettings, device: torch.device, screen: Screen):
        """Finds and loads what all evaluations share. Raises UserError before loading if something is missing."""
        self.models, self.settings, self.device = models, settings, device
        self.config = shared_settings(models, settings)
        self.dtype = autocast_dtype(self.config.model.bf16, device)
        sources = self._find_rewards()
        judge_folder = find_judge(self.config, models, settings)
        self.start = find_start(self.config) if has_start(models, settings) else None
        plain, every = self.config.data.plain_prompts, (*filter(None, [self.start]), *models)
        self.tokenizers = {m.source: load_tokenizer(m.source, plain) for m in every}
        self.tokenizer = self.tokenizers[(self.start or models[0]).source]
        self.followed, self.examples = self._draw_prompts(screen)
        check_columns(sources.rules, self.examples, f"--prompts {self.config.data.prompts}")
        for flag, folder in (("--rm-model", sources.folder), ("--judge-model", judge_folder)):
            if folder is not None:
                length = self.config.sampling.max_new_tokens
                check_reward_context(folder, self.examples, length, f"{flag} {folder}")
        self.rewards, _ = make_rewards(self.config, sources, self.tokenizer, device)
        self.judge_name, self.judge = load_judge(self.config, judge_folder, settings, self.tokenizer, device)
        self.reference = None
        if self.start is not None:
            in_4bit = all(in_4_bit(model) for model in models)
            start = load_model_ref(self.start, self.tokenizer, in_4bit, self.dtype, device)
            self.reference = Reference(None, start)
        self.text = self._text(self.tokenizer)

    def _find_rewards(self) -> RewardSources:
        require_trusted_code(self.models, self.settings)
        try:
            return find_rewards(self.config)
        except UserError as error:
            if any(m.run is not None for m in self.models) or self.settings.rm_model is not None:
                raise
            raise UserError(
                [
                    *error.problems,
                    f"{self.models[0].name} does not belong to a run, so the settings are those of the recipe "
                    f"--like {self.settings.like}. Choose another recipe, or give --rm-model and --prompts",
                ]
            ) from None

    @property
    def score_name(self) -> str:
        """The name of the score: the runs' own reward, or another one."""

        def reward_of(config: Config) -> tuple:
            return config.model.rm_model, config.reward.reward_func, config.reward.reward_weights

        own = {reward_of(config_of_run(m.run)) for m in self.models if m.run is not None}
        return "the training reward" if own <= {reward_of(self.config)} else "not the training reward"

    def _draw_prompts(self, screen: Screen) -> tuple[list[Prompt], list[Example]]:
        """Returns the runs' own evaluation prompts, and the prompts to evaluate on.

        The chosen replies of the first are the text for the perplexity. The second are drawn from the other held-out
        prompts if there are enough of them.
        """
        data, count = self.config.data, self.settings.num_prompts
        topics = data.steps_per_topic if self.settings.prompts is None else None
        every = replace(data, eval_prompts=EVERY_PROMPT, steps_per_topic=topics)
        sets = load_prompts(every, self.tokenizer, screen.say, evaluation_alone=True)
        used = 0
        for model in self.models:
            if model.run is not None:
                used = max(used, model.run.data["evaluation_prompts"])
                followed = sets.evaluation[: model.run.data["evaluation_prompts"]]
                if model.run.data["evaluation_sha256"] != fingerprint(followed):
                    screen.say(f"warning: the evaluation prompts have changed since the run {model.name}")
        fresh = sets.evaluation[used:]
        pool = fresh if len(fresh) >= count else sets.evaluation
        order = rng_for(self.settings.seed, 0, "prompts").permutation(len(pool))
        drawn = [pool[i].example for i in sorted(order[:count].tolist())]
        unseen = " that no run used for its own evaluations" if used and pool is fresh else ""
        self.prompts_line = f"{len(drawn)} drawn at random from {len(pool)} held-out prompts{unseen}"
        if len(drawn) < count:
            self.prompts_line += f" (--num-prompts {count} is more than there are)"
        return sets.evaluation[: data.eval_prompts], drawn

    def _text(self, tokenizer: PreTrainedTokenizerBase) -> FixedText | None:
        """Returns the text for the perplexity, encoded with `tokenizer`.

        Returns None if that text would be the start model's completions, but there is no start model or `tokenizer`
        has another vocabulary.
        """
        if self.config.data.eval_text is not None:
            return text_of_file(tokenizer, self.config.data.eval_text)
        if self.followed[0].example.chosen is None and (self.start is None or tokenizer is not self.tokenizer):
            return None
        prompts = [Prompt(tuple(encode_prompt(tokenizer, p.example.messages)), p.example) for p in self.followed]
        return fixed_text(tokenizer, prompts, self._start_completions, None)

    def _start_completions(self, prompts: Sequence[Prompt]) -> list[_Part]:
        """Samples the start model's completions as a run does for its perplexity."""
        seed, sampling = self.config.run.seed, self.config.sampling
        uniform = uniform_noise(seed, 0, "evaluate", range(len(prompts)), sampling.max_new_tokens)
        return [_Part(list(prompts), self._sample(self.reference.copy, self.tokenizer, prompts, uniform))]

    def _same_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        return tokenizer is self.tokenizer or tokenizer.get_vocab() == self.tokenizer.get_vocab()

    def _sample(self, policy, tokenizer, prompts: Sequence[Prompt], uniform: torch.Tensor) -> Completions:
        with autocast(self.device, self.dtype):
            return sample_completions(
                policy,
                prompts,
                uniform,
                self.config.sampling,
                eos=tokenizer.eos_token_id,
                pad=tokenizer.pad_token_id,
                device=self.device,
            )

    def facts(self) -> list[tuple[str, str]]:
        """Returns how models are evaluated, as pairs of name and text."""
        s, c = self.settings, self.config
        whiches = sorted({model.which for model in self.models if model.run is not None})
        return [
            *([("start model", self.start.name)] if self.start else []),
            *([("weights", f"{', '.join(whiches)} weights of the runs")] if whiches else []),
            ("prompts", f"{self.prompts_line} ({c.data.prompts}, seed {s.seed})"),
            ("completions", f"{s.completions} per prompt, {c.sampling}"),
            ("score", str(self.rewards) + (f", reward model {c.model.rm_model}" if c.model.rm_model else "")),
            ("judge", self.judge_name or "none (set one with --judge-model)"),
            (
                "perplexity",
                f"at temperature 1 on {self.text.source}" if self.text else "none (give a text with --eval-text FILE)",
            ),
            *((f"base of {m.name}", m.base) for m in self.models if m.base is not None),
        ]

    def evaluate_start(self, screen: Screen) -> GenerationResults:
        """Evaluates the start model. Its KL to itself is 0."""
        return self._evaluate("start model", self.reference.copy, self.tokenizer, self.reference, screen)

    def evaluate(self, model: ModelRef, screen: Screen) -> GenerationResults:
        """Evaluates a model. There is no KL without a start model, or if the start model has another vocabulary."""
        tokenizer = self.tokenizers[model.source]
        policy = load_model_ref(model, tokenizer, in_4_bit(model), self.dtype, self.device)
        reference = self.reference if self._same_vocabulary(tokenizer) else None
        return self._evaluate(model.label, policy, tokenizer, reference, screen)

    @torch.no_grad()
    def _evaluate(
        self,
        label: str,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reference: Reference | None,
        screen: Screen,
    ) -> GenerationResults:
        count = self.settings.completions
        prompts = [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in self.examples]
        rows = [p for p in prompts for _ in range(count)]
        texts, ids, ended, kl = self._sample_all(label, policy, tokenizer, reference, rows, screen)
        shape = (len(prompts), count)
        judged = self.judge.score(rows, texts, ids, ended).total if self.judge is not None else None
        return GenerationResults(
            label=label,
            texts=[texts[i : i + count] for i in range(0, len(texts), count)],
            scores=np.reshape(self.rewards.score(rows, texts, ids, ended).total, shape),
            judged=np.reshape(judged, shape) if judged is not None else None,
            kl=np.reshape(kl, shape) if reference is not None else None,
            lengths=np.reshape([len(row) for row in ids], shape),
            ended=np.reshape(ended, shape),
            perplexity=self._perplexity(policy, tokenizer),
        )

    def _sample_all(self, label, policy, tokenizer, reference, rows: Sequence[Prompt], screen: Screen) -> list[list]:
        """Samples one completion per row in batches. Returns texts, token ids, ended flags, and KL in nats."""
        parts, size = [], budget_of(self.device).generation_batch_size
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            done, length = at + len(part), self.config.sampling.max_new_tokens
            uniform = uniform_noise(self.settings.seed, 0, "generations", range(at, done), length)
            completions = self._sample(policy, tokenizer, part, uniform)
            parts.append((completions.texts(tokenizer), completions.rows(), completions.ended.tolist(),
                          self._kl(policy, reference, completions)))  # fmt: skip
            screen.progress(f"{label}: {done} of {len(rows)} completions", last=done == len(rows))
        return [[x for part in parts for x in part[i]] for i in range(4)]

    def _kl(self, policy: PreTrainedModel, reference: Reference | None, completions: Completions) -> list[float]:
        """Returns the KL of each completion in nats/sequence; empty without a reference model."""
        if reference is None:
            return []
        with autocast(self.device, self.dtype):
            temperature = self.config.sampling.temperature
            logprobs, ref_logprobs, _ = compute_logprobs_and_values(Actor(policy), reference, completions, temperature)
        return kl_k1(logprobs, ref_logprobs, completions.mask).sum(1).tolist()

    def _perplexity(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float | None:
        text = self.text if self._same_vocabulary(tokenizer) else self._text(tokenizer)
        return None if text is None else perplexity(policy, text, tokenizer.pad_token_id, self.device, self.dtype)
