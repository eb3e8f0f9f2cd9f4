"""PPO and GRPO for a language model in one file: plain PyTorch and transformers, nothing of `rlhf`.

    python examples/tiny_ppo.py                     # PPO, about a minute on two CPU cores
    python examples/tiny_ppo.py --algorithm grpo

The demo's start model, a Llama with 1M weights, learns to answer "Which of these is a fruit: goat, plum, hammer?". The
mean score rises from about 0.5 to above 0.9. `main` is the training loop. Read `update` next: it is the algorithm.
B is the number of completions, P the number of prompt tokens, T the number of completion tokens.

`update` changes the weights as the library does: tests/examples/test_tiny_ppo.py gives both the same completions,
scores and minibatches. The library's settings are then those of its recipe `demo` with --kl-schedule fixed and
--lr-schedule constant:
- --learning-rate 3e-4, AdamW without weight decay, --max-grad-norm 1, weights in float32, no dropout, no LoRA;
- 64 completions per update (GRPO: 16 prompts, --K 4), --ppo-epochs 2, --minibatches 4, --temperature 1;
- --clip-range 0.2, --kl-coef 0.03, --kl-placement reward, no entropy bonus, scores as the reward function returns them;
- PPO: --critic shared, --gamma 1, --lam 0.95, --value-coef 0.1, --value-clip-range 0.2, --kl-penalty-at token,
  whitened advantages, rewards that are not whitened;
- GRPO: --loss-type dapo, --scale-rewards none.
The numbers of details below are those of docs/how_it_works.md. It also lists the checks and options that are not here.
"""

import argparse
import copy
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

START_MODEL = Path(__file__).resolve().parents[1] / "rlhf" / "demo" / "weights"
COMPLETIONS, GROUP = 64, {"ppo": 1, "grpo": 4}  # completions per update, and of these per prompt
EPOCHS, MINIBATCHES = 2, 4  # 2 passes over the completions, each with 4 optimizer steps
LENGTH, TEMPERATURE = 32, 1.0  # of sampling
LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0
CLIP, BETA = 0.2, 0.03  # range of the ratio; cost of one nat of KL, in units of the score
GAMMA, LAMBDA = 1.0, 0.95  # of GAE
VALUE_COEF, VALUE_CLIP = 0.1, 0.2

KINDS = {
    "an animal": ["ant", "bee", "frog", "rat", "cat", "fox", "goat", "pig", "horse", "whale"],
    "a fruit": ["apple", "cherry", "fig", "grape", "lemon", "mango", "melon", "peach", "pear", "plum"],
    "a tool": ["axe", "drill", "file", "hammer", "ladder", "pliers", "rake", "saw", "shovel", "wrench"],
    "a vehicle": ["bike", "boat", "bus", "car", "plane", "scooter", "ship", "tractor", "train", "truck"],
}


def ask(rng: random.Random) -> tuple[str, str, str]:
    """Returns a question, the noun that answers it, and the noun's kind."""
    kinds = rng.sample(sorted(KINDS), 3)
    nouns, wanted = [rng.choice(KINDS[kind]) for kind in kinds], rng.randrange(3)
    return f"Which of these is {kinds[wanted]}: {', '.join(nouns)}?", nouns[wanted], kinds[wanted]


def score(completion: str, noun: str, kind: str) -> float:
    """Returns 1 for the right noun in a complete sentence, 0.5 for the right noun alone, otherwise 0."""
    # A rule that a program can check. A reward model would return a number here, too; nothing else would change.
    named = set(re.findall(r"\w+", completion.lower())) & {word for words in KINDS.values() for word in words}
    if named != {noun}:
        return 0.0  # also if it names two nouns: otherwise the policy learns to list all three
    return 1.0 if re.fullmatch(rf"(The )?{noun} is {kind}\.", completion, re.IGNORECASE) else 0.5


