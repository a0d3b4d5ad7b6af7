"""Writes the checkpoints of a run at the end of a step, where they are due or <run>/SAVE asks for
one; the next start continues from the newest.

<run>/recover/step_000123/ holds the state of every trained engine (weights, optimizer, schedule,
random states) by its name, the weights of a reference that follows the policy, and the trainer's
state (place in the data, prompts in flight, counters, clocks). All are written beside it and
renamed into place together, see utils/files.py. At the end of a step the servers have its
weights, so that the version is the step and a start only has to send them again. The answers of the
step under way are in <run>/recover/answers.pt.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megarl.algos import Role
from megarl.api.engine import PendingSave
from megarl.api.records import SaveLoadMeta
from megarl.config.earlier_run import (
    MARKER,
    RECOVER_DIR,
    architecture,
    checkpoints,
    ended_line,
    is_newer,
)
from megarl.config.recipe_engines import FROZEN, saved_engines
from megarl.config.recipes import BaseConfig
from megarl.config.secrets import fingerprint_tree
from megarl.data.draws import Curriculum
from megarl.observability.logging import get_logger, warn_on_rank_zero
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.episode_context import Kept
from megarl.trainer.context import SAVE_FILE, RunContext
from megarl.trainer.run_dir import CHECKSUM, State, read_state, write_state
from megarl.trainer.saver import Frequency, Saver
from megarl.utils.files import (
    DiskFull,
    full_disk_named,
    put_in_place,
    remove,
    seal,
    stage,
    write_whole,
)

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """Holds a checkpoint whose files are being written; `info` is as of its step."""

    target: Path
    staging: Path
    info: State
    saves: list[PendingSave]
    asked: bool  # by the user's file, which is removed as this is whole


class Recovery:
    """Writes the checkpoints of a run, and loads the one that a start continues from. Collective.

    `models`: those whose weights change, by their names in the configuration; the version of the
    first is the run's. `clocks`: the run's other frequencies, whose waited seconds a checkpoint
    keeps."""

    def __init__(
        self, ctx: RunContext, models: Mapping[str, Role], clocks: dict[str, Frequency]
    ) -> None:
        assert tuple(models) == saved_engines(ctx.cfg), tuple(models)
        self._ctx, self._models, self._config = ctx, models, ctx.cfg.recover
        self._first = next(iter(models.values()))
        self._freq = Frequency(self._config, ctx.clock)
        self._clocks = clocks | {"recover": self._freq}
        self._dir = ctx.run_dir / RECOVER_DIR
        self._pending: _Pending | None = None
        self._ignores_file = False  # the user's, after it could not be removed
        self._newest = ctx.resumed.step if ctx.resumed else 0  # there is one of this step, or begun

    def restore(self, load_state: Callable[[State], None]) -> int:
        """Loads the checkpoint that this start continues from and returns its step; 0 for a run
        that begins. `load_state` gets, on every rank, what the `state` of `maybe_save` returned."""
        newest = self._ctx.resumed
        if newest is None:
            return 0
        saved: State = self._ctx.ranks.from_zero(read_state, newest)
        for name, model in self._models.items():
            if name in newest.info["models"]:  # a reference may have been frozen until now
                model.load(_engine_meta(newest.path, name))
                model.set_version(newest.info["version"])
        for name, clock in self._clocks.items():
            clock.load_state_dict(saved["clocks"][name])
        try:
            load_state(saved["state"])
        except KeyError as e:
            raise RuntimeError(
                f"{newest.path} lacks {e}, so another version of megarl wrote it: continue the run "
                "with that version, or begin another one (trial_name) from a model that the run "
                f"has saved, under {self._ctx.run_dir}/hf"
            ) from e
        return newest.step

    def maybe_save(
        self,
        state: Callable[[], State],
        *,
        step: int,
        epoch: int,
        epoch_ended: bool,
        last: bool,
        asked: bool = False,
    ) -> None:
        """Begins a checkpoint at the end of a step, if one is due, the step is the last or the user
        has `asked` (RunContext.wishes). `state` is called on rank 0 and returns what the trainer
        itself wants back.

        With `async_save` the files are written while the next steps run, and put in place at the
        end of the first step that finds them whole on every rank. At most one checkpoint is under
        way: the next one waits for it, and the last one is waited for here."""
        asked = asked and not self._ignores_file
        if self._config.mode == "disabled":
            if asked:
                self._ignores_file = not self._ctx.ranks.from_zero(self._answered)
                warn_on_rank_zero(log, "%s: none, as recover.mode=disabled says", SAVE_FILE)
            return
        asked = asked and not (self._pending and self._pending.asked)
        due = self._freq.due(step=step, epoch=epoch, epoch_ended=epoch_ended) or last or asked
        self._finish(wait=due)
        if due:
            self._begin(state, step, epoch, asked)
            self._finish(wait=last or not self._config.async_save)

    def save_now(self, state: Callable[[], State], *, step: int, epoch: int) -> Path | None:
        """Returns the checkpoint of `step`, for a run that ends early after it; writes it first, to
        the end, if it does not exist. None where recover.mode is disabled or no step was made."""
        if self._config.mode == "disabled":
            return None
        self._finish(wait=True)
        if step > self._newest:
            self._begin(state, step, epoch, asked=True)
            self._finish(wait=True)
        return self._path(step) if step else None

    def _path(self, step: int) -> Path:
        return self._dir / f"step_{step:06d}"

    def _begin(self, state: Callable[[], State], step: int, epoch: int, asked: bool) -> None:
        """Begins a checkpoint of all as it is now; the engines' files may be written later."""
        target, self._newest = self._path(step), step
        staging = self._ctx.ranks.from_zero(stage, target)
        saves = [
            model.begin_save(_engine_meta(staging, name)) for name, model in self._models.items()
        ]
        clocks = {name: clock.state_dict() for name, clock in self._clocks.items()}
        info: State = {
            "step": step,
            "epoch": epoch,
            "version": self._first.get_version(),
            "elapsed_s": self._ctx.elapsed(),
        }
        info[CHECKSUM] = self._ctx.ranks.from_zero(self._write_own, target, staging, clocks, state)
        self._pending = _Pending(
            target=target, staging=staging, info=info, saves=saves, asked=asked
        )

    def _write_own(
        self, target: Path, staging: Path, clocks: State, state: Callable[[], State]
    ) -> str:
        """Writes the trainer's part and returns its checksum. Rank 0 only."""
        with full_disk_named(f"saving {target}", staging):
            return write_state(staging, {"clocks": clocks, "state": state()})

    def _finish(self, *, wait: bool) -> None:
        """Puts the checkpoint under way in place, if every rank has written it or `wait`."""
        pending = self._pending
        if pending is None or not (wait or all(s.is_done() for s in pending.saves)):
            return
        self._pending = None
        for save in pending.saves:
            save.finish()
        self._ignores_file |= not self._ctx.ranks.from_zero(self._complete, pending)
        log.info("checkpoint %s", pending.target)

    def _complete(self, pending: _Pending) -> bool:
        """Writes the marker, renames the checkpoint into place, removes older ones; returns whether
        the user's file, if it asked for this, is removed. Rank 0 only."""
        info = pending.info
        info["models"] = {name: architecture(self._ctx.cfg, name) for name in self._models}
        text = json.dumps(seal(info), indent=2) + "\n"
        with full_disk_named(f"saving {pending.target}", pending.staging):
            (pending.staging / MARKER).write_text(text, encoding="utf-8")
            put_in_place(pending.staging, pending.target)
        answered = self._answered() if pending.asked else True
        whole, _ = checkpoints(self._ctx.run_dir)
        for old in [c for c in whole if c.step <= info["step"]][: -self._config.keep_last]:
            remove(old.path)
        return answered

    def _answered(self) -> bool:
        """Removes the user's file and returns whether it could. Rank 0 only."""
        try:
            (self._ctx.run_dir / SAVE_FILE).unlink(missing_ok=True)
        except OSError as e:
            log.warning("%s cannot be removed, so this run reads it no more: %s", SAVE_FILE, e)
            return False
        return True

    def ended_already(self, saver: Saver, *, total: int, over: bool) -> bool:
        """Logs where this start begins, and returns whether the run is `over`. Where it is, a final
        model that is missing or older than the checkpoint is saved."""
        newest, run = self._ctx.resumed, self._ctx.run_dir
        if newest is None:
            return False
        if not over:
            version = newest.info["version"]
            log.info(
                "continuing %s from step %d of %d (version %d)", run, newest.step, total, version
            )
            return False
        log.info("%s", ended_line(run, newest.step, total))
        if not self._ctx.ranks.from_zero(is_newer, saver.final, newest.path / MARKER):
            saver.save_final()
        return True


