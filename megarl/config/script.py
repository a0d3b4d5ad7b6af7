"""Gives a script of the user's its configuration: models on the hub are fetched, and the keys that
have no effect in it are named.

A recipe reads every key. A user's script reads the keys that it names and the keys of the parts
that it makes by `for_run`. A section that it hands to a part counts as read, but for the keys in
`LEFT_KEYS`. A key that is set and not read is named once, after the first step or at the end.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.check_parts import free_problems, looks_like_hub_name
from megarl.config.command_line import parse_command_line
from megarl.config.errors import raise_if_any
from megarl.config.loader import keys_set, load_config
from megarl.config.recipe_engines import engines
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.config.secrets import as_written, written_values
from megarl.utils.env import quiet_libraries, set_collective_timeout

log = logging.getLogger("megarl.config")
C = TypeVar("C", bound=BaseConfig)
# weights as safetensors only: others' formats can be twice the size and are never read
_HF_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_READ = "_read_keys"  # of a configuration, beside its keys
# what launchers and load_expr_config read
_BY_LAUNCHERS = (
    *("recipe", "algorithm", "allocation_mode", "cluster", "server", "judge"),
    *("trainer.mode", "trainer.workers", "trainer.scheduler", "recover.restarts", "recover.grace"),
    *("experiment_name", "trial_name", "fileroot", "collective_timeout"),
)
CLIENT_KEYS = ("rollout", "rollout.backend", "weight_sync", "actor.dynamic_sampling")
REWARD_KEYS = (
    *("rollout.reward_workers", "rollout.reward_timeout"),
    *("rollout.reward_addresses", "rollout.on_reward_error"),
)
# keys that the part which a script hands their section to leaves to parts made by `for_run`
LEFT_KEYS = (*REWARD_KEYS, "rollout.workflow", "rollout.backend", "actor.dynamic_sampling")
# the configuration and the file of this process's script, until its keys are named
_script: tuple[BaseConfig, Path] | None = None


def load_expr_config(args: Sequence[str], cls: type[C]) -> tuple[C, str | None]:
    """Returns a script's configuration and the path of its YAML file.

    cls: its dataclass, a recipe's (GRPOConfig, ...) or the script's own below one. args: the
    command line, `--config X.yaml a.b=c +new.key=v`. Models on the hub are fetched, and their paths
    are those of the snapshots; collective_timeout counts from now on. Raises ConfigError for a
    configuration that is wrong, and for a model that cannot be had. Warnings of torchdata and
    megatron-core that a user can do nothing about are hidden.
    """
    global _script
    config = load_config(args, cls=cls)
    raise_if_any(as_written(free_problems(config), written_values(config)))
    fetch_hub_models(config)
    set_collective_timeout(config.collective_timeout)
    file = getattr(sys.modules.get("__main__"), "__file__", None)  # at exit it is gone
    _script = None if file is None else (config, Path(file).resolve())
    atexit.register(warn_of_unread)
    quiet_libraries()
    return config, parse_command_line(args, options=("config",)).options.get("config")


def fetch_hub_models(cfg: BaseConfig, *, weights: bool = True) -> None:
    """Replaces the hub name (org/name) of an engine or server by its local snapshot, which is
    downloaded where it is missing. weights: False downloads configuration, tokenizer and template.

    Raises ConfigError naming the model that is neither a directory nor on the hub."""
    problems = []
    files = [*_HF_FILES, "*.safetensors"] if weights else list(_HF_FILES)
    sections: dict[str, Any] = dict(engines(cfg))
    if isinstance(cfg, GRPOConfig):
        sections |= {"server": cfg.server} | ({"judge": cfg.judge} if cfg.judge else {})
    for name, section in sections.items():
        path = section.path
        if "/" not in path or Path(path).is_dir() or not looks_like_hub_name(path):
            continue
        from huggingface_hub import snapshot_download

        try:
            section.path = snapshot_download(path, allow_patterns=files)
        except (OSError, ValueError) as e:  # ValueError: no name that a hub allows
            why = " ".join(str(e).split())
            fix = f"name its directory, or org/name of a model (hf download {path} --local-dir DIR)"
            problems.append(f"{name}.path={path}: no directory, nor on the hub ({why}); {fix}")
    raise_if_any(problems)


def note_read(cfg: Any, *names: str) -> None:
    """Notes that a part of a script reads these keys and sections."""
    object.__setattr__(cfg, _READ, vars(cfg).get(_READ, frozenset()) | set(names))


def warn_of_unread() -> None:
    """Names the keys of the script's configuration that are set and have no effect: on rank 0,
    once, and not at the end of an error, before which parts may not have been made."""
    global _script
    script, _script = _script, None
    if script is None or os.environ.get("RANK", "0") != "0" or hasattr(sys, "last_value"):
        return
    cfg, text = script[0], _text_of(script[1])
    ours = next(c for c in type(cfg).__mro__ if c.__module__.startswith("megarl."))
    sections = {field.name for field in fields(ours)}  # what a script adds is its own
    names = [name for name in keys_set(cfg) if name.partition(".")[0] in sections]
    unread = [name for name in names if not _is_read(cfg, name, text)]
    if "load_expr_config" in text and unread:
        log.warning(
            "these keys are set and have no effect in this script: %s. The parts that it makes by "
            "for_run(config) read keys of theirs (docs/extending.md); others are for it to use",
            ", ".join(unread),
        )


def _is_read(cfg: BaseConfig, name: str, text: str) -> bool:
    above = list(accumulate(name.split("."), "{}.{}".format))  # a, a.b and a.b.c of a.b.c
    read = {*_BY_LAUNCHERS, *vars(cfg).get(_READ, ())}
    by_name = above[0]
    if left := [key for key in above if key in LEFT_KEYS]:
        above, by_name = left, left[0].rpartition(".")[2]
    used = rf"""\.{by_name}\b|["']{by_name}["']"""
    return not read.isdisjoint(above) or re.search(used, text) is not None


def _text_of(script: Path) -> str:
    """Returns the source of a script and of the modules beside it that it has imported."""
    modules = {f for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
    beside = {path for f in modules if (path := Path(f).resolve()).parent == script.parent}
    sources = (p for p in {script, *beside} if p.suffix == ".py" and p.is_file())
    return "\n".join(p.read_text(errors="replace") for p in sources)
