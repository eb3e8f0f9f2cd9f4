"""Tests that need a GPU: kernels compared with the CPU's results, whole runs, determinism, predicted memory.

`python -m pytest -m gpu` selects these and the GPU tests of other files.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from functools import partial
from itertools import takewhile
from pathlib import Path
from subprocess import STDOUT, Popen
from subprocess import run as run_process

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.algorithms.table import ALGORITHMS
from rlhf.data.prompts import ids_alone
from rlhf.models.actor_critic import Actor
from rlhf.models.determinism import parallel_scan
from rlhf.models.packing import PackedMicroBatch, PaddedMicroBatch
from rlhf.rollout.decoder import FusedDecoder, make_decoder
from rlhf.rollout.engine import KeptBatcher, sample_completions
from rlhf.rollout.kv_cache import SlotKVCache
from rlhf.rollout.sampling import BadLogits, sample_inverse_cdf, top_k_top_p_mask, uniform_noise
from rlhf.rollout.stopping import StoppingCriterion
from rlhf.settings.training import SamplingSettings
from tests.gpu_runs import GROUPS, LOOKS, RUNS
from tests.kills import differing
from tests.models.test_packing import CONFIGS, make_model
from tests.rollout.test_decoder_operators import SMOLLM2
from tests.rollout.test_engine import EOS, HeadWithBadLogits, make_eos_likely, model, prompts  # noqa: F401  (a fixture among them)
from tests.scripts.test_scripts import ROOT

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
GPU = torch.device("cuda")


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["plain", "slots", "graph"])
def test_engine_samples_the_same_tokens_as_on_the_cpu(model, engine):  # noqa: F811
    """Both use float32, so a token differs only if a random number falls between two rounded probabilities."""
    make_eos_likely(model)
    noise = uniform_noise(1, 2, "rollout", range(9), 40)
    sampling = SamplingSettings(40, 1.0, 0, 0.9)

    def rows(policy, device, engine):
        return sample_completions(
            policy, prompts(), noise, sampling, eos=EOS, pad=0, device=device, engine=engine, slots=3
        ).rows()

    expected = rows(model, CPU, "plain")
    assert rows(copy.deepcopy(model).to(GPU), GPU, engine) == expected


@pytest.mark.parametrize("engine", ["plain", "slots", "graph"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [one for one in CONFIGS if "gemma 2" not in one])  # its softcap makes inf finite
def test_bad_logits_end_in_one_line_and_leave_the_gpu_usable(engine, value, name):
    """An index out of range would be a device-side assert, after which no checkpoint can be written."""
    policy = make_model(name, seed=3).to(GPU)
    noise = uniform_noise(1, 2, "rollout", range(9), 20)
    head = policy.get_output_embeddings()
    policy.set_output_embeddings(HeadWithBadLogits(head, value, 7))
    with pytest.raises(BadLogits):
        sample_completions(
            policy, prompts(), noise, SamplingSettings(20, 1.0), eos=EOS, pad=0, device=GPU, engine=engine, slots=3
        )
    assert float(torch.ones(4, device=GPU).sum()) == 4


def test_log_probs_equal_those_of_the_cpu(model):  # noqa: F811
    noise = uniform_noise(1, 2, "rollout", range(9), 20)
    sampling = SamplingSettings(20, 1.0)
    results = {}
    for device in (CPU, GPU):
        policy = copy.deepcopy(model).to(device)
        completions = sample_completions(policy, prompts(), noise, sampling, eos=EOS, pad=0, device=device)
        rows = range(len(completions.mask))
        for form in (PackedMicroBatch, PaddedMicroBatch):
            with torch.no_grad():
                logprobs, _, _ = Actor(policy)(form(completions, rows), 1.0)
            results[device.type, form.__name__] = logprobs.cpu()
    for key, logprobs in results.items():
        assert_close(
            logprobs,
            results["cpu", "PaddedMicroBatch"],
            rtol=1e-4,
            atol=1e-4,
            msg=lambda text, key=key: f"{key}: {text}",
        )


@pytest.fixture(scope="module", params=[None, "all-linear"], ids=["all weights", "lora"])
def smollm2(request):
    """A model with the sizes of SmolLM2-135M, but 6 layers and 256 tokens, in float32."""
    torch.manual_seed(0)
    policy = LlamaForCausalLM(LlamaConfig(**SMOLLM2 | {"num_hidden_layers": 6, "vocab_size": 256})).eval().to(GPU)
    if request.param is None:
        return policy
    policy = get_peft_model(policy, LoraConfig(r=16, target_modules=request.param)).eval()
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)
    return policy


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_engines_in_bfloat16_sample_almost_the_same(smollm2, top_p):
    """Mixed lengths with EOS, three rollouts with one set of graphs, and weights that change between them. A token
    changes only if its random number is within the rounding of a cumulative probability. After a change the rest of a
    completion is another one, so only the tokens up to the first change count."""
    kept = KeptBatcher()
    changed = dict.fromkeys(("graph", "plain"), 0)
    compared = dict.fromkeys(("graph", "plain"), 0)
    batch = [ids_alone(range(3, 5 + n % 60)) for n in range(64)]
    for _ in range(3):
        noise = torch.rand(64, 48, dtype=torch.float64)
        sampling = SamplingSettings(48, 0.7, 0, top_p)
        found = {}
        for engine in ("slots", "graph", "plain"):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                found[engine] = sample_completions(
                    smollm2, batch, noise, sampling, eos=StoppingCriterion(range(200, 208)), pad=0, device=GPU,
                    engine=engine, slots=32, kept=kept if engine == "graph" else None,
                ).rows()  # fmt: skip
        assert len({len(row) for row in found["slots"]}) > 5
        for engine in changed:
            for row, expected in zip(found[engine], found["slots"], strict=True):
                equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row, expected, strict=False)))
                changed[engine] += row != expected
                compared[engine] += equal + (row != expected)
        with torch.no_grad():
            for weight in smollm2.parameters():
                weight.mul_(1.01)
    assert all(changed[engine] < 0.1 * compared[engine] for engine in changed), (changed, compared)


def test_decoder_logits_in_bfloat16_are_near_those_of_the_training_forward(smollm2):
    tokens = torch.arange(100, 164, device=GPU)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        decoder = make_decoder(smollm2, 64, 64)
        assert isinstance(decoder, FusedDecoder)
        hidden = decoder.hidden(tokens, torch.zeros_like(tokens), 64, SlotKVCache(64, 64))
        found = decoder.logits(hidden, 0.7)
        expected = smollm2(tokens.unsqueeze(1)).logits[:, 0].float() / 0.7
    assert found.dtype == torch.float32 and float((found - expected).abs().mean()) < 0.05


def test_sampling_of_large_vocabularies_equals_the_cpu():
    logits = torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = sample_inverse_cdf(logits.to(GPU), uniform.to(GPU)).cpu()
    assert (tokens != sample_inverse_cdf(logits, uniform)).sum() <= 1, "at most one token, at the end of an interval"
    probabilities = logits.double().softmax(-1)
    assert_close(parallel_scan(probabilities.to(GPU)).cpu(), probabilities.cumsum(-1))
    allowed = top_k_top_p_mask(logits.to(GPU), 50, 0.9).cpu()
    expected = top_k_top_p_mask(logits, 50, 0.9)
    assert (allowed != expected).sum() <= 64, "at most one token per row, at the edge of the nucleus"


# --- waits for the GPU -----------------------------------------------------------------------------------------------

WATCHED = """
import json, sys, warnings
from pathlib import Path
import torch
from benchmarks import ours
from benchmarks.work import Work, make_models
work = Work(sys.argv[1], device="cuda", dtype="bfloat16", algorithm=sys.argv[2], ppo_epochs=2, minibatches=2)
make_models(work)
trainer, run, counts = ours.build(work), None, []
def watched(*arguments):
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        result = run(*arguments)
        torch.cuda.set_sync_debug_mode("default")
    counts.append(sum("synchronizing CUDA operation" in str(one.message) for one in caught))
    return result
