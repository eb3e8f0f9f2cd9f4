"""What a command prints in place of a run: `--dry-run`, the plan, and `--check`, the parts of a check.

Imports what only a part needs when that part begins: a plan is printed within seconds.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rlhf.demo.ready import is_to_be_built
from rlhf.distributed.group import from_first
from rlhf.models.device import start_device
from rlhf.settings.training import PARTS, Config
from rlhf.setup.fit import settle
from rlhf.setup.inputs import check_export
from rlhf.setup.load_inputs import RunInputs, check_device, load_inputs
from rlhf.setup.plan import show_plan
from rlhf.utils.console import Screen
from rlhf.utils.errors import Problem, RunError, UserError, raise_if
from rlhf.utils.results import result

if TYPE_CHECKING:
    from rlhf.rewards.probes import RewardReport
    from rlhf.rewards.rewards import Rewards
    from rlhf.setup.build import Components
    from rlhf.setup.scan import Scan


@dataclass
class CheckResult:
    """What a check found. None: that part was not checked, or failed."""

    reward: RewardReport | None = None
    prompts: Scan | None = None
    problems: list[Problem] = field(default_factory=list)  # with an exit status of 2; empty: all is well


def look(config: Config, screen: Screen) -> None:
    """Print the plan of one run, or check it. Missing parts of a demo are built for a check. Writes nothing to the
    output folder. Raises UserError."""
    check_export(config)
    device = start_device(screen, config.run.deterministic)
    if config.run.check and is_to_be_built(config.recipe):
        from rlhf.setup.build import prepare_demo_components

        prepare_demo_components(config, screen, device)
    inputs = load_inputs(config, screen)
    if config.run.check:
        return raise_if(Checks(config, inputs, device, screen).run().problems)
    check_device(config, inputs.start, device)
    show_plan(settle(config, inputs, device, screen), inputs, device, screen)


def check_program(config: Config, **given: Any) -> CheckResult:
    """Check the run of a program in its first process: how much is sampled depends on the time. `given` as
    `load_inputs` takes it. Raises UserError."""
    screen = Screen()
    device = start_device(screen, config.run.deterministic, config.run.ddp_timeout)
    return from_first(lambda: Checks(config, load_inputs(config, screen, **given), device, screen).run())


class Checks:
    """The parts of a check. What several of them need is loaded once."""

    def __init__(self, config: Config, inputs: RunInputs, device: torch.device, screen: Screen):
        if not inputs.prompts.train:
            raise UserError("an empty list", "check(), prompts", "Pass texts or chats")
        asked = config.run.check or PARTS
        self.parts = [part for part in PARTS if part in asked]
        self.inputs = inputs
        self.device = device
        self.screen = screen
        if inputs.rewards.is_empty:
            screen.say("note: only the teacher gives scores, so reward and prompts have no check")
            self.parts = [part for part in self.parts if part not in ("reward", "prompts")]
        if inputs.environment is not None and "reward" in self.parts:
            screen.say("note: the environment scores episodes, not texts, so the reward has no check")
            self.parts.remove("reward")
        self.result = CheckResult()
        self.config = config
        self.given = config  # of the recommended command, which settles its configuration again
        if self.parts != ["reward"]:
            check_device(config, inputs.start, device)
            self.config = settle(config, inputs, device, screen)

    @cached_property
    def components(self) -> Components:
        """The models. Raises UserError."""
        from rlhf.setup.build import load_models

        return load_models(self.config, self.inputs, self.device, self.screen)

    @cached_property
    def rewards(self) -> Rewards:
        """The rewards: those of `components` if another part needs these, otherwise without the policy."""
        if {"prompts", "update"} & set(self.parts):
            return self.components.rewards
        from rlhf.rewards.build import make_rewards

        start = self.inputs.start
        return make_rewards(self.config, self.inputs.rewards, start.tokenizer, self.device, start.date)[0]

    def run(self) -> CheckResult:
        """Check the parts one after the other, also after a part with problems, and print the seconds of each."""
        checks = {"plan": self.plan, "reward": self.reward, "prompts": self.prompts, "update": self.update}
        for part in self.parts:
            began = time.monotonic()
            self.result.problems += checks[part]()
            self.screen.say(f"{part}: checked in {time.monotonic() - began:.1f} s")
        return self.result

    def plan(self) -> list[Problem]:
        """Print the plan of the run."""
        show_plan(self.config, self.inputs, self.device, self.screen)
        return []

    def reward(self) -> list[Problem]:
        """Print what the rewards pay for. Return the functions that fail, and the hacks. In a check of all parts,
        hacks are a warning: a reward may be intended so."""
        from rlhf.rewards.probes import probe_rewards, show_reward_report

        report = probe_rewards(self.config, self.rewards, self.inputs.prompts.train, self.inputs.start.tokenizer)
        self.result.reward = report
        result(reward=asdict(report))
        show_reward_report(report, self.config.sampling.max_new_tokens, self.screen)
        if self.parts != list(PARTS):
            return report.problems()
        failures = list(report.failures.values())
        for hack in report.problems()[len(failures) :]:
            self.screen.say(f"warning: {hack}")
        return failures

    def prompts(self) -> list[Problem]:
        """Print what can be learned from the prompts, and recommended settings. Return why nothing can be learned."""
        from rlhf.setup.scan import scan_prompts, show_scan

        try:
            with self.screen:
                found = scan_prompts(self.config, self.components, self.screen)
        except RunError as error:  # a reward function fails, or gives no score
            return error.problems
        self.result.prompts = found
        result(prompts=asdict(found))
        show_scan(self.given, found, self.screen)
        return [Problem(found.nothing)] if found.nothing is not None else []

    def update(self) -> list[Problem]:
        """Try one update. Return the checks that fail."""
        from rlhf.setup.trial import check_run

        return check_run(self.config, self.components, self.screen)
