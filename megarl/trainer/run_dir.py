"""A start's claim on its run directory: nobody else in it, nothing half done, what to continue."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from megarl.ckpt.dist import read_info
from megarl.config.check import trained_engines
from megarl.config.earlier_run import (
    CONFIG_FILE,
    RECOVER_DIR,
    STATS_FILE,
    Checkpoint,
    check_run_dir,
    checkpoints,
    config_changes,
)
from megarl.config.loader import run_dir, save_config
from megarl.config.recipes import BaseConfig
from megarl.observability.logging import get_logger
from megarl.observability.report.runs import EVAL_REWARDS_FILE
from megarl.observability.stats_logger import supersede
from megarl.utils.staging import clean_up, remove

log = get_logger(__name__)

LOCK_FILE = ".lock"
LOCK_TIMEOUT = 60.0  # seconds; the processes of a run that was killed may take a while to end
LOCK_POLL = 2.0


def claim(cfg: BaseConfig) -> tuple[TextIO, Checkpoint | None]:
    """The lock, held until it is closed or the process ends, and the newest whole checkpoint, None
    to begin at the start. Rank 0 only. Raises ConfigError where `cfg` may not use the directory.
    """
    directory = run_dir(cfg)
    directory.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory)
    check_run_dir(cfg)
    homes = (directory, *(directory / name for name in trained_engines(cfg)[1:]))
    places = (RECOVER_DIR, "weights")
    for place in (*homes, *(h / "hf" for h in homes), *(directory / name for name in places)):
        for path in clean_up(place):
            log.info("%s: left by a process that was killed, cleaned up", path)
    newest = _newest(directory) if cfg.recover.mode == "auto" else None
    if newest is None:
        for name in ("samples.jsonl", EVAL_REWARDS_FILE):
            supersede(directory / name, lambda row: False)
    _update_config(cfg, directory)
    return lock, newest


def _lock(directory: Path) -> TextIO:
    """A POSIX record lock: the kernel lifts it with the process, and no forked child keeps it."""
    lock = (directory / LOCK_FILE).open("a+", encoding="utf-8")
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.EAGAIN):
                log.warning("%s cannot be locked (%s): start no second run there", directory, e)
                break
            if time.monotonic() >= deadline:
                lock.seek(0)
                raise RuntimeError(
                    f"{directory} is in use by a run that goes on ({lock.read().strip()}); set "
                    "another trial_name, or end that run"
                ) from e
        log.info("waiting for another run to leave %s", directory)
        time.sleep(LOCK_POLL)
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    return lock


def _newest(directory: Path) -> Checkpoint | None:
    whole, broken = checkpoints(directory)
    for path in broken:
        _set_aside(path, "its marker is missing")
    for checkpoint in reversed(whole):
        try:
            for name in checkpoint.info["models"]:
                read_info(checkpoint.path / name)
            return checkpoint
        except ValueError as e:
            _set_aside(checkpoint.path, str(e))
    if (directory / STATS_FILE).exists():
        log.warning(
            "%s holds a run but no whole checkpoint of it: starting from the beginning, its "
            "figures are moved to *.superseded.jsonl",
            directory,
        )
    return None


def _set_aside(path: Path, why: str) -> None:
    """Never to be taken for the newest again."""
    aside = path.with_name(f"incomplete_{path.name}")
    if aside.exists():
        remove(aside)
    path.rename(aside)
    log.warning("%s is not whole, skipped and renamed to %s: %s", path, aside.name, why)


def _update_config(cfg: BaseConfig, directory: Path) -> None:
    """Says what changed since the last start, whose config.yaml becomes config.<n>.yaml."""
    path = directory / CONFIG_FILE
    if changes := config_changes(cfg):
        n = 1 + len(list(directory.glob("config.*.yaml")))
        path.rename(directory / f"config.{n}.yaml")
        log.warning(
            "the configuration differs from the last start's (now config.%d.yaml):\n  %s",
            n,
            "\n  ".join(changes),
        )
    save_config(cfg, path)
