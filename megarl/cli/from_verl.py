"""Prints a megarl configuration for a GRPO recipe of verl's (0.8.0.dev).

CONFIG is a Hydra file (.yaml) of verl's keys, or the script that starts verl.trainer.main_ppo with
key=value words. A file that the script names by --config-path and --config-name is read, too. The
comment of each line names the key that it comes from. If the recipe sets no key and verl's default
is not ours, verl's default is written. A key without a counterpart is refused by name. The last
line names the keys that megarl does not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cli import CommandParser
from megarl.cli.convert import converted, flag, followed, keys_of
from megarl.cli.shell import KEY, command_words
from megarl.config.aliases import foreign_tables
from megarl.config.compose import Commented, parse_overrides, untyped
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.presets import PRESETS
from megarl.config.schema import show

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_TURNS, _VALIDATION = f"{_ROLLOUT}multi_turn.", f"{_ROLLOUT}val_kwargs."
_WORKFLOW = "megarl.rollout.workflows.tool:ToolWorkflow"
_MINI, _TP = f"{_ACTOR}ppo_mini_batch_size", f"{_ROLLOUT}tensor_model_parallel_size"
# numbers that the conversion computes with -> verl's default
COUNTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    _MINI: 256,
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": 0,
    _TP: 2,
}
SECTIONS = {"actor_rollout_ref", "algorithm", "data", "trainer"}
OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer")  # in config, of verl.trainer.main_ppo
# Hydra's options for a file, the short forms too
_NAMED = r"(?<!\S)(?:--config-|-c)(n|p|d)(?:ame|ath|ir)?[= ](\S+)"
_CHAT, _MODEL = "data.apply_chat_template_kwargs.", "actor_rollout_ref.model."


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the configuration for the recipe that `argv` names and returns 0. Raises ConfigError
    naming every key without a counterpart."""
    parser = CommandParser("from-verl", __doc__)
    parser.path("CONFIG", "a Hydra file, or a script")
    file, problems = parser.read(argv).config, list[str]()
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; name a Hydra file or a script of verl's")
    if file.suffix in (".yaml", ".yml"):
        keys = _keys_of(file)
    else:
        shell = command_words(file, "verl.trainer.main_ppo")
        words = [word for word in shell if KEY.match(word)]
        problems += [f"{w}: write the value itself" for w in words if re.search(r"\$(?!{oc)", w)]
        given = parse_overrides(words, problems)
        keys = {} if problems else _named_file(shell, file.parent)
        keys |= {name: untyped(value) for _, name, value in given}
    if SECTIONS.isdisjoint(name.partition(".")[0] for name in keys):
        raise ConfigError(f"{file}: it has no key of verl's; name a recipe of main_ppo")
    print(_converted(followed(keys), problems))
    return 0


def _keys_of(file: Path) -> dict[str, Any]:
    """Returns the values of a Hydra file by dotted key. Raises ConfigError if it is no YAML, or if
    it builds on a file that is not verl's own."""
    keys = keys_of(file)
    below = keys.get("defaults") or []
    if not isinstance(below, list) or any(b not in (*OWN_FILES, "_self_") for b in below):
        why = f"only {', '.join(OWN_FILES)} and _self_ are known; copy the keys of others into it"
        raise ConfigError(f"{file}: defaults={below}: {why}")
    return keys


