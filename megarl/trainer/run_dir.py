"""Claims the run directory for a start: nobody else is in it, nothing in it is half done, and the
newest checkpoint is known. Writes and reads trainer.pt, the trainer's own part of a checkpoint:
plain data, so that reading it runs nothing that is in it."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from megarl.ckpt.dist import find_damage
from megarl.ckpt.files import read_info
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
from megarl.config.recipe_engines import trained_engines
from megarl.config.recipes import BaseConfig
from megarl.config.run import batch_path
from megarl.observability.logging import get_logger
from megarl.observability.run_log import LOGS, RunLog, check_age
from megarl.utils.files import Digest, clean_up, file_digest, remove

log = get_logger(__name__)

STATE_FILE = "trainer.pt"
CHECKSUM = "trainer.pt xxh3_128"  # key of trainer.json
State = dict[str, Any]

LOCK_FILE = ".lock"
LOCK_TIMEOUT = 60.0  # seconds; the processes of a run that was killed may take a while to end
LOCK_POLL = 2.0

Zero = Callable[..., Any]  # Ranks.from_zero: a function's result on rank 0, on every rank


def claim(cfg: BaseConfig) -> TextIO:
    """Locks the run directory and cleans it up; returns the lock, held until it is closed or the
    process ends. Rank 0 only. Raises ConfigError where `cfg` may not use the directory,
    RuntimeError where another run keeps it for LOCK_TIMEOUT seconds."""
    directory = run_dir(cfg)
    directory.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory)
    check_run_dir(cfg)
    homes = (directory, *(directory / name for name in trained_engines(cfg)[1:]))
    written = (directory / RECOVER_DIR, directory / "weights", batch_path(directory, 0).parent)
    logs = {(directory / name).parent for name in LOGS}
    for place in {*homes, *(h / "hf" for h in homes), *written, *logs}:
        for path in clean_up(place):
            log.info("%s: left by a process that was killed, cleaned up", path)
    return lock


def newest_checkpoint(
    cfg: BaseConfig, zero: Zero, find_damage: Callable[[Path], str | None] = find_damage
) -> Checkpoint | None:
    """Returns the newest whole checkpoint of a claimed directory, None to begin at the start, and
    writes config.yaml there. Collective.

    Rank 0 looks at names, sizes and the trainer's own state; the ranks read the engines' files
    together, once (`find_damage`). A checkpoint that is damaged is set aside, and the one before
    comes next.
    """
    directory = run_dir(cfg)
    newest: Checkpoint | None = None
    while cfg.recover.mode == "auto" and (newest := zero(_newest, directory)) is not None:
        engines = (newest.path / name for name in newest.info["models"])
        damage = next((why for engine in engines if (why := find_damage(engine))), None)
        if damage is None:
            break
        zero(_set_aside, newest.path, damage)
    zero(_begin, cfg, directory, newest)
    return newest


def _begin(cfg: BaseConfig, directory: Path, newest: Checkpoint | None) -> None:
    check_age(directory / name for name in LOGS)
    for name in LOGS:
        RunLog(directory / name).begin(-1 if newest is None else newest.step)
    if newest is None and cfg.recover.mode == "auto" and (directory / STATS_FILE).exists():
        log.warning(
            "%s holds a run but no whole checkpoint of it: starting from the beginning, its "
            "metrics are moved to *.superseded.jsonl",
            directory,
        )
    _update_config(cfg, directory)


def _lock(directory: Path) -> TextIO:
    """Takes a POSIX record lock: the kernel lifts it with the process, and no forked child keeps
    it."""
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
    """Returns the newest checkpoint that is whole by its names, sizes and trainer's state; sets
    aside those found broken on the way."""
    whole, broken = checkpoints(directory)
    for path in broken:
        _set_aside(path, "its marker is missing or damaged")
    for checkpoint in reversed(whole):
        try:
            for name in checkpoint.info["models"]:
                read_info(checkpoint.path / name)
            read_state(checkpoint)
            return checkpoint
        except ValueError as e:
            _set_aside(checkpoint.path, str(e))
    return None


def _set_aside(path: Path, why: str) -> None:
    """Renames a checkpoint so that it is never taken for the newest again."""
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


def write_state(directory: Path, state: State) -> str:
    """Writes trainer.pt and returns its checksum. Raises ValueError for state that is more than
    plain data."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        raise ValueError(
            f"{directory}: the rows of train_dataset hold more than plain data ({_refused(e)}); a "
            "checkpoint keeps those whose prompts are in flight: let them hold text, numbers, "
            "lists, dicts and tensors only"
        ) from e
    (directory / STATE_FILE).write_bytes(content)
    return Digest(content).hexdigest()


def read_state(checkpoint: Checkpoint) -> State:
    """Returns the trainer's state of a checkpoint. Raises ValueError if its file is missing, or is
    not as it was written, RuntimeError where reading it would run what it names."""
    path = checkpoint.path / STATE_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if file_digest(path) != checkpoint.info.get(CHECKSUM):
        raise ValueError(f"{path} is damaged: its checksum is not what trainer.json says")
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch's archives fail in many ways
        if isinstance(e, pickle.UnpicklingError) and "unsupported global" in str(e).lower():
            raise RuntimeError(
                f"{path} holds more than plain data ({_refused(e)}) and is not read: whoever wrote "
                "it could make this process run anything. Remove the checkpoint to continue from "
                "the one before, or set another trial_name"
            ) from e
        raise ValueError(f"{path} is damaged: {type(e).__name__}: {_refused(e)}") from e
    return state


def _refused(error: Exception) -> str:
    """Returns the line of torch's long message that says what it refused."""
    lines = [line.strip() for line in str(error).splitlines() if "unsupported" in line.lower()]
    return (lines or [str(error)])[0]
