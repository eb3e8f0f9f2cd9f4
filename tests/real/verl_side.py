"""What tests/real/test_verl.py runs with the Python of an environment that has verl: reads an export, prints JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import verl
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import normalize_token_ids


def main() -> None:
    """Read the options and a list of completions from stdin. Print what verl makes of the export."""
    given = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        folder = str(Path(verl.__file__).parent / "trainer" / "config")
        with initialize_config_dir(config_dir=folder, version_base=None):
            config = compose(config_name="ppo_trainer", overrides=given["options"])
        config.actor_rollout_ref.rollout.name = "sglang"  # with vllm, the rank of LoRA is compared with vLLM's limit
        validate_config(config, need_reference_policy(config), need_critic(config))
        found = {"critic": need_critic(config), "reference": need_reference_policy(config)}
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
