"""Tests `--deterministic`: what it enables, its errors, and the replacement for torch.cumsum."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import train_ppo
from rlhf.models import determinism, device
from rlhf.models.determinism import CUBLAS, parallel_scan, use_deterministic_algorithms
from rlhf.rollout import sampling
from rlhf.rollout.sampling import sample_inverse_cdf
from rlhf.utils.console import Screen
from rlhf.utils.errors import run_command


@pytest.fixture(autouse=True)
def restore_determinism(monkeypatch):
    """Restores torch's determinism settings after each test and unsets the cuBLAS workspace variable.

    A GPU test in the same process may have initialized CUDA.
    """
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv(CUBLAS, "")  # makes monkeypatch remove a value that the test sets
    monkeypatch.delenv(CUBLAS)
    on = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cudnn.benchmark = benchmark


def test_deterministic_algorithms_are_enabled():
    torch.backends.cudnn.benchmark = True
    use_deterministic_algorithms()
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[CUBLAS] == ":4096:8"


def test_new_tensors_are_not_filled_and_no_result_reads_them_before_they_are_written(build):
    """With torch's default, each new tensor is filled with NaN, which would reach the weights."""
    weights = []
    for filled in (True, False):
        trainer = build()
        use_deterministic_algorithms()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = filled
        assert not filled or bool(torch.empty(5).isnan().all())
        trainer.update_step(1)
        trainer.evaluate()
        weights.append(torch.cat([w.detach().flatten() for w in trainer.host.model.parameters()]))
    assert torch.equal(*weights) and bool(weights[0].isfinite().all())


def test_nondeterministic_cublas_workspace_is_refused(monkeypatch, user_error):
    monkeypatch.setenv(CUBLAS, ":0:0")
    with user_error("CUBLAS_WORKSPACE_CONFIG=:0:0", "--deterministic"):
        use_deterministic_algorithms()
    assert not torch.are_deterministic_algorithms_enabled()


def test_initialized_cuda_without_workspace_is_refused(monkeypatch, user_error):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with user_error("CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        use_deterministic_algorithms()
    monkeypatch.setenv(CUBLAS, ":16:8")
    use_deterministic_algorithms()
    assert torch.are_deterministic_algorithms_enabled()


def test_deterministic_flag_enables_it_for_training(configured, capsys):
    config = configured()
    flags = ["--actor-model", config.model.actor_model, "--rm-model", config.model.rm_model, "--max-new-tokens", "8",
             "--prompts", config.data.prompts, "--allow-weak-reward-model", "--output", config.run.output,
             "--num-iterations", "2"]  # fmt: skip
    train_ppo.main([*flags, "--dry-run"])
    assert not torch.are_deterministic_algorithms_enabled()
    train_ppo.main([*flags, "--deterministic"])
    assert torch.are_deterministic_algorithms_enabled()
    assert "update 2/2" in capsys.readouterr().out, "every operator of an update has a deterministic implementation"


MESSAGES = {  # error messages of torch
    "_histc_cuda": "_histc_cuda does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation",
    "cuBLAS": "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS",
}


@pytest.mark.parametrize("operator", MESSAGES)
def test_nondeterministic_operator_is_reported_in_one_line(capsys, operator):
    def run():
        raise RuntimeError(MESSAGES[operator])

    with pytest.raises(SystemExit) as ended:
        run_command(run)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"error: {operator} has no deterministic implementation on this device: --deterministic. "
        "Remove the flag, and please report the name of the operator\n"
    )


# --- the scan that replaces torch.cumsum -----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 5, 64, 1000])
def test_parallel_scan_matches_known_sums_and_torch(width):
    counting = torch.arange(1.0, width + 1).expand(3, width)
    triangle = torch.tensor([n * (n + 1) / 2 for n in range(1, width + 1)])
    assert torch.equal(parallel_scan(counting), triangle.expand(3, width))
    values = torch.rand(4, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(parallel_scan(values), values.cumsum(-1))
    assert parallel_scan(values.float()).dtype == torch.float32


def test_sampling_with_the_scan_draws_the_same_tokens(monkeypatch):
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 300, generator=stream)
    logits[:, ::2] = -torch.inf  # filtered out
    uniform = torch.rand(500, generator=stream, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    plain = sample_inverse_cdf(logits, uniform)
    monkeypatch.setattr(sampling, "cumulative_sum", parallel_scan)
    assert torch.equal(sample_inverse_cdf(logits, uniform), plain) and bool((plain % 2 == 1).all())


def test_cpu_uses_torch_cumsum():
    use_deterministic_algorithms()
    values = torch.rand(3, 7)
    assert torch.equal(determinism.cumulative_sum(values), values.cumsum(-1))


@pytest.mark.parametrize("value", ["true", "false"])
def test_accelerates_variable_selects_the_cpu_from_the_start(monkeypatch, value):
    """On a machine with a GPU the inputs were on the GPU and the model on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", value)
    monkeypatch.setattr(device, "PartialState", lambda cpu: SimpleNamespace(device=cpu))
    assert device.selected_device() is (value == "true")


def test_attention_of_cudnn_is_disabled_at_the_start():
    """It makes a plan for every new shape, which takes up to a second (H100 and newer)."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.start_device(Screen())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_vector_functions_are_called_once_before_threads_start(monkeypatch):
    """Workaround for pytorch issue 188792: each function is called first on one element, which uses one thread."""
    calls = []
    for name in determinism.VECTOR_FUNCTIONS:
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda x, n=name, f=plain: calls.append((n, x.dtype, x.numel())) or f(x))
    monkeypatch.setattr(device, "use_deterministic_algorithms", lambda: calls.append("next"))
    device.start_device(Screen(), deterministic=True)
    assert calls.pop() == "next"
    expected = {(n, d, 1) for n in ("exp", "log", "tanh", "erf") for d in (torch.float32, torch.float64)}
    assert expected <= set(calls) and all(size == 1 for _, _, size in calls)