def _engine_meta(path: Path, name: str) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(path / name), weight_format="dist", with_optim=name not in FROZEN)


def data_of(cfg: BaseConfig, size: int) -> State:
    """Returns what a place in the training data depends on, to see whether a saved place still
    holds."""
    data = fingerprint_tree(cfg)["train_dataset"]
    if (curriculum := cfg.train_dataset.curriculum) is not None:
        data["curriculum"] = asdict(Curriculum(**curriculum))
    for source in (data, *data["parts"].values()):
        for name in ("reward", "workflow"):  # which say nothing about the rows
            source.pop(name, None)
    return data | {"rows": size, "seed": cfg.seed}


def same_data(before: State, now: State) -> bool:
    """Returns whether a place saved with the data `before` (see `data_of`) holds in the data `now`;
    warns where it does not, naming the keys."""
    old, new = before.get("curriculum"), now["curriculum"]
    if old and new:  # a key that only one version of megarl knows says nothing
        before = before | {"curriculum": {key: old.get(key, new[key]) for key in new}}
    if changed := [k for k in now if k in before and before[k] != now[k]]:
        warn_on_rank_zero(
            log,
            "the training data is not what it was (%s): its first epoch begins, prompts in flight "
            "are dropped",
            ", ".join(f"train_dataset.{k}" if k not in ("rows", "seed") else k for k in changed),
        )
    return not changed


