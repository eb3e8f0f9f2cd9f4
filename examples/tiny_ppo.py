"""PPO and GRPO for a language model in one file: plain PyTorch and transformers, no import of `rlhf`.

    python examples/tiny_ppo.py                     # PPO, about a minute on one CPU core
    python examples/tiny_ppo.py --algorithm grpo

The demo's start model, a Llama with 1M weights, learns to answer "Which of these is a fruit: goat, plum, hammer?".
The mean score rises from about 0.55 to about 0.9. `main` is the training loop, `update` the algorithm.

Given the same completions and scores, the library's weights after an update are equal within 1e-6 in float64. In
float32, AdamW amplifies rounding errors, and up to 1 in 10,000 weights differ by more (tests/examples). The library's
settings are then those of its recipe `demo` with --kl-schedule fixed, --lr-schedule constant and another reward:
- the constants below; all weights are trained, in float32, without dropout, with --optim adamw and --weight-decay 0;
- --top-k 0, --top-p 1, --kl-placement reward, --entropy-coef 0, --missing-eos-penalty 0, no --normalize-scores;
- PPO: --critic shared, --kl-penalty-at token, --whiten-advantages, no --whiten-rewards, --critic-warmup 0;
- GRPO: --loss-type dapo, --scale-rewards none.
The numbers of details are those of docs/how_it_works.md, which also lists the checks and options that are not here.
"""

import argparse
import copy
import random
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

START_MODEL = Path(__file__).resolve().parents[1] / "rlhf" / "demo" / "weights"
COMPLETIONS, GROUP = 64, {"ppo": 1, "grpo": 4}  # completions per update, completions per prompt
EPOCHS, MINIBATCHES = 2, 4  # 2 passes over the completions, each with 4 optimizer steps
LENGTH, TEMPERATURE = 32, 1.0  # the largest number of tokens in a completion, the temperature of sampling
LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0
CLIP, BETA = 0.2, 0.03  # range of the ratio around 1, cost of one nat of KL in units of the score
GAMMA, LAMBDA, VALUE_COEF, VALUE_CLIP = 1.0, 0.95, 0.1, 0.2  # of GAE; weight and clip range of the critic's loss

KINDS = {
    "an animal": ["ant", "bee", "frog", "rat", "cat", "fox", "goat", "pig", "horse", "whale"],
    "a fruit": ["apple", "cherry", "fig", "grape", "lemon", "mango", "melon", "peach", "pear", "plum"],
    "a tool": ["axe", "drill", "file", "hammer", "ladder", "pliers", "rake", "saw", "shovel", "wrench"],
    "a vehicle": ["bike", "boat", "bus", "car", "plane", "scooter", "ship", "tractor", "train", "truck"],
}


def ask(rng: random.Random) -> tuple[str, str, str]:
    """Return a question, the noun that answers it, and the noun's kind."""
    kinds = rng.sample(sorted(KINDS), 3)
    nouns, right = [rng.choice(KINDS[kind]) for kind in kinds], rng.randrange(3)
    return f"Which of these is {kinds[right]}: {', '.join(nouns)}?", nouns[right], kinds[right]


def score(completion: str, noun: str, kind: str) -> float:
    """Return 1 for a right and complete sentence, 0.5 for the right noun, otherwise 0. Or use a reward model here."""
    named = set(re.findall(r"\w+", completion.lower())) & {word for words in KINDS.values() for word in words}
    if named != {noun}:
        return 0.0  # also if it names a second noun: otherwise the policy learns to list all three
    return 1.0 if re.fullmatch(rf"(The )?{noun} is {kind}\.", completion, re.IGNORECASE) else 0.5


class Rollout(NamedTuple):
    """B sampled completions of T tokens, after prompts of P tokens."""

    prompt_ids: Tensor  # (B, P) padded on the left, so that all completions start in the same column
    prompt_mask: Tensor  # (B, P) 1 for tokens, 0 for padding
    completion_ids: Tensor  # (B, T) padded on the right
    mask: Tensor  # (B, T) True for completion tokens, EOS included: otherwise the policy never learns to stop


