"""Evaluates models on the same prompts, with the same rewards and the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from rlhf.analysis.conditions import of_comparison, of_run
from rlhf.analysis.judges import JudgeSources, as_key, find_judges, load_judges, rate_stored
from rlhf.analysis.loading import load_model_ref
from rlhf.analysis.models import (
    ModelRef,
    common_eval_functions,
    find_start,
    in_4_bit,
    require_trusted_code,
    shared_settings,
)
from rlhf.analysis.prompts import choose_prompts, takes_every_row
from rlhf.checkpoints.model_folder import find_recorded
from rlhf.config import config_of_run
from rlhf.data.chat_template import DATE, date_of, template_rows
from rlhf.data.examples import worked_examples
from rlhf.data.prompts import Prompt, encode_all
from rlhf.data.tokenizer import context_of, load_tokenizer
from rlhf.environments.environment import Environment, make_environment
from rlhf.environments.find import find_instance, gives_rewards
from rlhf.models.actor_critic import Actor
from rlhf.models.device import autocast_dtype, set_threads
from rlhf.models.reference import Reference
from rlhf.rewards.build import make_rewards
from rlhf.rewards.checks import check_functions, check_measured, check_reward_context
from rlhf.rewards.find import RewardSources, code_print, find_rewards
from rlhf.rewards.functions import EnvironmentReward, NetworkReward
from rlhf.rollout.sampler import Sampler
from rlhf.settings.evaluation import HELD_OUT_PROMPTS, MeasureSettings
from rlhf.settings.training import function_name
from rlhf.trainer.evaluation import Evaluation
from rlhf.trainer.evaluator import Evaluator, FixedText, fixed_text
from rlhf.trainer.passes import ForwardPasses
from rlhf.trainer.play import Player
from rlhf.utils.console import Screen
from rlhf.utils.errors import Problem, UserError
from rlhf.utils.paths import path_on_page
from rlhf.utils.statistics import is_binary
from rlhf.utils.system import threads_variable


def _with_one_date(tokenizers: dict[str, PreTrainedTokenizerBase]) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizers. Those whose chat template writes the date get the first one's: all models then have equal
    prompts, also if their runs started on different days."""
    dated = [one for one in tokenizers.values() if date_of(one)]
    for one in dated[1:]:
        one.init_kwargs[DATE] = date_of(dated[0])
    return tokenizers


