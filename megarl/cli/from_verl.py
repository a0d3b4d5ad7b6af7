"""Prints a megarl configuration for a GRPO recipe of verl's (0.8.0.dev).

CONFIG is a Hydra file (.yaml) of verl's keys, or the script that starts verl.trainer.main_ppo with
key=value words. A file that the script names by --config-path and --config-name is read, too. Each
line says which key it comes from; where the recipe sets none and verl's default is not ours, verl's
is written. A key without a counterpart is refused by name. The last line names the keys that megarl
does not need.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cli import CommandParser
from megarl.config.aliases import aliased
from megarl.config.compose import (
    parse_overrides,
    read_file,
    read_yaml,
    untyped,
    write_commented,
)
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.help import unknown_key
from megarl.config.loader import checked_config
from megarl.config.recipes import GRPOConfig
from megarl.config.schema import key_table
from megarl.config.secrets import leaves

# with what verl's data files hold, and what servers on the trainers' GPUs need
DEFAULTS = """{actor.c_clip: 3.0, actor.optimizer.lr: 1.0e-6, actor.optimizer.beta2: 0.999,
actor.optimizer.warmup_steps: 0, actor.recompute_granularity: full, server.tp: 2,
train_dataset.batch_size: 1024, total_train_epochs: 30, train_dataset.type: chat,
train_dataset.options: &verl {columns: {messages: prompt, answer: reward_model.ground_truth}},
train_dataset.reward: gsm8k, valid_dataset.type: chat, valid_dataset.reward: gsm8k,
valid_dataset.options: *verl, server.type: sglang, weight_sync.type: colocated,
eval_gconfig.max_new_tokens: '${gconfig.max_new_tokens}'}"""
VALUES = {"seq-mean-token-mean": "sequence-mean", "seq-mean-token-sum": "sequence-sum"}
VALUES |= {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "vllm": "sglang", "disable": "disabled"}
# parts of names of keys that megarl does not need, and of keys that mean something else here
NEEDLESS = """critic kl_ctrl use_remove_padding fsdp_config filter_overlong_prompts truncation ref
rollout.mode hydra defaults clip_ratio return_raw_chat hybrid_engine strategy free_cache_engine
enable_chunked_prefill balance_batch val_batch_size use_torch_compile global_profiler load_format
logger use_dynamic_bsz log_prob_micro_batch_size_per_gpu enable_gradient_checkpointing"""
COUNTS = """data.max_prompt_length data.max_response_length data.train_batch_size trainer.nnodes
actor_rollout_ref.actor.ppo_mini_batch_size trainer.n_gpus_per_node
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
actor_rollout_ref.rollout.tensor_model_parallel_size"""
OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer")  # in config, of verl.trainer.main_ppo
# Hydra's options for a file, the short forms too
_NAMED = r"(?<!\S)(?:--config-|-c)(n|p|d)(?:ame|ath|ir)?[= ](\S+)"
REFUSED = "custom_reward_function multi_turn reward_model norm_adv_by_std_in_grpo"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the configuration for the recipe that `argv` names and returns 0. Raises ConfigError
    naming every key without a counterpart."""
    parser = CommandParser("from-verl", __doc__)
    parser.path("CONFIG", "a Hydra file, or a script")
    file, problems = parser.read(argv).config, list[str]()
    if not file.is_file():
        raise ConfigError([f"{file}: no such file; name a Hydra file or a script of verl's"])
    if file.suffix in (".yaml", ".yml"):
        keys = _keys_of(file)
    else:
        try:
            text = file.read_text(encoding="utf-8").replace("$HOME", "${oc.env:HOME}")
            shell = shlex.split(re.sub(r"\\\n|\$@", " ", text), comments=True)
        except ValueError as e:
            raise ConfigError([f"{file}: {e}; write it as a shell reads it"]) from e
        words = [w for w in shell if re.match(r"\+*\w+\.\S+=", w)]
        problems += [f"{w}: write the value itself" for w in words if re.search(r"\$(?!{oc)", w)]
        given = parse_overrides(words, problems)
        keys = _named_file(shell, file.parent) | {name: untyped(value) for _, name, value in given}
    if not (keys or problems):
        raise ConfigError([f"{file}: it has no key of verl's; name a recipe of main_ppo"])
    print(converted(keys, problems))
    return 0


