"""Local folder or hub name? Says at once, in one line, what cannot be reached and how to go on without it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from rlhf.errors import UserError

PATIENCE_S = 5  # one look at the hub, no retries


def is_path(name: str) -> bool:
    """Whether a name can only be a place on this disk: hub names are `name` or `owner/name`."""
    return (
        name.startswith((".", "/", "~", os.sep))
        or "\\" in name
        or name.count("/") > 1
        or Path(name).suffix
        in (
            ".jsonl",
            ".json",
        )
    )


def missing_path(path: str, what: str, way_out: str) -> UserError:
    """The error for a path that is not there; names what lies near it."""
    folder = Path(path).expanduser().parent
    beside = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    near = difflib.get_close_matches(Path(path).name, beside, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(str(folder / n) for n in near)}? " if near else ""
    return UserError(f"{what} not found: {path}. {hint}{way_out}")


def require_hub(name: str, kind: str, way_out: str) -> str:
    """Where to load a hub `kind` ("model" or "dataset") from: its name if the hub answers, else the copy cached here.

    One look at the hub and no retries: handed a mere name, the libraries would ask for every file, for minutes.
    Raises UserError where there is neither.
    """
    try:
        info = HfApi().repo_info(name, repo_type=kind, timeout=PATIENCE_S)
        if info.gated:
            HfApi().auth_check(name, repo_type=kind)
        return name
    except GatedRepoError:
        raise UserError(
            f"{kind} is gated: {name}. Accept its terms on the hub and run `hf auth login`, or use {way_out}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{kind} not found: {name}, neither a folder here nor on the hub. Check the name, or use {way_out}"
        ) from None
    except Exception as error:  # whatever the hub's HTTP library raises: its classes change between releases
        reason = (
            "offline mode is on" if isinstance(error, OfflineModeIsEnabled) else str(error) or type(error).__name__
        )
    try:
        return snapshot_download(name, repo_type=kind, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError):
        raise UserError(
            f"{kind} cannot be fetched: {name} (not on this disk, and the hub cannot be reached: {reason}). "
            f"Go online, or use {way_out}"
        ) from None
