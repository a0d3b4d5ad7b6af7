"""Says which keys of a script's configuration have no effect.

A recipe reads every key. A script of the user's own reads those that it names, and those that the
parts read which it makes by `for_run`; a section that it hands to a part is read but for the keys
in `_LEFT`, which are for others. A key that is set and that nobody reads is named once, after the
first step or at the end.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

log = logging.getLogger("megarl.config")

_SET, _READ = "_set_keys", "_read_keys"
# what launchers and load_expr_config read
_BY_LAUNCHERS = (
    *("recipe", "algorithm", "allocation_mode", "cluster", "server", "judge"),
    *("trainer.mode", "trainer.workers", "trainer.scheduler", "recover.restarts", "recover.grace"),
    *("experiment_name", "trial_name", "fileroot", "collective_timeout"),
)
CLIENT_KEYS = (
    *("rollout", "rollout.backend", "weight_sync", "weight_sync.pause_mode"),
    *("weight_sync.timeout", "weight_sync.server_timeout", "actor.dynamic_sampling"),
)
REWARD_KEYS = (
    *("rollout.reward_workers", "rollout.reward_timeout"),
    *("rollout.reward_addresses", "rollout.on_reward_error"),
)
# keys of a section that the part which a script hands it to leaves to others -> how the text of a
# script that reads such a key by itself looks
_LEFT = {
    **{key: rf"\.{key.rpartition('.')[2]}\b" for key in REWARD_KEYS},
    "rollout.workflow": r"\.workflow\b",
    "rollout.backend": r"\.backend\b",
    "weight_sync.pause_mode": r"\bweight_sync\s*=",
    "weight_sync.timeout": r"\bweight_sync\s*=",
    "weight_sync.server_timeout": r"\bweight_sync\s*=",
    "actor.dynamic_sampling": r"\.dynamic_sampling\b",
    "ref.refresh_every": r"\.(is_due|refresh_every)\b",
    "ref.ema": r"\.(renew|ema)\b",
    "train_dataset.reward.options": r"\.reward\.options\b",
}
# the configuration and the file of this process's script, until its keys are named
_script: tuple[Any, Path] | None = None


def note_set(cfg: Any, names: Sequence[str]) -> None:
    """Notes the dotted names of the keys that were set, in a file or on the command line."""
    object.__setattr__(cfg, _SET, tuple(names))


def note_read(cfg: Any, *names: str) -> None:
    """Notes that a part of a script reads these keys and sections."""
    object.__setattr__(cfg, _READ, getattr(cfg, _READ, frozenset()) | set(names))


def begin_script(cfg: Any) -> None:
    """Has the keys of `cfg` that nobody reads be named once the script has made a step, or ends."""
    global _script
    file = getattr(sys.modules.get("__main__"), "__file__", None)  # at exit it is gone
    _script = None if file is None else (cfg, Path(file).resolve())
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    if not hasattr(sys, "last_value"):  # of an error, before which parts may not have been made
        warn_of_unread()


def warn_of_unread() -> None:
    """Names the keys of the script's configuration that are set and have no effect: on rank 0, and
    once."""
    global _script
    script, _script = _script, None
    if script is None or os.environ.get("RANK", "0") != "0":
        return
    text = _text_of(script[1])
    if "load_expr_config" in text and (unread := unread_keys(script[0], text)):
        log.warning(
            "these keys are set and have no effect in this script: %s. The parts that it makes by "
            "for_run(config) read keys of theirs (docs/extending.md); others are for it to use",
            ", ".join(unread),
        )


def unread_keys(cfg: Any, text: str) -> list[str]:
    """Returns the keys that are set and that neither a launcher, nor a part, nor a script of this
    text reads; those that a script has added to megarl's are its own."""
    ours = next(c for c in type(cfg).__mro__ if c.__module__.startswith("megarl."))
    sections = {field.name for field in fields(ours)}
    names = getattr(cfg, _SET, ())
    return [n for n in names if n.partition(".")[0] in sections and not _is_read(cfg, n, text)]


def _is_read(cfg: Any, name: str, text: str) -> bool:
    read = {*_BY_LAUNCHERS, *getattr(cfg, _READ, ())}
    above = set(_prefixes(name))
    if (left := next((key for key in _LEFT if key in above), None)) is not None:
        return left in read or re.search(_LEFT[left], text) is not None
    top = name.partition(".")[0]
    by_name = rf"""\.{top}\b|["']{top}["']"""
    return not read.isdisjoint(above) or re.search(by_name, text) is not None


def _prefixes(name: str) -> Iterator[str]:
    """Yields a, a.b and a.b.c of a.b.c."""
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _text_of(script: Path) -> str:
    """Returns the source of a script and of the modules beside it that it has imported."""
    modules = {f for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
    beside = {path for f in modules if (path := Path(f).resolve()).parent == script.parent}
    sources = (p for p in {script, *beside} if p.suffix == ".py" and p.is_file())
    return "\n".join(p.read_text(errors="replace") for p in sources)