def _keys_of(file: Path) -> dict[str, Any]:
    """Returns the values of a Hydra file by dotted key. Raises ConfigError if it is no YAML, or if
    it builds on a file that is not verl's own."""
    tree = untyped(read_file(file))
    below = tree.get("defaults") or []
    if not isinstance(below, list) or any(b not in (*OWN_FILES, "_self_") for b in below):
        why = f"only {', '.join(OWN_FILES)} and _self_ are known; copy the keys of others into it"
        raise ConfigError([f"{file}: defaults={below}: {why}"])
    return {".".join(map(str, place)): value for place, value in leaves(tree, lists=False)}


def _named_file(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the values of the file that the words of a script in `folder` name by Hydra's
    options; {} for a file of verl's own. Raises ConfigError if there is no such file."""
    named: dict[str, str] = dict(re.findall(_NAMED, " ".join(words)))
    name, place = named.get("n", OWN_FILES[0]), named.get("p", named.get("d", ""))
    name = name.removesuffix(".yaml")
    if name in OWN_FILES and place in ("", "config", "./config"):
        return {}
    files = [at / place / f"{name}.yaml" for at in (folder, Path())]
    for file in files:
        if file.is_file():
            return _keys_of(file)
    why = f"{files[0]}: no such file; name one that is here, or a name of verl's own"
    raise ConfigError([f"--config-path={place} --config-name={name}: {why}"])


def converted(given: Mapping[str, Any], problems: list[str]) -> str:
    """Returns the YAML for these of verl's keys. Raises ConfigError with the problems that are
    known, one for every key without a counterpart, or one for every value that ours cannot have."""
    table, needless, counts = key_table(GRPOConfig), list[str](), COUNTS.split()
    keys = {n: v for n, v in given.items() if v is not None or n not in counts}
    for name in (n for n in keys if n in counts and not re.fullmatch(r"[1-9]\d*", repr(keys[n]))):
        problems.append(f"{name}={keys[name]}: write a whole number of at least 1")
    raise_if_any(problems)
    actor = "actor_rollout_ref.actor."
    length = keys.get("data.max_prompt_length", 512) + keys.get("data.max_response_length", 512)
    batch = keys.get("data.train_batch_size", 1024)
    mini = keys.pop(f"{actor}ppo_mini_batch_size", 256)
    tokens = keys.pop(f"{actor}ppo_micro_batch_size_per_gpu", 0) * length or 16384
    gpus = keys.get("trainer.n_gpus_per_node", 8) * keys.get("trainer.nnodes", 1)
    tp = keys.get("actor_rollout_ref.rollout.tensor_model_parallel_size", 2)
    has_ref, kl = keys.pop(f"{actor}use_kl_loss", False), keys.pop(f"{actor}kl_loss_coef", 0.001)
    rows = [(name, value, "verl's default") for name, value in untyped(read_yaml(DEFAULTS)).items()]
    rows += [
        ("actor.ppo_n_minibatches", batch // mini, "data.train_batch_size / ppo_mini_batch_size"),
        ("actor.mb_spec.max_tokens_per_mb", tokens, "ppo_micro_batch_size_per_gpu, in tokens"),
        ("actor.kl_coef", kl if has_ref else 0.0, "use_kl_loss, kl_loss_coef"),
        ("ref", {"parallel": "${actor.parallel}"} if has_ref else None, "use_kl_loss"),
        ("server.context_length", length, "data.max_prompt_length + max_response_length"),
        ("server.count", gpus // tp, f"on the trainers' GPUs: megarl launch --nproc {gpus}"),
    ]
    if keys.pop("algorithm.adv_estimator", "gae") != "grpo" or batch % mini or gpus % tp:
        why = f"take grpo, {mini} prompts that divide {batch}, {tp} GPUs that divide {gpus}"
        problems.append(f"adv_estimator, ppo_mini_batch_size, tensor_model_parallel_size: {why}")
    for name, value in keys.items():
        parts = {*name.split("."), name.partition(".")[2]}
        ours = (aliased(table, name) or "").partition("=")[0]
        if parts & {*NEEDLESS.split()} or value == -1:
            needless.append(name)
        elif name.endswith("_steps_ratio") and (value == 1 or keys.get(name[:-6], -1) != -1):
            problems.append(f"{name}={value}: write lr_warmup_steps, without a ratio")
        elif ours and not parts & {*REFUSED.split()}:
            value = [value] if ours.endswith(".files") and isinstance(value, str) else value
            rows.append((ours, VALUES.get(str(value), value), name))
        elif value not in (None, False) or name.endswith(".norm_adv_by_std_in_grpo"):
            problems.append(unknown_key(GRPOConfig, name))
    raise_if_any(problems)
    checked_config(text := write_commented(rows), ())
    return f"{text}# not needed: {', '.join(needless)}"
