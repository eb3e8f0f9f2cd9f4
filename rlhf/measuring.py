"""One set of prompts, rewards and random numbers, on which every model is measured alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config import Config, MeasureSettings
from reward_model.scorer import RewardModel
from rlhf.actor_critic import Actor, Reference
from rlhf.assembly import find_rewards, fingerprint, make_rewards
from rlhf.console import Screen
from rlhf.demo.parts import gold_of
from rlhf.errors import UserError
from rlhf.evaluation import fixed_text, perplexity, text_of_file
from rlhf.models import autocast, autocast_dtype, find_model, load_adapter, load_policy, load_tokenizer
from rlhf.objectives import kl_k1
from rlhf.prompts import Example, Prompt, encode_prompt, load_prompts
from rlhf.rollout import Replies, generator, measure, sample_replies, uniforms
from rlhf.trained import Trained, in_4_bit, shared_settings

ROWS_AT_ONCE = 64  # replies sampled together
EVERY_PROMPT = 10**9

Judge = Callable[[Sequence[Example], Sequence[str], Sequence[bool]], list[float]]


@dataclass(frozen=True)
class Generations:
    """What one model replied, and what that is worth. P prompts, K completions of each."""

    label: str
    texts: list[list[str]]  # P lists of K
    scores: np.ndarray  # (P, K) score units
    judged: np.ndarray | None  # (P, K) the judge's; None without one
    kl: np.ndarray | None  # (P, K) nats per sequence, k1, to the start model; None where there is none to compare with
    lengths: np.ndarray  # (P, K) tokens, EOS included
    ended: np.ndarray  # (P, K) bool
    perplexity: float | None  # at temperature 1, on the bench's text


@dataclass
class _Part:
    """Some prompts with their replies, as fixed_text takes them."""

    prompts: list[Prompt]
    replies: Replies


class Bench:
    """Measures models, the start model first. What decides replies and scores is the same for all."""

    def __init__(
        self, models: Sequence[Trained], settings: MeasureSettings, device: torch.device, screen: Screen, start: bool
    ):
        """`start`: whether there is a start model to measure and to take the KL to. Raises UserError."""
        self.models, self.settings, self.device = models, settings, device
        self.config = shared_settings(models, settings)
        self.dtype = autocast_dtype(self.config.model.bf16, device)
        sources = find_rewards(self.config)
        self.judge_name, judge_folder = _find_judge(self.config, settings)
        self.start = find_start(self.config) if start else None
        first = self.start or models[0]
        self.tokenizer = load_tokenizer(first.source)
        self.prompts, self.examples = self._draw_prompts(models, screen)
        self.rewards, _ = make_rewards(self.config, sources, self.tokenizer, device)
        self.judge = _load_judge(self.config, judge_folder, device, self.dtype)
        in_4bit = [in_4_bit(model) for model in models]
        self.reference = Reference(None, self._load(self.start, self.tokenizer, all(in_4bit))) if start else None
        self.text, self.text_source = None, "nothing: there are no chosen replies, no --eval-text and no start model"
        if start or self.config.data.eval_text or self.prompts[0].example.chosen is not None:
            self.text = self._text(self.tokenizer)
            self.text_source = self.text.source

    def _draw_prompts(self, models: Sequence[Trained], screen: Screen) -> tuple[list[Prompt], list[Example]]:
        """The prompts that the runs followed, whose chosen replies are the perplexity's text, and those drawn to
        measure on: from the others, where they are enough."""
        data, count = self.config.data, self.settings.num_prompts
        sets = load_prompts(
            data.prompts, self.tokenizer, data.split, data.prompt_length, data.max_prompts, EVERY_PROMPT, screen.say
        )
        followed, fresh = sets.evaluation[: data.eval_prompts], sets.evaluation[data.eval_prompts :]
        for model in models:
            if model.run is not None and model.run["data"]["evaluation_sha256"] != fingerprint(followed):
                screen.say(f"warning: the evaluation prompts are no longer those of the run {model.name}")
        pool = fresh if len(fresh) >= count else sets.evaluation
        order = generator(self.settings.seed, 0, "prompts").permutation(len(pool))
        drawn = [pool[i].example for i in sorted(order[:count].tolist())]
        self.prompts_line = f"{len(drawn)} drawn at random from {len(pool)} held-out prompts" + (
            " that no run looked at" if pool is fresh else ""
        )
        if len(drawn) < count:
            self.prompts_line += f" (all there are, {count} were asked for)"
        return followed, drawn

    def _text(self, tokenizer: PreTrainedTokenizerBase):
        """The text of the runs' own perplexity."""
        if self.config.data.eval_text is not None:
            return text_of_file(tokenizer, self.config.data.eval_text)
        return fixed_text(tokenizer, self.prompts, self._starts_replies, None)

    def _starts_replies(self, prompts: Sequence[Prompt]) -> list[_Part]:
        """As a run samples them for its perplexity."""
        seed, sampling = self.config.run.seed, self.config.sampling
        uniform = uniforms(seed, 0, "evaluate", range(len(prompts)), sampling.reply_length)
        return [_Part(list(prompts), self._sample(self.reference.copy, self.tokenizer, prompts, uniform))]

    def _load(self, model: Trained, tokenizer: PreTrainedTokenizerBase, load_in_4bit: bool) -> PreTrainedModel:
        """For measuring; an adapter that was trained over 4-bit weights, over those."""
        policy = load_policy(
            model.base or model.source,
            load_in_4bit=load_in_4bit,
            dtype=self.dtype,
            device=self.device,
            vocabulary=len(tokenizer) if model.base is None else 0,
        )
        return (load_adapter(policy, model.source) if model.base is not None else policy).eval()

    def _sample(self, policy, tokenizer, prompts: Sequence[Prompt], uniform: torch.Tensor) -> Replies:
        with autocast(self.device, self.dtype):
            return sample_replies(
                policy,
                prompts,
                uniform,
                self.config.sampling,
                eos=tokenizer.eos_token_id,
                pad=tokenizer.pad_token_id,
                device=self.device,
            )

    def facts(self) -> list[tuple[str, str]]:
        """How models are measured here, in words."""
        s, c = self.settings, self.config
        limits = [f"top-k {c.sampling.top_k}"] if c.sampling.top_k else []
        limits += [f"top-p {c.sampling.top_p:g}"] if c.sampling.top_p < 1 else []
        return [
            *([("start model", self.start.name)] if self.start else []),
            *([("weights", f"of runs: {s.which}")] if any(model.run is not None for model in self.models) else []),
            ("prompts", f"{self.prompts_line} ({c.data.prompts}, seed {s.seed})"),
            (
                "replies",
                f"{s.completions} to each prompt, at most {c.sampling.reply_length} tokens, "
                + ", ".join([f"temperature {c.sampling.temperature:g}", *limits]),
            ),
            ("score", str(self.rewards) + (f", reward model {c.model.rm_model}" if c.model.rm_model else "")),
            ("judge", self.judge_name or "none (--judge-model names a reward model that training never saw)"),
            ("perplexity", f"at temperature 1 on {self.text_source}"),
        ]

    def measure_start(self, screen: Screen) -> Generations:
        """The start model's replies; its KL to itself is 0."""
        return self._measured("start model", self.reference.copy, self.tokenizer, self.reference, screen)

    def measure(self, model: Trained, screen: Screen) -> Generations:
        """A model's replies. Without a start model, or with a tokenizer other than its, there is no KL."""
        tokenizer = load_tokenizer(model.source)
        same = tokenizer.get_vocab() == self.tokenizer.get_vocab()
        policy = self._load(model, tokenizer, in_4_bit(model))
        return self._measured(model.label, policy, tokenizer, self.reference if same else None, screen)

    @torch.no_grad()
    def _measured(
        self,
        label: str,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reference: Reference | None,
        screen: Screen,
    ) -> Generations:
        count, sampling = self.settings.completions, self.config.sampling
        prompts = [Prompt(tuple(encode_prompt(tokenizer, e.messages)), e) for e in self.examples]
        rows = [p for p in prompts for _ in range(count)]
        parts = []
        for at in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[at : at + ROWS_AT_ONCE]
            episodes = range(at, at + len(part))
            uniform = uniforms(self.settings.seed, 0, "generations", episodes, sampling.reply_length)
            replies = self._sample(policy, tokenizer, part, uniform)
            parts.append((replies.texts(tokenizer), replies.rows(), replies.ended.tolist(),
                          self._kl(policy, reference, replies)))  # fmt: skip
            done = at + len(part)
            screen.progress(f"{label}: {done} of {len(rows)} replies", last=done == len(rows))
        texts, ids, ended, kl = ([x for part in parts for x in part[i]] for i in range(4))
        examples = [p.example for p in rows]
        shape = (len(prompts), count)
        scores = self.rewards.score(rows, texts, ids, ended).total
        judged = self.judge(examples, texts, ended) if self.judge is not None else None
        return Generations(
            label=label,
            texts=[texts[i : i + count] for i in range(0, len(texts), count)],
            scores=np.reshape(scores, shape),
            judged=np.reshape(judged, shape) if judged is not None else None,
            kl=np.reshape(kl, shape) if reference is not None else None,
            lengths=np.reshape([len(row) for row in ids], shape),
            ended=np.reshape(ended, shape),
            perplexity=self._perplexity(policy, tokenizer),
        )

    def _kl(self, policy: PreTrainedModel, reference: Reference | None, replies: Replies) -> list[float]:
        """Nats per sequence of each reply."""
        if reference is None:
            return []
        with autocast(self.device, self.dtype):
            temperature, most = self.config.sampling.temperature, ROWS_AT_ONCE // 2
            logprobs, ref_logprobs, _ = measure(Actor(policy), reference, replies, temperature, most)
        return kl_k1(logprobs, ref_logprobs, replies.mask).sum(1).tolist()

    def _perplexity(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float | None:
        """On the text as this model's tokenizer reads it; None where the text is a start model's own tokens."""
        if self.text is None:
            return None
        text = self.text
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            if self.config.data.eval_text is None and self.prompts[0].example.chosen is None:
                return None
            text = self._text(tokenizer)
        return perplexity(policy, text, tokenizer.pad_token_id, self.device, self.dtype)


def find_start(config: Config) -> Trained:
    """The start model that the settings name. Raises UserError where it is not there."""
    name = config.model.actor_model
    return Trained(name, find_model(name, "--baseline"))


def _find_judge(config: Config, settings: MeasureSettings) -> tuple[str | None, str | None]:
    """The judge's name, and the folder of a reward model that judges: found, but not loaded."""
    if settings.judge_model is None:
        return None if gold_of(config) is None else "gold quality", None
    folder = find_model(settings.judge_model, "--judge-model")
    scorer = config.model.rm_model
    if scorer is not None and Path(scorer).expanduser().resolve() == Path(folder).resolve():
        raise UserError(f"the judge is the reward model itself: --judge-model {settings.judge_model}. Name another")
    return f"judge {settings.judge_model}", folder


def _load_judge(config: Config, folder: str | None, device: torch.device, dtype: torch.dtype | None) -> Judge | None:
    """A reward model, else the demo's gold quality, else none."""
    if folder is not None:
        model = RewardModel.load(folder, device, dtype, "--judge-model")
        return lambda examples, texts, ended: model.score([e.messages for e in examples], texts, ended)
    gold = gold_of(config)
    if gold is None:
        return None
    return lambda examples, texts, ended: [
        gold(e.messages[-1]["content"], text, end) for e, text, end in zip(examples, texts, ended, strict=True)
    ]
