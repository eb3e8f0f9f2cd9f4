"""What tests/real/test_verl.py runs with the Python of an environment that has verl: reads an export, prints JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
import verl
from hydra import compose, initialize_config_dir
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import normalize_token_ids


def gradient(config, batch: dict[str, list]) -> list:
    """Return the gradient of the actor's loss at the log-probabilities of a batch, from its scores on, as verl's
    trainer computes it. `scores` and `baselines` have one number per completion, the others one per token."""
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in batch.items()}
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    mask = given["mask"]
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)
    rewards = (given["scores"].unsqueeze(1) * mask).masked_fill(~last, 0.0)
    if config.algorithm.use_kl_in_reward:
        kl = core_algos.kl_penalty(given["old"], given["reference"], config.algorithm.kl_penalty)
        rewards = rewards - config.algorithm.kl_ctrl.kl_coef * kl * mask
    common = {"token_level_rewards": rewards, "response_mask": mask}
    if config.algorithm.adv_estimator == "gae":
        discounts = {"gamma": config.algorithm.gamma, "lam": config.algorithm.lam}
        advantages, _ = core_algos.compute_gae_advantage_return(values=given["values"], **common, **discounts)
    else:
        common |= {"index": given["groups"].long().numpy(), "config": config.algorithm}
        if config.algorithm.adv_estimator == "grpo":
            common["norm_adv_by_std_in_grpo"] = config.algorithm.norm_adv_by_std_in_grpo
        if config.algorithm.adv_estimator == "remax":
            common["reward_baselines"] = given["baselines"]
        advantages, _ = core_algos.get_adv_estimator_fn(config.algorithm.adv_estimator)(**common)
    new = given["new"].requires_grad_()
    how = {"loss_agg_mode": actor.loss_agg_mode, "response_mask": mask}
    sizes = {"loss_scale_factor": actor.loss_scale_factor}
    actor.global_batch_info.update(sizes)
    policy_loss = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)
    loss, _ = policy_loss(old_log_prob=given["old"], log_prob=new, advantages=advantages, config=actor, **how)
    if actor.use_kl_loss:
        kl = core_algos.kl_penalty(new, given["reference"], actor.kl_loss_type)
        loss = loss + actor.kl_loss_coef * core_algos.agg_loss(kl, mask, actor.loss_agg_mode, **sizes)
    loss.backward()
    return new.grad.tolist()


def main() -> None:
    """Read the options, completions and a batch from stdin. Print what verl makes of the export."""
    given = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        folder = str(Path(verl.__file__).parent / "trainer" / "config")
        with initialize_config_dir(config_dir=folder, version_base=None):
            config = compose(config_name="ppo_trainer", overrides=given["options"])
        config.actor_rollout_ref.rollout.name = "sglang"  # with vllm, the rank of LoRA is compared with vLLM's limit
        validate_config(config, need_reference_policy(config), need_critic(config))
        found = {"gradient": gradient(config, given["batch"])} if "batch" in given else {}
        found |= {"critic": need_critic(config), "reference": need_reference_policy(config)}
        tokenizer = omega_conf_to_dataclass(config.actor_rollout_ref.model).tokenizer
        kwargs = config.data.apply_chat_template_kwargs
        for name in ("train", "val"):
            rows = RLHFDataset(config.data[f"{name}_files"], tokenizer, config.data)
            chats = [rows[i]["raw_prompt"] for i in range(len(rows))]
            found[name] = [
                normalize_token_ids(tokenizer.apply_chat_template(chat, add_generation_prompt=True, **kwargs))
                for chat in chats
            ]
        score = get_custom_reward_fn(config)
        found["scores"] = [
            score(
                data_source=row["data_source"],
                solution_str=text,
                ground_truth=row["reward_model"]["ground_truth"],
                extra_info=row["extra_info"],
            )
            for row, text in zip(rows if score else (), given["completions"], strict=False)
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
