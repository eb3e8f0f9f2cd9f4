"""The Hugging Face hub: checks access before a run, and uploads models."""

from __future__ import annotations

import contextlib
import functools
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

from rlhf.utils.errors import RunError, UserError, first_line

TIMEOUT_S = 5  # of one request without retries


def require_hub(name: str, kind: str, hint: str, named_in: Path | None) -> str:
    """Return where to load a "model" or "dataset" (`kind`) of the hub from: its name if the hub can be reached,
    otherwise the path of the local cache. Raises UserError if there is neither. `named_in`: the file that contains
    the name, for the error.

    Makes one request without retries. Without this check, the libraries would retry for every file, for minutes.
    """
    place = name if named_in is None else f"{name} (in {named_in})"
    try:
        info = HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_S)
        if info.gated:
            HfApi().auth_check(name, repo_type=kind)
        return name
    except GatedRepoError:
        raise UserError(
            f"{kind} is gated", place, f"Accept its terms on the hub and run `hf auth login`, or use {hint}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{kind} not found", f"{place} is neither a local folder nor on the hub", f"Check the name, or use {hint}"
        ) from None
    except Exception as error:  # exception classes of the HTTP library change between releases
        reason = _hub_reason(error)
    folder = cached_folder(name, kind)
    if folder is None:
        raise UserError(
            f"cannot download the {kind}",
            f"{place} (not in the local cache, and the hub cannot be reached: {reason})",
            f"Go online, or use {hint}",
        )
    return str(folder)


def cached_folder(name: str, kind: str = "model") -> Path | None:
    """Return the folder of a "model" or "dataset" (`kind`) in the local cache; None if it is not there."""
    try:
        return Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


@functools.cache
def tensors_on_hub(name: str) -> dict[str, list[int]]:
    """Return the names and shapes of the tensors in a model's safetensors files, from the headers of the files on the
    hub. {} if they cannot be read."""
    try:
        files = HfApi().get_safetensors_metadata(name).files_metadata.values()
    except Exception:  # exception classes of the HTTP library change between releases; the caller has another way
        return {}
    return {tensor: info.shape for file in files for tensor, info in file.tensors.items()}


def _hub_reason(error: Exception) -> str:
    """Return the reason of a hub error, on one line."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return first_line(error, type(error).__name__)


# --- uploading -------------------------------------------------------------------------------------------------------

LOG_IN = "Log in with a token that has write access: hf auth login"


def require_push(name: str, flag: str) -> None:
    """Raise UserError if the user cannot write to the repository `name` (owner/name), as far as a check can show
    it."""
    if get_token() is None:
        raise UserError("not logged in to the hub", f"{flag} {name}", LOG_IN)
    api = HfApi()
    try:
        with contextlib.suppress(RepositoryNotFoundError):  # it will be created
            api.repo_info(name, timeout=TIMEOUT_S)  # first, because whoami has no timeout
        me = api.whoami()
    except HfHubHTTPError as error:
        raise UserError(f"the hub rejects the request ({_hub_reason(error)})", f"{flag} {name}", LOG_IN) from None
    except Exception as error:  # as in require_hub
        raise UserError(
            f"the hub cannot be reached ({_hub_reason(error)})",
            f"{flag} {name}",
            f"Go online, or remove {flag} and upload afterwards: --resume {flag} {name}",
        ) from None
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError("the token has read access only", f"{flag} {name}", LOG_IN)


def push_files(name: str, files: Mapping[str, Path | bytes], stale: Iterable[str], message: str) -> str:
    """Upload `files` to a model repository and delete its `stale` files, in one commit. Creates a private
    repository if it does not exist. Returns its URL."""
    api = HfApi()
    url = api.create_repo(name, private=True, exist_ok=True)
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
    """Return the error for a failed upload after a run. The run itself is complete."""
    return RunError(
        f"the upload failed ({_hub_reason(error)})",
        f"{flag} {name}",
        f"The run is finished and its weights are in {folder}; upload them with: {again}",
    )
