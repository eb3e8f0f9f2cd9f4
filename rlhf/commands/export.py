"""The command `export_model.py`: writes a finished run in the format of another program."""

from __future__ import annotations

from pathlib import Path

from rlhf.checkpoints.run_record import RunRecord
from rlhf.settings.evaluation import parse_export_cli
from rlhf.utils.console import Screen
from rlhf.utils.errors import UserError
from rlhf.utils.files import check_folder
from rlhf.utils.libraries import check_libraries, import_libraries

INTERRUPTED = "stopped"  # printed after Ctrl-C


def export_command(argv: list[str] | None = None) -> None:
    """Export the run of a command line."""
    config = parse_export_cli(argv)  # torch is imported later, so that --help and errors are printed at once
    RunRecord.require(Path(config.export.run[0]), "run")
    folder = check_folder(str(config.folder))
    if folder.exists():
        raise UserError("already exists", f"--output {folder}", "Give a new folder, or remove that one")
    screen = Screen()
    check_libraries()
    import_libraries(screen)
    if config.export.to == "verl":
        from rlhf.export.verl import export_verl

        return export_verl(config, screen)
    from rlhf.export.gguf import export_gguf

    return export_gguf(config, screen)