class AnswersFile:
    """Writes a run's answers to `path`, replacing those before, every `secs` seconds (None: never)
    that the driver waits for a batch. They are answers of one version of the weights, and of use to
    a start from the checkpoint of that version alone."""

    def __init__(self, path: Path, client: RemoteSGLangEngine, secs: float | None) -> None:
        self._path, self._client, self._secs = path, client, secs
        self._written = time.monotonic()
        self._version: int | None = None

    def write_if_due(self) -> None:
        """Writes the answers if the last writing, or the last weight update, was `secs` ago. It
        interrupts generation, so that the unfinished ones are kept as far as they are; where they
        do not come back in time, the file stays as it is. A disk that is full is a warning."""
        version, now = self._client.get_version(), time.monotonic()
        if version != self._version:
            self._version, self._written = version, now
        if self._secs is None or now - self._written < self._secs:
            return
        whole = self._client.pauses.cut()
        self._written = time.monotonic()
        if not whole:
            return
        buffer, answers = io.BytesIO(), self._client.executor.episodes.answers()
        torch.save({"version": version, "answers": answers}, buffer)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with full_disk_named(f"saving {self._path}", self._path.parent):
                write_whole(self._path, buffer.getvalue())
        except (OSError, DiskFull) as e:
            log.warning("the answers so far are not saved: %s", e)
            return
        log.info("answers so far: %s", self._path)

    def read(self, version: int) -> Kept | None:
        """Returns the answers written under the weights `version`; None for none. A file of other
        weights, or one that is damaged, is removed."""
        try:
            state = torch.load(self._path, map_location="cpu", weights_only=True)
            if state["version"] == version:
                answers: Kept = state["answers"]
                return answers
        except FileNotFoundError:
            return None
        except Exception as e:  # torch's archives fail in many ways
            log.warning("%s is damaged, its answers are made again: %s", self._path, e)
        self._path.unlink(missing_ok=True)
        return None