class ModelEvaluator:
    """Evaluates the start model and other models with the same prompts, sampling settings and scores."""

    def __init__(
        self,
        models: Sequence[ModelRef],
        settings: MeasureSettings,
        device: torch.device,
        screen: Screen,
        usual_prompts: int = HELD_OUT_PROMPTS,
        shots: Sequence[dict[str, str]] | None = None,
    ):
        """Finds and loads what all evaluations share. Raises UserError before loading if something is missing.

        `usual_prompts` is the number of held-out prompts without --num-prompts. `shots` are worked examples for the
        start model. None: models that a checker decides on are not sampled in other ways, too
        (`Evaluation.variants`).
        """
        self.models = models
        self.screen = screen
        self.settings = settings
        self.device = device
        self.shots = shots
        self.runs = [model.run for model in models if model.run is not None]
        self.config = shared_settings(models, settings)
        if self.runs and not threads_variable():
            set_threads(self.runs[0].threads)
        self.dtype = autocast_dtype(self.config.model.bf16, device)
        sources = self._find_rewards()
        self.construct, self.instance = find_instance(self.config)
        if gives_rewards(self.instance):
            sources = sources.and_also(EnvironmentReward(type(self.instance).__name__))
        judges = find_judges(self.config, models, settings)
        if self.instance is not None and judges.folder is not None:
            raise UserError(
                "a judge model rates one completion, not the turns of an environment",
                f"--judge-model {settings.judge_model}",
                "Use --eval-func",
            )
        if settings.eval_func is None and common_eval_functions(models) is None:
            screen.say(
                "note: the runs have different evaluation functions, so none is used. Set them with --eval-func"
            )
        self.start = find_start(self.config, models, settings)
        data = self.config.data
        every = (*filter(None, [self.start]), *models)
        date = next((m.run.date for m in models if m.run is not None), None)
        how = data.plain_prompts, date, data.chat_template_kwargs
        self.tokenizers = _with_one_date({m.source: load_tokenizer(m.source, *how) for m in every})
        self.tokenizer = self.tokenizers[(self.start or models[0]).source]
        self.prompts = choose_prompts(
            self.config, models, settings, usual_prompts, self.tokenizer, self.tokenizers, screen.say
        )
        self.examples = self.prompts.examples
        check_functions([*sources.rules, *judges.functions], self.examples, f"--prompts {self.config.data.prompts}")
        for flag, folder in (("--rm-model", sources.folder), ("--judge-model", judges.folder)):
            if folder is not None:
                length = self.config.sampling.max_new_tokens
                text = self.config.model.rm_text
                check_reward_context(folder, self.examples, length, f"{flag} {folder}", text=text)
        self._load_rewards(sources, judges, date, screen)
        self.reference = None
        if self.start is not None:
            in_4bit = all(in_4_bit(model) for model in models)
            start = load_model_ref(self.start, self.tokenizer, in_4bit, self.dtype, device)
            self.reference = Reference(None, start)
        self.alike = self._encode_as_start()
        self.unlike = [model for model in models if self.tokenizers[model.source] not in self.alike]
        self.text = None
        self.text = self._text(self.tokenizer)

    def _load_rewards(self, sources: RewardSources, judges: JudgeSources, date: str | None, screen: Screen) -> None:
        """Loads the rewards and the judges. Prints what is doubtful about the models among them."""
        config = self.config
        examples = self.examples
        self.rewards, reward_model = make_rewards(config, sources, self.tokenizer, self.device, date)
        if reward_model is not None:
            check_measured(reward_model, f"reward model {config.model.rm_model}", examples, screen)
        self.judges = load_judges(
            config, judges, self.models, self.settings, self.tokenizer, self.device, date, examples, screen
        )
        updates = max((run.plan.updates for run in self.runs), default=1)  # of the longest run
        for rewards in (self.rewards, *(judge.rewards for judge in self.judges)):
            rewards.trainer_state = TrainerState(global_step=updates, max_steps=updates)
            for model in (f for f in rewards.functions if isinstance(f, NetworkReward)):
                model.known = {}

    def _find_rewards(self) -> RewardSources:
        require_trusted_code(self.models, self.settings)
        name = self.config.model.rm_model
        try:
            for run in self.runs if name is not None and self.settings.rm_model is None else ():
                find_recorded(run, "reward_model", name, "--rm-model")
            return find_rewards(self.config)
        except UserError as error:
            if self.runs or self.settings.rm_model is not None:
                raise
            raise UserError(
                [
                    *error.problems,
                    Problem(
                        f"{self.models[0].name} does not belong to a run, so the settings are those of the recipe",
                        f"--like {self.settings.like}",
                        "Choose another recipe, or give --prompts, and --rm-model or --rm-model none --reward-func",
                    ),
                ]
            ) from None

    @property
    def judge_name(self) -> str | None:
        """The name of the judge that decides; None without a judge."""
        return self.judges[0].name if self.judges else None

    def drop_copies(self, everyone: Sequence[Evaluation]) -> list[str]:
        """Remove the judges that give every completion its score from this evaluator and from the results, because
        they show nothing that the score does not. Returns one note for each."""
        notes = []
        for judge in [*self.judges]:
            if all(np.array_equal(found.judged[judge.name], found.scores, equal_nan=True) for found in everyone):
                self.judges.remove(judge)
                for found in everyone:
                    del found.judged[judge.name]
                notes.append(
                    f"the judge {judge.name} gives every completion its score, so it is not independent of the reward "
                    "and is not shown again"
                )
        return notes

    def rate(self, rows: Sequence[dict]) -> np.ndarray | None:
        """Return the first judge's ratings of completions that a run stored, as `rate_stored`, or None."""
        if not self.judges:
            return None
        known = {as_key(p.example.messages): p.example for p in self.prompts.known}
        return rate_stored(self.judges[0], rows, known, self.tokenizer, as_logged=self._stored_ratings_are_valid())

    def _stored_ratings_are_valid(self) -> bool:
        """True if the first judge is a function of the runs, whose file has not changed since."""
        rules = [rule for rule in self.config.reward.eval_func if function_name(rule) == self.judge_name]
        unchanged = all(run.data.get("rules", {}).get(rule) == code_print(rule) for rule in rules for run in self.runs)
        return self.settings.eval_func is None and unchanged

    @property
    def score_name(self) -> str:
        """The name of the score: the runs' own reward, or another one. It is unknown for models without runs."""
        if not self.runs:
            return "perhaps the training reward"
        same = [
            of_run(config_of_run(run), run).rewards == of_comparison(self.config, self.settings, run).rewards
            for run in self.runs
        ]
        if any(same):
            return "the training reward" if all(same) else "the training reward of some runs"
        return "not the training reward"

    def _text(self, tokenizer: PreTrainedTokenizerBase) -> FixedText | None:
        """Return the text for the perplexity, encoded with `tokenizer`.

        Returns None if that text would be the start model's completions, but there is no start model or `tokenizer`
        has another vocabulary.
        """
        data = self.config.data
        prompts = encode_all(tokenizer, [p.example for p in self.prompts.of_text], worked_examples(data.few_shot))
        if self.text is not None and self.text.by_start and self._same_vocabulary(tokenizer):  # another chat template
            return replace(self.text, prompts=[p.ids for p in prompts[: len(self.text.prompts)]])
        start = None
        if self.start is not None and tokenizer is self.tokenizer:
            evaluator = self.evaluator(self.reference.copy, tokenizer)
            # as a run samples them for its perplexity
            player = replace(evaluator.player, seed=self.config.run.seed)
            as_run = replace(evaluator, player=player, purpose="evaluate")
            start = as_run.start_completions
        text = fixed_text(tokenizer, prompts, start, data.eval_text)
        if text is None or text.by_start or data.eval_text is not None or not takes_every_row(self.settings):
            return text
        source = f"{len(text.completions)} chosen completions of {path_on_page(self.settings.prompts)}"
        return replace(text, source=source)

    def _same_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        return tokenizer is self.tokenizer or tokenizer.get_vocab() == self.tokenizer.get_vocab()

    def _encode_as_start(self) -> list[PreTrainedTokenizerBase]:
        """Return the tokenizers that give the prompts the start model's ids: those with neither another vocabulary
        nor another chat template."""
        ids = [prompt.ids for prompt in self.encoded(self.tokenizer)]
        others = [one for one in self.tokenizers.values() if one is not self.tokenizer and self._same_vocabulary(one)]
        return [self.tokenizer, *(one for one in others if [prompt.ids for prompt in self.encoded(one)] == ids)]

    def evaluator(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Evaluator:
        """Return the evaluator of a model. If its prompts are not the start model's, it computes no KL, because that
        is a KL between two models after the same prompt, and the perplexity is that after the model's own prompts. A
        file has no prompts: its perplexity is compared within a vocabulary only."""
        config = self.config
        engine = config.speed.own_engine
        same = tokenizer in self.alike
        reference = self.reference if same else None
        own = self._same_vocabulary(tokenizer)
        in_file = config.data.eval_text is not None  # a prompt is the first token, so the bytes differ by vocabulary
        units = [*(["perplexity"] if same or (own and in_file) else []), *(["length"] if own else [])]
        units += [*([] if in_file else ["bits_per_byte"]), "characters"] if self.unlike else []
        sampler = Sampler.of(policy, tokenizer, config.sampling, self.device, dtype=self.dtype, engine=engine)
        passes = ForwardPasses(Actor(policy), reference, config.sampling.temperature, self.dtype)
        how = config.episode_tokens, self.settings.seed, self.environment_of(tokenizer)
        return Evaluator(
            Player.of(sampler, passes, tokenizer, *how, phase="an evaluation", in_parts=True),
            passes,
            tokenizer,
            self.rewards,
            judges=[judge.rewards for judge in self.judges],
            purpose="generations",
            text=self.text if same else self._text(tokenizer),
            units=tuple(units),
        )

    def environment_of(self, tokenizer: PreTrainedTokenizerBase) -> Environment | None:
        """Return the environment for models with this tokenizer; None without one."""
        if self.instance is None:
            return None
        return make_environment(self.config, self.construct, self.instance, tokenizer, self.settings.seed)

    def facts(self) -> list[tuple[str, str]]:
        """Return how models are evaluated, as pairs of name and text."""
        s = self.settings
        c = self.config
        unlike = ", ".join(model.short for model in self.unlike)
        whiches = sorted({model.which for model in self.models if model.run is not None})
        return [
            *([("start model", path_on_page(self.start.name))] if self.start else []),
            *([("weights", f"{', '.join(whiches)} weights of the runs")] if whiches else []),
            ("prompts", self.prompts.line),
            *template_rows(self.tokenizer),
            ("completions", f"{s.completions} per prompt, {c.sampling}"),
            (
                "score",
                str(self.rewards) + (f", reward model {path_on_page(c.model.rm_model)}" if c.model.rm_model else ""),
            ),
            ("judge", ", ".join(map(str, self.judges)) or "none (set one with --judge-model or --eval-func)"),
            (
                "perplexity",
                f"at temperature 1 on {self.text.source}" if self.text else "none (give a text with --eval-text FILE)",
            ),
            *((f"base of {m.short}", path_on_page(m.base)) for m in self.models if m.base is not None),
            *([("own prompts", f"{unlike}, because of tokenizer or chat template: no KL")] if unlike else []),
        ]

    def evaluate_start(self, screen: Screen) -> Evaluation:
        """Evaluates the start model. Its KL to itself is 0."""
        return self._evaluate("start model", self.reference.copy, self.tokenizer, screen)

    def evaluate(self, model: ModelRef, screen: Screen) -> Evaluation:
        """Evaluates a model. There is no KL without a start model, or if the start model has another vocabulary."""
        return self._evaluate(model.label, self.load(model), self.tokenizers[model.source], screen)

    def load(self, model: ModelRef) -> PreTrainedModel:
        """Loads a model's weights."""
        return load_model_ref(model, self.tokenizers[model.source], in_4_bit(model), self.dtype, self.device)

    @torch.no_grad()
    def _evaluate(
        self, label: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, screen: Screen
    ) -> Evaluation:
        evaluator = self.evaluator(policy, tokenizer)
        found = self._sampled(label, evaluator, self.encoded(tokenizer), self.settings.completions, screen)
        if self.shots is None or not is_binary(found.deciding):
            return found
        return replace(found, variants=self._variants(label, evaluator, screen))

    def _sampled(
        self, label: str, evaluator: Evaluator, prompts: Sequence[Prompt], samples: int, screen: Screen, **how: Any
    ) -> Evaluation:
        """Evaluate completions of the prompts, `samples` of each, and print the progress. `how` as in
        `Evaluator.evaluate`."""
        episodes = list(enumerate(prompt for prompt in prompts for _ in range(samples)))
        screen.progress(f"{label}: {len(episodes)} completions", last=True)
        return evaluator.evaluate(episodes, samples, **how)

    def _variants(self, label: str, evaluator: Evaluator, screen: Screen) -> dict[str, float]:
        """Return the mean of the checker for greedy completions and for more tokens; of the start model also with
        worked examples."""
        sampling = self.config.sampling
        count = self.settings.completions
        tokenizer = evaluator.tokenizer
        policy = evaluator.sampler.policy
        prompts = self.encoded(tokenizer)
        ways = {"greedy": (prompts, 1, replace(sampling, top_k=1))}
        context = context_of(policy.config)
        longest = max(len(p.ids) for p in prompts)
        room = 2 * sampling.max_new_tokens if context is None else min(2 * sampling.max_new_tokens, context - longest)
        if room > sampling.max_new_tokens:
            ways[f"up to {room} tokens"] = prompts, count, replace(sampling, max_new_tokens=room)
        if self.shots and self.reference is not None and policy is self.reference.copy:
            ways[f"{len(self.shots) // 2} worked examples"] = self.encoded(tokenizer, self.shots), count, sampling
        found = {}
        for name, (of, samples, how) in ways.items():
            results = self._sampled(f"{label}, {name}", evaluator, of, samples, screen, sampling=how, scores_only=True)
            found[name] = float(np.nanmean(results.deciding))
            found[f"{name}, cut off"] = 1 - float(results.ended.mean())
        return found

    def encoded(self, tokenizer: PreTrainedTokenizerBase, shots: Sequence[dict[str, str]] = ()) -> list[Prompt]:
        """Return the prompts after the worked examples `shots`; without any, after those of the runs."""
        return encode_all(tokenizer, self.examples, shots or worked_examples(self.config.data.few_shot))
