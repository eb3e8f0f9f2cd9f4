"""Writes the files of the recipe qwen3-gsm8k: GSM8K's questions with an instruction about the form of the answer.

python examples/gsm8k_data.py                                      reads openai/gsm8k on the hub
python examples/gsm8k_data.py gsm8k_train.jsonl gsm8k_test.jsonl   reads two files

The files have rows with `question` and `answer`. The output is gsm8k_parts/train.jsonl and gsm8k_parts/test.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# verl, examples/data_preprocess/gsm8k.py. Its reward, and the start values of published runs, depend on these words.
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(files: list[str]) -> None:
    folder = Path("gsm8k_parts")
    folder.mkdir(exist_ok=True)
    for number, split in enumerate(("train", "test")):
        rows = read_rows(Path(files[number])) if files else from_hub(split)
        lines = [
            json.dumps({"question": f"{row['question']} {INSTRUCTION}", "answer": row["answer"]}, ensure_ascii=False)
            for row in rows
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {folder / split}.jsonl ({len(lines):,} rows)")


def read_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def from_hub(split: str):
    from datasets import load_dataset

    return load_dataset("openai/gsm8k", "main", split=split)


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3):
        sys.exit(__doc__)
    main(sys.argv[1:])
