"""Plays one script of ids with TRL's GRPOTrainer and with this project, and records what both of them do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from rlhf.api import make_trainer
from rlhf.config import make_config
from rlhf.rollout.completions import Completions
from rlhf.rollout.sampler import Sampler

LONGEST = 400  # tokens after a prompt


@dataclass
class Record:
    """What an environment received, and what became of the episodes, in order."""

    calls: list = field(default_factory=list)  # (method, arguments), of all instances in their order
    instances: list = field(default_factory=list)  # those that were constructed
    prompts: list[list[int]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    completions: list[list[dict]] = field(default_factory=list)  # messages, as a reward function receives them
    rewards: list[list[float]] = field(default_factory=list)  # of each function


def environment_of(record: Record) -> type:
    """Return a class with a sync and an async tool that records its calls."""

    class Rooms:
        def __init__(self):
            record.instances.append(self)
            self.number = len(record.instances)
            self.found = 0

        def reset(self, **row):
            record.calls.append((self.number, "reset", row))
            self.found = 0
            return f" Room {row['goal']}." if row["goal"] % 2 else None

        def look(self, place: str) -> str:
            """Look at a place.

            Args:
                place: where to look.
            """
            record.calls.append((self.number, "look", place))
            if place == "pit":
                raise ValueError("it is dark")
            self.found += 1
            return {"far": "key " * 300, "end": "<|im_end|>"}.get(place, f"a key in the {place}")

        async def wait(self, turns: int = 1) -> dict:
            """Wait.

            Args:
                turns: how long.
            """
            record.calls.append((self.number, "wait", turns))
            return {"turns": turns, "found": self.found}

        def get_reward(self):
            return self.found + 0.5

    return Rooms


def score_of(record: Record) -> Callable:
    """Return a reward function that names the environments."""

    def score(completions, environments, **_):
        record.completions.extend([[dict(message) for message in one] for one in completions])
        return [float(len(one) + 10 * place.found) for one, place in zip(completions, environments, strict=True)]

    return score


class Script:
    """Returns prepared turns: `texts[batch][row]` are the turns of an episode."""

    def __init__(self, tokenizer, texts: Sequence[Sequence[Sequence[str]]]):
        end = tokenizer.eos_token_id
        self.turns = [
            [[[*tokenizer(text, add_special_tokens=False).input_ids, end] for text in row] for row in batch]
            for batch in texts
        ]
        self.batch = -1
        self.known: dict[int, tuple[int, ...]] = {}  # row -> the text so far
        self.next: dict[int, int] = {}

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        rows = [self.row_of(tuple(prompt)) for prompt in prompts]
        if None in rows:
            assert set(rows) == {None}
            self.batch += 1
            rows = list(range(len(prompts)))
            self.next = dict.fromkeys(rows, 0)
        found = []
        for row, prompt in zip(rows, prompts, strict=True):
            ids = self.turns[self.batch][row][self.next[row]]
            self.next[row] += 1
            self.known[row] = (*prompt, *ids)
            found.append(list(ids))
        return found

    def row_of(self, prompt: tuple[int, ...]) -> int | None:
        matching = [row for row, text in self.known.items() if prompt[: len(text)] == text]
        return max(matching, key=lambda row: len(self.known[row]), default=None)


def make_model(folder: Path) -> Path:
    """Write a tiny model with random weights, the demo's tokenizer and TRL's template of Qwen 3, and return its
    folder."""
    tokenizer = AutoTokenizer.from_pretrained("rlhf/demo/weights")
    tokenizer.chat_template = qwen3_chat_template
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(batches: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"Find key {i}."}], "goal": i} for i in range(2 * batches)]


def run_trl(model: Path, texts: Sequence, most: int | None, folder: Path) -> Record:
    """Play the script with TRL: two prompts, two episodes of each, per batch."""
    record = Record()
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=LONGEST,
        max_steps=len(texts), max_tool_calling_iterations=most, learning_rate=0.0, report_to=[], use_cpu=True,
        bf16=False, shuffle_dataset=False, save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(model), reward_funcs=[score_of(record)], args=args, train_dataset=Dataset.from_list(rows_of(len(texts))),
        processing_class=tokenizer, environment_factory=environment_of(record),
    )  # fmt: skip
    script = Script(tokenizer, texts)
    trainer._generate_single_turn = lambda prompts, *_, **__: (script(prompts), None)
    generate = trainer._generate
    rewards = trainer._calculate_rewards

    def generated(prompts):
        found = generate(prompts)
        record.prompts += found[0]
        record.ids += found[1]
        record.masks += found[2]
        return found

    def rewarded(*given):
        found = rewards(*given)
        record.rewards += found.tolist()
        return found

    trainer._generate = generated
    trainer._calculate_rewards = rewarded
    trainer.train()
    return record


def run_ours(model: Path, texts: Sequence, most: int | None, monkeypatch) -> Record:
    """Play the same script with this project."""
    record = Record()
    config = make_config(
        "smollm2-orca", algorithm="grpo", actor_model=str(model), rm_model=None, batch_size=2, K=2, prompt_length=2000,
        max_new_tokens=LONGEST, max_turns=None if most is None else most + 1, num_iterations=len(texts),
        learning_rate=1e-9, rollout_engine="slots",
    )  # fmt: skip
    rows = rows_of(len(texts))
    trainer = make_trainer(
        config, rows, [score_of(record)], environment=environment_of(record), evaluation_prompts=[], progress=False
    )
    tokenizer = trainer.collector.rules.tokenizer
    script = Script(tokenizer, texts)

    def sample(sampler, prompts, *_, **__):
        found = [torch.tensor(ids) for ids in script([prompt.ids for prompt in prompts])]
        ids = torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=tokenizer.eos_token_id)
        return Completions.of(prompts, ids, eos=sampler.criterion, pad=sampler.pad, vocabulary=len(tokenizer))

    monkeypatch.setattr(Sampler, "sample", sample)
    for update in range(len(texts)):
        episodes = trainer.play(rows[2 * update : 2 * update + 2])
        record.prompts += [episode.prompt_ids for episode in episodes]
        record.ids += [episode.ids for episode in episodes]
        record.masks += [list(map(int, episode.action_mask)) for episode in episodes]
        rollout = trainer.collector.rollout(episodes)
        record.rewards += trainer.collector.score(rollout).each.tolist()
        del record.completions[-4:]  # `step` scores them again
        trainer.step(episodes)
    return record
