"""Writes the answers of the step under way, which a start from the newest checkpoint continues."""

from __future__ import annotations

import io
import time
from pathlib import Path

import torch

from megarl.observability.logging import get_logger
from megarl.rollout.answers import Kept
from megarl.rollout.client import RemoteSGLangEngine
from megarl.utils.files import DiskFull, full_disk_named, write_whole

log = get_logger(__name__)


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
            log.warning("the answers so far are not saved: servers did not bring them in time")
            return
        state = {"version": version, "answers": self._client.executor.pipeline.answers()}
        buffer = io.BytesIO()
        torch.save(state, buffer)
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