class Policy(nn.Module):
    """The policy and the critic: a language model, and a value head on its hidden states (detail 22)."""

    def __init__(self, folder: str | Path):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.value_head = nn.Linear(self.model.config.hidden_size, 1)
        for weight in self.value_head.parameters():
            nn.init.zeros_(weight)  # with random weights, the first advantages would be noise (detail 23)

    def forward(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each completion token in nats, and the value before it, both (B, T)."""
        ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], 1)
        attention = torch.cat([rollout.prompt_mask, rollout.mask.long()], 1)
        # Positions count tokens, not padding. Otherwise a longer prompt in the batch changes the result (detail 5).
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        states = self.model.base_model(ids, attention_mask=attention, position_ids=positions).last_hidden_state
        states = states[:, rollout.prompt_ids.shape[1] - 1 : -1]  # the state before a token predicts this token
        # Tokens are sampled at this temperature. Without it, these are log-probs of another policy (detail 7).
        logits = self.model.get_output_embeddings()(states) / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(-1, rollout.completion_ids.unsqueeze(-1)).squeeze(-1)
        return logprobs, self.value_head(states).squeeze(-1)


@torch.no_grad()
def sample(policy: Policy, tokenizer: PreTrainedTokenizerBase, questions: list[str]) -> Rollout:
    """Samples one completion for each question."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    # By default, generate samples only from the 50 likeliest tokens. `forward` has no such limit (detail 8).
    ids = policy.model.generate(
        **prompts, max_new_tokens=LENGTH, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0
    )[:, prompts.input_ids.shape[1] :]
    # The mask ends with the first EOS. "Not the pad token" would exclude EOS in models with pad = EOS (detail 1).
    is_eos = (ids == tokenizer.eos_token_id).long()
    return Rollout(prompts.input_ids, prompts.attention_mask, ids, is_eos.cumsum(1) - is_eos == 0)


def ppo_advantages(kl: Tensor, scores: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return whitened advantages and the critic's targets, both (B, T), from KL and values (B, T), scores (B,)."""
    # r_t = -beta * KL_t, and the score at EOS (Ziegler et al. 2019, arXiv 1909.08593, eq. 2; detail 19). Without the
    # KL, the policy moves to any text with a high score, also if it is no longer language.
    rewards = -BETA * kl
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] += scores
    # GAE (Schulman et al. 2016, arXiv 1506.02438, eq. 16), from the last token to the first. With gamma below 1, early
    # tokens would get less of the score than late ones. After EOS the value is 0 (detail 24).
    values, advantages = values * mask, torch.zeros_like(values)
    advantage = value = torch.zeros(len(mask))  # of the next token
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + GAMMA * value - values[:, t]  # the part of the reward that the critic did not predict
        advantage, value = delta + GAMMA * LAMBDA * advantage, values[:, t]
        advantages[:, t] = advantage
    # Whitening, over all tokens of the update: the step size no longer depends on the unit of the score (detail 25).
    whitened = (advantages - advantages[mask].mean()) * torch.rsqrt(advantages[mask].var() + 1e-8)
    return whitened * mask, advantages + values


def grpo_advantages(kl: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """Return one advantage per completion, for each of its tokens (B, T). Completions of a prompt are neighbours."""
    # No critic: the baseline is the mean of the group (Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2). Its
    # division by the group's standard deviation favours groups with nearly equal scores (arXiv 2503.20783; detail 26).
    rewards = (scores - BETA * kl.sum(1)).view(-1, GROUP["grpo"])
    return (rewards - rewards.mean(1, keepdim=True)).view(-1, 1) * mask


def make_optimizer(policy: Policy) -> torch.optim.Optimizer:
    """Return AdamW. torch's default weight decay, 0.01, would move the weights to 0 in every step (detail 35)."""
    return torch.optim.AdamW(policy.parameters(), LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


def update(
    algorithm: str, policy: Policy, reference: Policy, optimizer: torch.optim.Optimizer, rollout: Rollout,
    scores: Tensor, orders: list[Tensor],
) -> float:  # fmt: skip
    """Takes the optimizer steps of one update, from scores (B,). Returns the KL to the reference, nats/completion."""
    mask = rollout.mask
    with torch.no_grad():  # of the policy that sampled: these numbers stay the same during the optimizer steps
        old_logprobs, old_values = policy(rollout)
        kl = (old_logprobs - reference(rollout)[0]) * mask  # log p - log q, the estimate k1 (Schulman 2020)
    if algorithm == "ppo":
        advantages, targets = ppo_advantages(kl, scores, old_values, mask)
    else:
        advantages = grpo_advantages(kl, scores, mask)
    for rows in [rows for order in orders for rows in order.chunk(MINIBATCHES)]:  # a new order in each pass: detail 33
        logprobs, values = policy(Rollout(*(field[rows] for field in rollout)))
        # PPO: the mean over tokens. GRPO: every minibatch has the same divisor (DAPO, arXiv 2503.14476; detail 29).
        tokens = mask[rows].sum() if algorithm == "ppo" else mask.sum() / MINIBATCHES
        # The clipped loss (Schulman et al. 2017, arXiv 1707.06347, eq. 7). A token whose probability has moved by 20%
        # in the wanted direction gets no gradient. Without this limit, 8 steps on the same completions go too far.
        ratio = ((logprobs - old_logprobs[rows]) * mask[rows]).exp()
        unclipped, clipped = -advantages[rows] * ratio, -advantages[rows] * ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = (torch.max(unclipped, clipped) * mask[rows]).sum() / tokens
        if algorithm == "ppo":  # half the squared error, with the values clipped around the old ones (detail 27)
            limited = values.clamp(old_values[rows] - VALUE_CLIP, old_values[rows] + VALUE_CLIP)
            errors = torch.max((values - targets[rows]).square(), (limited - targets[rows]).square())
            loss = loss + VALUE_COEF * 0.5 * (errors * mask[rows]).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)  # limits the step of a bad minibatch (detail 34)
        optimizer.step()
    return float(kl.sum(1).mean())


def main(argv: list[str] | None = None) -> list[float]:
    """Trains, and prints one line per update. Returns the mean score of each update."""
    parser = argparse.ArgumentParser(description="PPO and GRPO in plain PyTorch and transformers")
    parser.add_argument("--algorithm", choices=sorted(GROUP), default="ppo")
    parser.add_argument("--model", default=START_MODEL, help="folder of a causal LM with chat template and pad token")
    parser.add_argument("--updates", type=int, default=40)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # with a model this small, threads wait for each other
    torch.manual_seed(42)
    rng, group, means = random.Random(42), GROUP[args.algorithm], []
    # eval(), also during the optimizer steps: with dropout, the first ratio would not be 1 (detail 37)
    policy, tokenizer = Policy(args.model).eval(), AutoTokenizer.from_pretrained(args.model)
    reference, optimizer = copy.deepcopy(policy).requires_grad_(False), make_optimizer(policy)
    for number in range(1, args.updates + 1):
        tasks = [task for task in [ask(rng) for _ in range(COMPLETIONS // group)] for _ in range(group)]
        rollout = sample(policy, tokenizer, [question for question, _, _ in tasks])
        texts = tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
        scores = torch.tensor([score(text, noun, kind) for text, (_, noun, kind) in zip(texts, tasks, strict=True)])
        orders = [torch.randperm(COMPLETIONS) for _ in range(EPOCHS)]
        kl = update(args.algorithm, policy, reference, optimizer, rollout, scores, orders)
        means.append(float(scores.mean()))
        print(f"update {number:2} | score {means[-1]:.2f} | KL {kl:5.2f} | {tasks[0][0]} {texts[0]}", flush=True)
    return means


if __name__ == "__main__":
    main()
