"""Prints a megarl configuration for a GRPO configuration of AReaL's (arealite, July 2025).

CONFIG is a YAML file of AReaL's GRPOConfig. Words of the form key=value are AReaL's keys, too, and
win over the file. The comment of each line names the key that it comes from. If the file sets no
key and AReaL's default is not ours, AReaL's default is written. A key without a counterpart is
refused by name. The last line names the keys that megarl does not need.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarl.cli import CommandParser
from megarl.cli.convert import converted, flag, followed, keys_of
from megarl.config.compose import Commented, parse_overrides, untyped
from megarl.config.errors import ConfigError
from megarl.config.schema import show

# actor.group_reward_norm, actor.adv_norm -> our actor.adv_norm
_NORMS = {(False, True): "batch", (True, False): "group", (False, False): "none"}
_DATA = ("train_dataset", "valid_dataset")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the configuration for the file that `argv` names and returns 0. Raises ConfigError
    naming every key without a counterpart."""
    parser = CommandParser("from-areal", __doc__)
    parser.path("CONFIG", "a YAML file of AReaL's GRPOConfig")
    parser.keys()
    args, problems = parser.read(argv), list[str]()
    given = parse_overrides(args.keys, problems)
    keys = keys_of(args.config) | {name: untyped(value) for _, name, value in given}
    if not any(name.startswith("actor.") for name in keys):
        raise ConfigError(f"{args.config}: it has no section actor; name a file of GRPOConfig")
    keys = followed(keys)
    rows = _policy(keys, problems) + _datasets(keys, problems)
    print(converted("AReaL", keys, rows, problems))
    return 0


def _policy(keys: dict[str, Any], problems: list[str]) -> list[Commented]:
    """Returns the rows of the keys that AReaL reads together, which leave `keys`."""
    staleness = keys.pop("rollout.max_head_offpolicyness", 0)
    if not flag(keys, "async_training", True, problems):
        staleness = 0
    by_group = flag(keys, "actor.group_reward_norm", False, problems)
    norm = by_group, flag(keys, "actor.adv_norm", True, problems)
    if norm not in _NORMS:
        why = "rewards are normalized once; set one of them to false"
        shown = f"actor.group_reward_norm={show(norm[0])}, actor.adv_norm={show(norm[1])}"
        problems.append(f"{shown}: {why}")
    for name in ("actor.discount", "actor.gae_lambda"):
        if (value := keys.pop(name, 1.0)) != 1:
            problems.append(f"{name}={value}: GRPO discounts nothing; set it to 1")
    warmup = "actor.optimizer.warmup_steps_proportion"
    share = keys.get(warmup, 0)
    if not isinstance(share, int | float) or not 0 <= share < 1:  # our 1 is one step
        problems.append(f"{warmup}={show(share)}: write a fraction below 1")
    # the script makes a reference only for this penalty
    kl = keys.pop("actor.kl_ctl", 0.1)
    decoupled = flag(keys, "actor.use_decoupled_loss", False, problems)
    cap = keys.pop("actor.behav_imp_weight_cap", None)
    recomputed = flag(keys, "actor.recompute_logprob", False, problems) or decoupled
    correction = {"weight": "token"} | ({"mask": "token", "mask_high": cap} if cap else {})
    rows: list[Commented] = [
        ("rollout.max_head_offpolicyness", staleness, "async_training, max_head_offpolicyness"),
        ("actor.adv_norm", _NORMS.get(norm), "actor.adv_norm, group_reward_norm"),
        ("kl_ctl", kl, "actor.kl_ctl"),
        ("actor.correction", correction if decoupled else None, "use_decoupled_loss, its cap"),
        ("actor.recompute_logprob", "auto" if recomputed else "false", "recompute_logprob"),
    ]
    if not kl:
        rows.append(("ref", None, "actor.kl_ctl=0"))
    mode = str(keys.pop("allocation_mode", ""))
    mode = re.sub(r"vllm(?=[.:])", "sglang", re.sub(r"(fsdp|archon)(?=[.:])", "megatron", mode))
    sync = "colocated" if "|" in mode else "distributed"
    return [*rows, ("allocation_mode", mode, "the same"), ("weight_sync.type", sync, "its sign")]


def _datasets(keys: dict[str, Any], problems: list[str]) -> list[Commented]:
    """Returns the rows of the data, which AReaL's scripts read and score. Leaves in `keys` what the
    table maps."""
    rows: list[Commented] = []
    path = keys.get("train_dataset.path")
    if path is None:
        why = "the script names the data; add a word such as train_dataset.path=openai/gsm8k"
        problems.append(f"train_dataset.path: {why}")
    for section, split in zip(_DATA, ("train", "test"), strict=True):
        if not any(name.startswith(f"{section}.") for name in keys):
            continue
        keys.pop(f"{section}.type", None)
        path = keys.setdefault(f"{section}.path", path)
        if path is not None and "gsm8k" not in str(path):
            why = "only the scripts' GSM8K is converted; take its path, and write yours by hand"
            problems.append(f"{section}.path={path}: {why}")
        rows += [
            (f"{section}.type", "gsm8k", "the script's data and reward"),
            (f"{section}.split", split, "the script's"),
            (f"{section}.options.instruction", "", "the script adds none"),
            (f"{section}.options.chat_template_kwargs", {"enable_thinking": False}, "the script's"),
        ]
    return rows
