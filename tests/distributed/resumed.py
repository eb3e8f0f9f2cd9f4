"""A run on two processes, stopped and resumed with one, stopped again and resumed with two.

python -m tests.distributed.resumed FOLDER ALGORITHM     prints a JSON object
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from tests.distributed import runs
from tests.distributed.proof import Inputs, largest_gap
from tests.distributed.runs import at_update, send_self


def stop_at(update: int):
    return lambda rank: at_update(update, lambda: send_self(signal.SIGTERM))


def weights(output: Path) -> dict:
    from safetensors.torch import load_file

    return {f"{file.name} {n}": w for file in output.glob("*.safetensors") for n, w in load_file(file).items()}


def main(folder: Path, algorithm: str) -> dict:
    import torch

    torch.set_num_threads(1)
    import rlhf.run.train  # noqa: F401  (the processes are forked after the slow imports)
    from rlhf.checkpoints.run_record import RunRecord

    inputs = Inputs.make(folder / "inputs")
    printed = folder / "printed"
    output = folder / "run"
    outcomes = [runs.run(algorithm, runs.words(algorithm, inputs, folder / "alone"), printed, processes=1)]
    resume = ["--resume", "--output", str(output)]
    parts = ((runs.words(algorithm, inputs, output), 2, stop_at(2)), (resume, 1, stop_at(3)), (resume, 2, None))
    outcomes += [runs.run(algorithm, argv, printed, count, fault) for argv, count, fault in parts]
    return {
        "statuses": [outcome.statuses for outcome in outcomes],
        "errors": [outcome.errors for outcome in outcomes],
        "gap": largest_gap(weights(folder / "alone"), weights(output)),
        "status": RunRecord.read(output).status,
        "processes": RunRecord.read(output).processes,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
