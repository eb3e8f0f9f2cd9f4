"""The processes of a run, and what they exchange. With one process, every function returns at once.

All processes run the same program. Each samples, scores and differentiates its share of a batch; the results are
exchanged, and everything else is computed from the same full tensors in every process. So the number of processes does
not change the optimization. Only the first process (rank 0) prints, and writes files.

`agree` stands around the loading of a run, its training, and a share of sampling, log-probs and scores. The sum of the
gradients does the same. If a process fails inside, it sends its error, and the others receive it at their next
exchange of objects. Objects are exchanged before tensors are, so an error never meets a tensor.
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from rlhf.utils.errors import Problem, RaisedByAll, RunError, UserError, first_line, is_raised_by_all
from rlhf.utils.processes import alone, connected, is_first, launched, rank, size

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class LostProcess(RunError):
    """Another process of the run has ended without reporting an error, or does not answer."""

    at_once = True  # the launcher may end this process within a tenth of a second


def _exchange(operation: Callable[[], T]) -> T:
    """Return the result of a collective operation. Raises LostProcess if it fails."""
    try:
        return operation()
    except RuntimeError as error:  # gloo and NCCL raise it for a closed connection, and after the timeout
        raise LostProcess(
            f"another process of this run has ended or does not answer ({reason_of(error)})",
            f"found by process {rank()} of {size()}",
            "Start all processes again, with --resume if the run has a checkpoint",
        ) from error


def reason_of(error: Exception) -> str:
    """Return the first line of an error of torch.distributed, without the place in torch's source."""
    line = first_line(error)
    return re.sub(r"^\[\S+\] ", "", line).split(". This is typically")[0][:160]


class _Failure:
    """Takes the place of a value that a process cannot give."""

    def __init__(self, error: Exception):
        self.error = _portable(error)


def gather(value: T) -> list[T]:
    """Return the values of all processes, by rank. A value must be picklable. If a process has failed and takes part
    with its error instead, the error is raised in all of them."""
    group = connected()
    if group is None:
        return [value]
    values: list = [None] * size()
    _exchange(lambda: group.all_gather_object(values, value))
    failed = next((number for number, found in enumerate(values) if isinstance(found, _Failure)), None)
    if failed is None:
        return values
    raise values[failed].error from RaisedByAll()


def gather_or_raise(value: T, error: Exception | None) -> list[T]:
    """Return the values of all processes. `error`: this process has none, for this reason; it is raised in all."""
    if error is not None and connected() is None:
        raise error
    return gather(value if error is None else _Failure(error))


def add_up(tensor: Tensor) -> Tensor:
    """Replace a tensor by its sum over all processes, in place, and return it. The result is bit-equal in all."""
    group = connected()
    if group is not None:
        _exchange(lambda: group.all_reduce(tensor))
    return tensor


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by those of the first process, in place."""
    group = connected()
    if group is not None:
        for tensor in tensors:
            _exchange(lambda tensor=tensor: group.broadcast(tensor, src=0))


def require_equal(facts: dict[str, object], fix: str) -> None:
    """Raise UserError, in all processes, if a fact is not the same in all. `fix` is the advice in the message."""
    found = gather(facts)
    problems = [
        Problem(
            f"{name} is {found[0].get(name)} in process 0, but {one.get(name)} in process {number}",
            "run on several processes",
            fix,
        )
        for number, one in enumerate(found)
        for name in facts
        if one.get(name) != found[0].get(name)
    ]
    if problems:
        raise UserError(problems) from RaisedByAll()


def agree(work: Callable[[], T]) -> T:
    """Return `work()`. If it fails in one process, the same error is raised in all of them."""
    if size() == 1:
        return work()
    try:
        result = work()
    except Exception as error:
        if not is_raised_by_all(error):
            gather_or_raise(None, error)
        raise
    gather(None)
    return result


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to other processes and says where it was raised."""
    if isinstance(error, RunError) and not is_first() and error.problems:
        error.append(f" (in process {rank()} of {size()})")
    if not isinstance(error, UserError):  # an unexpected one: the first process writes the traceback to a file
        error.add_note(f"in process {rank()} of {size()}:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # pickle raises whatever an object's own methods raise
        return RunError(
            f"{type(error).__name__} ({first_line(error):.200})", f"process {rank()} of {size()}", "This is a bug"
        )


def from_first(work: Callable[[], T]) -> T:
    """Return the result of `work()` in the first process, in all processes. Only the first one runs it, alone; its
    errors are raised in all. The result must be picklable."""
    return gather(_run_if(is_first(), work))[0]


def on_first(work: Callable[[], T]) -> T | None:
    """Return the result of `work()` in the first process, which runs it alone. The others wait, and get None. Its
    errors are raised in all processes."""
    return _run_if(is_first(), work)


def in_turn(work: Callable[[], object]) -> None:
    """Run `work()`, which writes files that all processes of a machine read: its first process runs it before."""
    for turn in (True, False):
        _run_if((local_rank() == 0) == turn, work)


def _run_if(mine: bool, work: Callable[[], T]) -> T | None:
    def run() -> T:
        with alone():
            return work()

    return agree(run if mine else lambda: None)


local: dict[str, int] = {}  # "number": the launcher's LOCAL_RANK, which `join` removes from the environment


def local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    return local.get("number", launched("LOCAL_RANK", 0))


def largest(value: float) -> float:
    """Return the largest value of all processes."""
    return max(gather(value))
