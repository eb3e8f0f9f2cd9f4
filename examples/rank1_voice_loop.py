"""Train with the step of "rank-1 voice PPO", a reference system written for TRL's first PPOTrainer (before 0.12).

    python examples/rank1_voice_loop.py SFT_MODEL REWARD_MODEL prompts.jsonl --updates 500 --output ./voice

`create_ppo_trainer` and `train_step` make the calls of its document, in its order: tokenize, generate, decode, score,
step. Comments that begin with "Here" name what differs. Each line of the file is {"prompt": ..., "topic": ...}.
docs/reference_systems.md has the arguments of the document's constructor beside ours.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf import make_config, make_trainer

BATCH_SIZE = 4
STEPS_PER_TOPIC = 50


class RewardModel:
    """A sequence classifier with one output, and the document's call: score(prompt, response)."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.no_grad()
    def score(self, prompt, response):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        inputs = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return self.model(**inputs).logits.item()


def create_ppo_trainer(sft_model, reward_model, rows, held_out, updates, output=None, resume=False):
    """Create PPO trainer with Rank-1 LoRA."""
    config = make_config(
        algorithm="ppo",  # Here PPO adds the value head to the model, and the tokenizer is the model's
        actor_model=str(sft_model),
        use_lora=True,
        lora_r=1,
        lora_alpha=1.0,
        lora_targets=["o_proj", "v_proj", "up_proj", "down_proj"],
        learning_rate=1.41e-5,
        lr_schedule="constant",
        batch_size=BATCH_SIZE,
        minibatches=1,
        ppo_epochs=4,
        cliprange=0.2,
        init_kl_coef=0.2,
        target_kl=6.0,  # Here without a unit only beside `init_kl_coef`: it is then 6 nats per sequence, as in TRL
        kl_schedule="adaptive",
        temperature=1.0,
        num_iterations=updates,  # Here the trainer needs the length of the run, for the learning rate and beta
        rm_model=None,
        resume=resume,
    )

    def voice(prompts, completions, **_):
        return [reward_model.score(p, c) for p, c in zip(prompts, completions, strict=True)]

    # Here evaluations call `voice`, on rows that training does not use
    trainer = make_trainer(config, rows, rewards=[voice], evaluation_prompts=held_out, output=output)
    return trainer, reward_model


def tokenize(trainer, prompts):
    """Return one list of ids per prompt. The document's are tensors."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    template = trainer.processing_class.apply_chat_template
    return [template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def decode(episodes):
    return [episode.text for episode in episodes]


def train_step(trainer, reward_model, prompts):
    """Single PPO training step."""
    # Generate responses
    query_tensors = tokenize(trainer, prompts)
    response_tensors = trainer.generate(query_tensors)  # Here a response is an episode, which contains its query

    # Get rewards
    responses = decode(response_tensors)
    rewards = [reward_model.score(p, r) for p, r in zip(prompts, responses, strict=True)]

    # PPO update
    stats = trainer.step(response_tensors, rewards)  # Here without `query_tensors`
    return stats


def prompts_of(rows, update):
    """Return the prompts of an update, one topic after another. They depend on the number of the update only, so a
    resumed loop continues with the next ones."""
    topics = list(dict.fromkeys(row["topic"] for row in rows))
    block, step = divmod(update, STEPS_PER_TOPIC)
    own = [row["prompt"] for row in rows if row["topic"] == topics[block % len(topics)]]
    first = (block // len(topics) * STEPS_PER_TOPIC + step) * BATCH_SIZE
    return [own[number % len(own)] for number in range(first, first + BATCH_SIZE)]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sft_model")
    parser.add_argument("reward_model")
    parser.add_argument("prompts")
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--output", help="run folder; without it nothing is written")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
    given = parser.parse_args(words)
    rows = [json.loads(line) for line in Path(given.prompts).read_text(encoding="utf-8").splitlines()]
    held_out, rows = rows[::10], [row for number, row in enumerate(rows) if number % 10]
    trainer, reward_model = create_ppo_trainer(
        given.sft_model, RewardModel(given.reward_model), rows, held_out, given.updates, given.output, given.resume
    )
    trainer.begin()  # evaluates the start model, or resumes
    while trainer.update < trainer.updates:
        stats = train_step(trainer, reward_model, prompts_of(rows, trainer.update))
        print(trainer.update, stats.get("rewards/mean"))
        trainer.after_step()  # evaluates and saves, if that is due
    trainer.finish()
    return trainer


if __name__ == "__main__":
    main()
