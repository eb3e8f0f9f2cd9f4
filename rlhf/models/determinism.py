"""Deterministic algorithms, with which the same seed gives bit-identical results on the same GPU.

According to PyTorch's notes on reproducibility, a GPU requires torch.use_deterministic_algorithms and a cuBLAS
workspace of fixed size. On a CPU, runs of this project with the same number of threads are bit-identical without
either.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rlhf.utils.errors import UserError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE_CUBLAS = (":4096:8", ":16:8")  # the two values with which cuBLAS is deterministic


# elementwise functions that torch computes with MKL's vector library on a CPU
VECTOR_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp"),
    *("exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan"),
    *("tanh",),
)


def call_vector_functions_once() -> None:
    """Call each vector function once on one element, in each precision, before several threads use it.

    Workaround for a race in the oneMKL of torch 2.13's CPU build: if several threads make the first call, the results
    of one thread can have low precision (pytorch issue 188792). A call on one element uses a single thread.
    """
    for dtype in (torch.float32, torch.float64):
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))


def use_deterministic_algorithms() -> None:
    """Enable deterministic algorithms for the rest of the process. Call it before the first CUDA operation.

    Afterwards, a torch operator without a deterministic implementation raises RuntimeError, which
    `rlhf.utils.errors.run_command` prints as one line with the operator's name. Kernels of bitsandbytes and vLLM are
    not checked. Raises UserError if CUBLAS_WORKSPACE_CONFIG has another value than the two above, or if it is unset
    and CUDA is already initialized.
    """
    if CUBLAS not in os.environ and torch.cuda.is_initialized():
        raise UserError(
            "CUDA is already initialized, so cuBLAS may not be deterministic",
            "--deterministic",
            f"Set {CUBLAS}={REPRODUCIBLE_CUBLAS[0]} before Python starts",
        )
    workspace = os.environ.setdefault(CUBLAS, REPRODUCIBLE_CUBLAS[0])  # cuBLAS reads it at its first operation
    if workspace not in REPRODUCIBLE_CUBLAS:
        raise UserError(
            f"cuBLAS is not deterministic with {CUBLAS}={workspace}",
            "--deterministic",
            f"Set it to {' or '.join(REPRODUCIBLE_CUBLAS)}, or unset it",
        )
    torch.backends.cudnn.benchmark = False  # the benchmark selects algorithms by measured time
    torch.use_deterministic_algorithms(True)
    # otherwise every new tensor is filled with NaN first. This only shows errors: no result reads what is not written
    torch.utils.deterministic.fill_uninitialized_memory = False


def cumulative_sum(values: Tensor) -> Tensor:
    """Return the prefix sums along the last dimension, with the shape and dtype of `values`.

    torch.cumsum of floats has no deterministic implementation on CUDA. If deterministic algorithms are enabled there,
    `parallel_scan` replaces it.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return parallel_scan(values)
    return values.cumsum(-1)


def parallel_scan(values: Tensor) -> Tensor:
    """Return the prefix sums along the last dimension, with log2(V) additions of whole tensors in a fixed order.

    Hillis and Steele 1986, "Data parallel algorithms", Communications of the ACM 29(12), section "Computing all
    partial sums of an array".
    """
    total = values
    shift = 1
    while shift < values.shape[-1]:
        summed = total.clone()
        summed[..., shift:] += total[..., :-shift]
        total = summed
        shift = 2 * shift
    return total