def _named_file(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the values of the file that the words of a script in `folder` name by Hydra's
    options; {} for a file of verl's own. Raises ConfigError if there is no such file."""
    named: dict[str, str] = dict(re.findall(_NAMED, " ".join(words)))
    name, place = named.get("n", OWN_FILES[0]), named.get("p", named.get("d", ""))
    name = name.removesuffix(".yaml")
    if name in OWN_FILES and place in ("", "config", "./config"):
        return {}
    # a script is started in the root of a checkout
    files = [at / place / f"{name}.yaml" for at in (folder, Path(), *folder.absolute().parents)]
    for file in files:
        if file.is_file():
            return _keys_of(file)
    why = f"{files[0]}: no such file; name one that is here, or a name of verl's own"
    raise ConfigError(f"--config-path={place} --config-name={name}: {why}")


def _converted(given: Mapping[str, Any], problems: list[str]) -> str:
    """Returns the YAML for these of verl's keys, after the `problems` that are known."""
    keys = {n: v for n, v in given.items() if v is not None or n not in COUNTS}
    for name in (n for n in keys if n in COUNTS and not re.fullmatch(r"[1-9]\d*", repr(keys[n]))):
        problems.append(f"{name}={keys[name]}: write a whole number of at least 1")
    raise_if_any(problems)
    batch, prompt, answer, nodes, gpus, mini, sequences, tp = (
        keys.get(name, default) for name, default in COUNTS.items()
    )
    gpus, length = gpus * nodes, prompt + answer
    kl = keys.pop(f"{_ACTOR}kl_loss_coef", 0.001)
    has_ref = flag(keys, f"{_ACTOR}use_kl_loss", False, problems)
    chat = {n.removeprefix(_CHAT): keys.pop(n) for n in [*keys] if n.startswith(_CHAT)}
    rows: list[Commented] = [
        ("actor.ppo_n_minibatches", batch // mini, "data.train_batch_size / ppo_mini_batch_size"),
        ("actor.kl_coef", kl if has_ref else 0.0, "use_kl_loss, kl_loss_coef"),
        ("ref.parallel", "${actor.parallel}", "use_kl_loss") if has_ref
        else ("ref", None, "use_kl_loss"),
        ("server.context_length", length, "data.max_prompt_length + max_response_length"),
        ("server.count", gpus // tp, f"on the trainers' GPUs: megarl launch --nproc {gpus}"),
    ]  # fmt: skip
    keys.pop(f"{_ACTOR}ppo_micro_batch_size_per_gpu", None)
    tokens = sequences * length or 16384
    rows.append(("actor.mb_spec.max_tokens_per_mb", tokens, "ppo_micro_batch_size_per_gpu"))
    warmup = f"{_ACTOR}optim.lr_warmup_steps"
    ratio = keys.get(f"{warmup}_ratio", 0)
    is_ratio = isinstance(ratio, int | float) and 0 <= ratio < 1
    if not is_ratio or (ratio and keys.get(warmup, -1) != -1):
        problems.append(f"{warmup}_ratio={show(ratio)}: write lr_warmup_steps, without a ratio")
    problems += _ambiguous(keys)
    if not keys.get(f"{_MODEL}lora_rank"):  # verl has adapters for a rank above 0
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            keys.pop(f"{_MODEL}{name}", None)
    if batch % mini:
        why = f"does not divide data.train_batch_size={batch}; take a divisor"
        problems.append(f"{_MINI}={mini}: {why}")
    if gpus % tp:
        problems.append(f"{_TP}={tp}: does not divide the {gpus} GPUs of trainer; take a divisor")
    keys.pop(_MINI, None)
    if (estimator := keys.pop("algorithm.adv_estimator", "gae")) != "grpo":
        estimators = foreign_tables("verl")["estimators"]
        ours = f"algorithm: {estimator}" if str(estimator) in PRESETS else "algorithm by hand"
        fix = estimators.get(str(estimator), f"{ours} (docs/algorithms.md)")
        why = f"only grpo is converted; convert it as grpo, then write {fix}"
        problems.append(f"algorithm.adv_estimator={estimator}: {why}")
    for section in ("train_dataset", "valid_dataset") if chat else ():
        rows.append((f"{section}.options.chat_template_kwargs", chat, _CHAT.rstrip(".")))
    rows += _trackers(keys.pop("trainer.logger", ()), problems) + _turns(keys, length, problems)
    return converted("verl", keys, rows, problems)


def _ambiguous(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem for values that mean to verl what they do not mean to megarl."""
    bounds = [f"{_ACTOR}clip_ratio_{side}" for side in ("low", "high")]
    for name in (name for name in bounds if name in keys and keys[name] is None):
        yield f"{name}=null: verl takes clip_ratio in its place; write the number"
    if keys.get(f"{_VALIDATION}do_sample") and f"{_VALIDATION}temperature" not in keys:
        yield f"{_VALIDATION}temperature: verl's default, 0, samples nothing; write the temperature"
    dtypes = (f"{_ROLLOUT}dtype", f"{_ACTOR}fsdp_config.dtype")
    if keys.get(dtypes[0], "auto") not in ("auto", keys.get(dtypes[1], "bfloat16")):
        yield f"{dtypes[0]}={keys[dtypes[0]]}: servers have the actor's dtype; set {dtypes[1]}, too"


def _trackers(given: Any, problems: list[str]) -> list[Commented]:
    """Returns the rows for trainer.logger."""
    rows: list[Commented] = []
    trackers = foreign_tables("verl")["trackers"]
    for tracker in map(str, given if isinstance(given, list | tuple) else [given or "console"]):
        if tracker in trackers:
            rows += [(ours, value, "trainer.logger") for ours, value in trackers[tracker].items()]
        else:
            why = "name a tracker of your own in stats_logger.tracker by hand"
            problems.append(f"trainer.logger={tracker}: {why}")
    return rows


def _turns(keys: dict[str, Any], length: int, problems: list[str]) -> list[Commented]:
    """Returns the rows for episodes of several turns, of at most `length` tokens. Leaves in `keys`
    what the table maps."""
    tools = keys.pop(f"{_TURNS}tool_config_path", None)
    if not flag(keys, f"{_TURNS}enable", False, problems):
        for name in [name for name in keys if name.startswith(_TURNS)]:
            del keys[name]
        return []
    known = foreign_tables("verl")["tools"]
    if (name := Path(str(tools)).name) not in known:
        why = "write the tools in rollout.workflow by hand (docs/agents.md); megarl knows the file"
        given = "enable=True" if tools is None else f"tool_config_path={tools}"
        problems.append(f"{_TURNS}{given}: {why} {', '.join(known)}")
    section = "rollout.workflow.options."
    return [
        ("rollout.workflow.type", _WORKFLOW, "multi_turn.enable"),
        (f"{section}tools", known.get(name), "multi_turn.tool_config_path"),
        (f"{section}max_turns", length, "no bound by default"),
        (f"{section}max_length", length, "data.max_prompt_length + max_response_length"),
    ]
