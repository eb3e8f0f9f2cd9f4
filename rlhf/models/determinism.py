"""Deterministic algorithms: on one GPU the same seed then gives the same bits.

Torch's notes on reproducibility name what a GPU needs: torch.use_deterministic_algorithms, and a cuBLAS workspace of a
fixed size. On a CPU the project's runs repeat to the bit without either.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rlhf.utils.errors import UserError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE_CUBLAS = (":4096:8", ":16:8")  # the two values with which cuBLAS repeats its sums


# torch's functions of one tensor that MKL's vector library computes on a CPU
VECTOR_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp"),
    *("exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan"),
    *("tanh",),
)


def call_vector_functions_once() -> None:
    """Call each vector function on one element of each precision, before several threads use it.

    In the oneMKL of torch 2.13's CPU build, the first call from several threads has a race: one thread's share can
    come back in low precision (pytorch issue 188792). A call on one element uses one thread, and settles it.
    """
    for dtype in (torch.float32, torch.float64):
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))


def use_deterministic_algorithms() -> None:
    """Switch deterministic algorithms on for the rest of the process. Call it before the first CUDA operation.

    An operator of torch without a deterministic implementation then raises RuntimeError, which
    `rlhf.utils.errors.run_command` prints as one line with the operator's name. The kernels of bitsandbytes and vLLM
    are not checked. Raises UserError if the environment gives cuBLAS another workspace, or none although CUDA is in
    use already.
    """
    if CUBLAS not in os.environ and torch.cuda.is_initialized():
        raise UserError(
            f"CUDA is already initialized, so cuBLAS may not be deterministic: --deterministic. Set {CUBLAS}="
            f"{REPRODUCIBLE_CUBLAS[0]} before Python starts"
        )
    workspace = os.environ.setdefault(CUBLAS, REPRODUCIBLE_CUBLAS[0])  # cuBLAS reads it at its first operation
    if workspace not in REPRODUCIBLE_CUBLAS:
        raise UserError(
            f"cuBLAS is not deterministic with {CUBLAS}={workspace}: --deterministic. "
            f"Set it to {' or '.join(REPRODUCIBLE_CUBLAS)}, or unset it"
        )
    torch.backends.cudnn.benchmark = False  # its trials choose an algorithm by the clock
    torch.use_deterministic_algorithms(True)


def cumulative_sum(values: Tensor) -> Tensor:
    """Prefix sums along the last dimension, shape and dtype of `values`.

    torch.cumsum of floats has no deterministic implementation on CUDA: there, if deterministic algorithms are on,
    `parallel_scan` takes its place.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return parallel_scan(values)
    return values.cumsum(-1)


def parallel_scan(values: Tensor) -> Tensor:
    """Prefix sums along the last dimension in log2(V) additions of whole tensors, whose order never changes.

    Hillis and Steele 1986, "Data parallel algorithms", Communications of the ACM 29(12), section "Computing all
    partial sums of an array".
    """
    total, shift = values, 1
    while shift < values.shape[-1]:
        summed = total.clone()
        summed[..., shift:] += total[..., :-shift]
        total, shift = summed, 2 * shift
    return total