run, trainer.policy_optimizer.run = trainer.policy_optimizer.run, watched
trainer.update_step(1)
trainer.update_step(2)
print(json.dumps(counts))
"""


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_optimizer_steps_wait_for_the_gpu_once_each(tmp_path, algorithm):
    """Agreed: one wait per optimizer step, which protects the weights, and one per update for its statistics."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "ACCELERATE_USE_CPU": "false", "PYTHONPATH": paths}
    words = [sys.executable, "-c", WATCHED, str(tmp_path), algorithm]
    done = run_process(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[1] <= 4 + 1, "2 epochs x 2 minibatches"


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gpu_runs(start_model, reward_folder, pairs_file, made_once) -> Path:
    """Return the folder of all runs. One process does the runs for all workers, in parallel with the tests."""
    return made_once("gpu_runs", partial(start_runs, start_model, reward_folder, pairs_file))


def start_runs(start_model: Path, reward_folder: Path, pairs_file: Path, folder: Path) -> None:
    words = ["-m", "tests.gpu_runs", *map(str, (folder, start_model, reward_folder, pairs_file))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "ACCELERATE_USE_CPU": "false"}
    with (folder / "log").open("w", encoding="utf-8") as printed:
        process = Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=printed, stderr=STDOUT)
    (folder / "pid").write_text(str(process.pid), encoding="utf-8")


def result(folder: Path, name: str) -> dict:
    """Waits until a run has ended and returns its status and output."""
    file = folder / "results" / f"{name}.json"
    pid = int((folder / "pid").read_text(encoding="utf-8"))
    while not file.exists():
        alive = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        assert alive or file.exists(), (folder / "log").read_text(encoding="utf-8")[-3000:]
        time.sleep(0.2)
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_gpu(gpu_runs, name):
    ended = result(gpu_runs, name)
    assert ended["status"] == 0, ended["output"]
    capable = torch.cuda.is_bf16_supported(including_emulation=False)
    expected = f"cuda, {'bfloat16 autocast' if capable else 'float32'}"
    assert expected in ended["output"].replace("cuda:0", "cuda") and "update 2/2" in ended["output"]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("command", LOOKS)
def test_a_run_is_evaluated_on_the_gpu(gpu_runs, command, name):
    ended = result(gpu_runs, f"{command}_{name}")
    assert ended["status"] == 0, ended["output"]


@pytest.mark.parametrize("algorithm", GROUPS)
def test_the_state_of_8_bit_adam_is_resumed_on_the_gpu(gpu_runs, algorithm):
    ended = result(gpu_runs, f"{algorithm}_resumed")
    assert ended["status"] == 0, ended["output"]
    assert "update 3/3" in ended["output"]


@pytest.mark.parametrize("algorithm", GROUPS)
def test_deterministic_runs_with_one_seed_are_bit_identical(gpu_runs, algorithm):
    """A nondeterministic operator stops the run, and the run prints its name."""
    names = [f"{algorithm}_same_{number}" for number in (1, 2)]
    for name in names:
        ended = result(gpu_runs, name)
        assert ended["status"] == 0, ended["output"]
    assert differing(*(gpu_runs / name for name in names)) == []
