"""`--dry-run`: prints the plan of a run. Reads no weights and does not import the training loop."""

from __future__ import annotations

from rlhf.data.prompts import Selection
from rlhf.models.device import start_device
from rlhf.settings.training import Config
from rlhf.setup.fit import choose_settings
from rlhf.setup.inputs import check_export
from rlhf.setup.load_inputs import check_device, load_inputs
from rlhf.setup.plan import plan_run
from rlhf.utils.console import Screen


def dry_run(config: Config, screen: Screen, selection: Selection | None = None) -> None:
    """Print the plan of one run. `selection` has the rows of the data, if they were read already. Raises UserError."""
    check_export(config)
    device = start_device(screen, config.run.deterministic)
    inputs = load_inputs(config, screen, selection=selection)
    check_device(config, inputs.start, device)
    config = choose_settings(config, inputs, device, screen)
    plan_run(config, inputs, device, screen)