class Rollout(NamedTuple):
    """Sampled completions."""

    prompt_ids: Tensor  # (B, P) padded on the left, so that all completions start in the same column
    prompt_mask: Tensor  # (B, P) 1 for tokens, 0 for padding
    completion_ids: Tensor  # (B, T) padded on the right
    mask: Tensor  # (B, T) True for completion tokens, EOS included: the policy must learn to stop

    def rows(self, rows: Tensor) -> "Rollout":
        return Rollout(*(field[rows] for field in self))


class Policy(nn.Module):
    """A language model and a critic: one backbone with two heads."""

    def __init__(self, folder: str | Path):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # The critic: one value per token. It starts at 0, otherwise the first advantages are noise (detail 23).
        self.value_head = nn.Linear(self.model.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Returns the log-probability in nats of every completion token, and the value before it, both (B, T)."""
        ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], 1)
        attention = torch.cat([rollout.prompt_mask, rollout.mask.long()], 1)
        # Positions count tokens, not padding. Otherwise the padding of others would change a completion (detail 5).
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        states = self.model.base_model(ids, attention_mask=attention, position_ids=positions).last_hidden_state
        states = states[:, rollout.prompt_ids.shape[1] - 1 : -1]  # the state before a token predicts this token
        # The temperature belongs to the policy. Without it, the ratio would be that of another policy (detail 7).
        logits = self.model.get_output_embeddings()(states) / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1)
        return logprobs, self.value_head(states).squeeze(-1)


@torch.no_grad()
def sample(policy: Policy, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> Rollout:
    """Samples one completion for each question."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    # top_k=0, top_p=1: generate's default, the 50 most likely tokens, is not the policy whose log-probs are computed.
    ids = policy.model.generate(
        prompts.input_ids, attention_mask=prompts.attention_mask, max_new_tokens=LENGTH, do_sample=True,
        temperature=TEMPERATURE, top_k=0, top_p=1.0, pad_token_id=tokenizer.pad_token_id,
    )[:, prompts.input_ids.shape[1] :]  # fmt: skip
    is_eos = (ids == tokenizer.eos_token_id).long()
    # True up to the first EOS. A mask "is not the pad token" would hide EOS if both are the same token (detail 1).
    return Rollout(prompts.input_ids, prompts.attention_mask, ids, is_eos.cumsum(1) - is_eos == 0)


def ppo_advantages(kl: Tensor, scores: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns whitened advantages, and the returns that the critic learns, both (B, T). kl and values are (B, T)."""
    # One reward per token: r_t = -beta * KL_t, and the score at EOS (Ziegler et al. 2019, arXiv 1909.08593, eq. 2).
    # Without the KL, the policy drifts to any text that the score likes (reward hacking).
    rewards = -BETA * kl
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] += scores  # detail 19
    # GAE (Schulman et al. 2016, arXiv 1506.02438, eq. 16), from the last token to the first. gamma is 1: a completion
    # is short, and an answer at its end is worth as much. After the end, the value is 0 (detail 24).
    values = values * mask
    advantages, next_advantage, next_value = torch.zeros_like(values), torch.zeros(len(mask)), torch.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]  # the reward that the critic did not expect
        next_advantage, next_value = delta + GAMMA * LAMBDA * next_advantage, values[:, t]
        advantages[:, t] = next_advantage
    returns = advantages + values
    # Whitening over all tokens of the update: the size of a step does not depend on the scale of the score (detail 25).
    tokens = advantages[mask]
    return (advantages - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8) * mask, returns


def grpo_advantages(kl: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """Returns advantages (B, T), the same for all tokens of a completion. Completions of one prompt are neighbours."""
    # No critic: the mean of the group is the baseline (Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2). The paper also
    # divides by the group's standard deviation. That favours groups with nearly equal scores (Liu et al. 2025, arXiv
    # 2503.20783), so it is left out here (detail 26).
    rewards = (scores - BETA * kl.sum(1)).view(-1, GROUP["grpo"])
    return (rewards - rewards.mean(1, keepdim=True)).view(-1, 1) * mask


def update(
    policy: Policy,
    reference: Policy,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    scores: Tensor,
    algorithm: str,
    orders: Sequence[Tensor],
) -> float:
    """Takes the optimizer steps of one update. Returns the KL to the reference, in nats per completion.

    `scores` are (B,). `orders` has one permutation (B,) for each epoch: the order of the completions (detail 33).
    """
    mask = rollout.mask
    with torch.no_grad():  # the policy that sampled: its log-probs and values stay fixed during the optimizer steps
        old_logprobs, old_values = policy(rollout)
        kl = (old_logprobs - reference(rollout)[0]) * mask  # the estimate k1 (Schulman 2020): log p - log q, per token
    if algorithm == "ppo":
        advantages, returns = ppo_advantages(kl, scores, old_values, mask)
    else:
        advantages = grpo_advantages(kl, scores, mask)
    for rows in [rows for order in orders for rows in order.chunk(MINIBATCHES)]:
        logprobs, values = policy(rollout.rows(rows))
        tokens = mask[rows].sum() if algorithm == "ppo" else mask.sum() / MINIBATCHES  # GRPO: DAPO's divisor, detail 29
        # The clipped loss (Schulman et al. 2017, arXiv 1707.06347, eq. 7). A token whose probability already changed by
        # more than 20% in the wanted direction has no gradient. Without the clip, 8 steps on old samples go too far.
        ratio = ((logprobs - old_logprobs[rows]) * mask[rows]).exp()
        costs = -advantages[rows]
        loss = (torch.max(costs * ratio, costs * ratio.clamp(1 - CLIP, 1 + CLIP)) * mask[rows]).sum() / tokens
        if algorithm == "ppo":  # half the squared error, with values clipped in the same way (detail 27)
            clipped = old_values[rows] + (values - old_values[rows]).clamp(-VALUE_CLIP, VALUE_CLIP)
            errors = torch.max((values - returns[rows]) ** 2, (clipped - returns[rows]) ** 2)
            loss = loss + VALUE_COEF * 0.5 * (errors * mask[rows]).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)  # one bad batch must not undo the run (detail 34)
        optimizer.step()
    return float(kl.sum(1).mean())


def make_optimizer(policy: Policy) -> torch.optim.Optimizer:
    # torch's default weight decay of 0.01 would pull the weights to 0, away from the start model (detail 35)
    return torch.optim.AdamW(policy.parameters(), LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, and prints one line per update. Returns the mean score of each update."""
    parser = argparse.ArgumentParser(description="PPO and GRPO in plain PyTorch")
    parser.add_argument("--algorithm", choices=sorted(GROUP), default="ppo")
    parser.add_argument("--model", default=START_MODEL, help="folder of a causal LM with a chat template")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    rng, group, means = random.Random(args.seed), GROUP[args.algorithm], []
    policy, tokenizer = Policy(args.model).eval(), AutoTokenizer.from_pretrained(args.model)  # eval: no dropout
    reference = copy.deepcopy(policy).requires_grad_(False)  # frozen: the KL is measured from the start model
    optimizer = make_optimizer(policy)
    for number in range(1, args.updates + 1):
        tasks = [task for task in [ask(rng) for _ in range(COMPLETIONS // group)] for _ in range(group)]
        rollout = sample(policy, tokenizer, [question for question, _, _ in tasks])
        texts = tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
        scores = torch.tensor([score(text, noun, kind) for text, (_, noun, kind) in zip(texts, tasks, strict=True)])
        orders = [torch.randperm(COMPLETIONS) for _ in range(EPOCHS)]
        kl = update(policy, reference, optimizer, rollout, scores, args.algorithm, orders)
        means.append(float(scores.mean()))
        print(f"update {number:3} | score {means[-1]:.2f} | KL {kl:5.2f} | {tasks[0][0]} {texts[0]}", flush=True)
    return means


if __name__ == "__main__":
    main()
