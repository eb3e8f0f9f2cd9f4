"""Local folder or hub name? Says at once, in one line, what cannot be reached and how to go on without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from rlhf.utils.errors import RunError, UserError
from rlhf.utils.paths import is_path

PATIENCE_S = 5  # one look at the hub, no retries


def is_on_hub(name: str) -> bool:
    """Whether a name that was found means the hub's copy: one that is here wins."""
    return not is_path(name) and not Path(name).expanduser().exists()


def require_hub(name: str, kind: str, hint: str) -> str:
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
            f"{kind} is gated: {name}. Accept its terms on the hub and run `hf auth login`, or use {hint}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{kind} not found: {name}, neither a folder here nor on the hub. Check the name, or use {hint}"
        ) from None
    except Exception as error:  # whatever the hub's HTTP library raises: its classes change between releases
        reason = _reason(error)
    try:
        return snapshot_download(name, repo_type=kind, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError):
        raise UserError(
            f"{kind} cannot be fetched: {name} (not on this disk, and the hub cannot be reached: {reason}). "
            f"Go online, or use {hint}"
        ) from None


def _reason(error: Exception) -> str:
    """Why the hub was of no use, on one line."""
    if isinstance(error, OfflineModeIsEnabled):
        return "offline mode is on"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --- uploading -------------------------------------------------------------------------------------------------------

LOG_IN = "Log in with a token that may write: hf auth login"


def require_push(name: str, flag: str) -> None:
    """Raises UserError where `name` (owner/name) cannot be written to, as far as that can be seen without writing."""
    if get_token() is None:
        raise UserError(f"not logged in to the hub: {flag} {name}. {LOG_IN}")
    api = HfApi()
    try:
        with contextlib.suppress(RepositoryNotFoundError):  # it will be made
            api.repo_info(name, timeout=PATIENCE_S)  # asked first, as whoami has no limit of time
        me = api.whoami()
    except HfHubHTTPError as error:
        raise UserError(f"the hub refuses ({_reason(error)}): {flag} {name}. {LOG_IN}") from None
    except Exception as error:  # as in require_hub
        raise UserError(
            f"the hub cannot be reached ({_reason(error)}): {flag} {name}. Go online, or leave it out and push "
            f"afterwards: --resume {flag} {name}"
        ) from None
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"the token may only read: {flag} {name}. {LOG_IN}")
    owners = [me["name"], *(org["name"] for org in me.get("orgs", ()))]
    owner = name.split("/")[0]
    if owner.lower() not in map(str.lower, owners):
        raise UserError(f"{owner} is not among your names on the hub: {flag} {name}. Yours: {', '.join(owners)}")


def push_files(name: str, files: Mapping[str, Path | bytes], stale: Iterable[str], private: bool, message: str) -> str:
    """Puts `files` into a model repository, which is made where there is none, and takes `stale` ones out, in one
    commit; returns its address."""
    api = HfApi()
    url = api.create_repo(name, private=private, exist_ok=True)
    there = set(api.list_repo_files(name))
    api.create_commit(
        name,
        [
            *(CommitOperationAdd(path, content) for path, content in files.items()),
            *(CommitOperationDelete(path) for path in stale if path in there and path not in files),
        ],
        commit_message=message,
    )
    return str(url)


def push_failed(error: Exception, name: str, flag: str, folder: Path, again: str) -> RunError:
    """The error of an upload after a run, which lost nothing."""
    return RunError(
        f"the upload failed ({_reason(error)}): {flag} {name}. The run is finished and its weights are in {folder}; "
        f"upload them with: {again}"
    )
