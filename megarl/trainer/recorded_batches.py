"""Writes and reads the batches of a run's steps: <run>/record/batches/step_000123.safetensors.

A file holds the batch as it was handed out to the step, before anything was computed of it:
"lengths" [B], "sample/<name>" [B] and "token/<name>" [T, ...], the rows one after the other. Its
metadata say of which step and version it is, and how long the data set was.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.config.errors import ConfigError
from megarl.config.record import batch_path, recorded_steps
from megarl.observability.logging import get_logger
from megarl.utils.files import full_disk_named, write_whole

log = get_logger(__name__)

PATIENCE = 30.0  # seconds that the end of a run waits for the disk
_LENGTHS, _SAMPLE, _TOKEN = "lengths", "sample/", "token/"


def whole(batch: Batch) -> Batch:
    """Returns the batch, all of whose rows rank 0 holds. Collective."""
    if len(batch.home.rows(0)) == len(batch):
        return batch
    return Batch.from_padded(batch.fetch(range(len(batch))), comm=batch.comm)


def as_tensors(batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors of a file. On a rank that holds all rows."""
    found = {_LENGTHS: batch.lengths}
    found |= {_SAMPLE + name: values for name, values in batch.per_sample.items()}
    found |= {_TOKEN + name: tokens.values for name, tokens in batch.per_token.items()}
    return {name: values.contiguous() for name, values in found.items()}


def write_batch(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, int]) -> None:
    """Writes a file, whole or not at all. Raises DiskFull where there is no room."""
    content = save(dict(tensors), {name: str(value) for name, value in about.items()})
    with full_disk_named(f"recording {path.name}", path.parent, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def read_batch(path: Path) -> tuple[list[Padded], dict[str, int]]:
    """Returns the rows of a file, each padded [1, n], and its metadata. Raises ConfigError for a
    file that cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            about = {name: int(value) for name, value in file.metadata().items()}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except Exception as e:  # safetensors has an error of its own for every kind of damage
        raise ConfigError([f"{path} cannot be read: {type(e).__name__}: {e}"]) from e
    lengths = tensors.pop(_LENGTHS)
    tokens = {n: Tokens(v, lengths) for n, v in tensors.items() if n.startswith(_TOKEN)}
    rows: list[Padded] = []
    for i, length in enumerate(lengths.tolist()):
        row = {name.removeprefix(_TOKEN): field.row(i)[None] for name, field in tokens.items()}
        row |= {
            name.removeprefix(_SAMPLE): values[i : i + 1]
            for name, values in tensors.items()
            if name.startswith(_SAMPLE)
        }
        rows.append(row | {"attention_mask": torch.ones(1, length, dtype=torch.bool)})
    return rows, about


class BatchWriter:
    """Writes batches in a thread of its own, one after the other, and removes old ones."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def write(
        self,
        tensors: Mapping[str, Tensor],
        about: Mapping[str, int],
        keep: int | None,
        always: list[int],
    ) -> None:
        """Begins to write the batch of step about["step"]; then the newest `keep` of them (None:
        all) and those of the steps `always` stay."""
        step = about["step"]

        def work() -> None:
            try:
                write_batch(batch_path(self._run_dir, step), tensors, about)
                for old in recorded_steps(self._run_dir):
                    if keep is not None and old <= step - keep and old not in always:
                        batch_path(self._run_dir, old).unlink(missing_ok=True)
            except Exception as e:  # of a disk that is full, mostly
                log.error("the batch of step %d is not recorded: %s: %s", step, type(e).__name__, e)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="megarl record", daemon=True)
            self._thread.start()
        try:
            self._work.put_nowait(work)
        except queue.Full:
            log.error("the batch of step %d is not recorded: the disk is behind", step)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """Waits until all is written, PATIENCE seconds at most."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._work.put(None, timeout=PATIENCE)
        thread.join(PATIENCE)
        if thread.is_alive():
            log.error("the last batches are not recorded: the disk did not answer")
