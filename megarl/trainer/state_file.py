"""Writes and reads trainer.pt, the trainer's own part of a run's checkpoint. It holds plain data,
so that reading it runs nothing that is in it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from megarl.config.earlier_run import Checkpoint
from megarl.utils.files import Digest, file_digest

STATE_FILE = "trainer.pt"
CHECKSUM = "trainer.pt xxh3_128"  # key of trainer.json
State = dict[str, Any]


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
            f"{directory}: the rows of train_dataset hold more than plain data ({_named(e)}); a "
            "checkpoint keeps those whose prompts are in flight: let them hold text, numbers, "
            "lists, dicts and tensors only"
        ) from e
    (directory / STATE_FILE).write_bytes(content)
    return Digest(content).hexdigest()


def read_state(checkpoint: Checkpoint) -> State:
    """Returns the trainer's state of a checkpoint. Raises ValueError if the file is damaged,
    RuntimeError where reading it would run what it names."""
    path = checkpoint.path / STATE_FILE
    try:
        found: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch's archives fail in many ways
        if isinstance(e, pickle.UnpicklingError) and "unsupported global" in str(e).lower():
            raise RuntimeError(
                f"{path} holds more than plain data ({_named(e)}) and is not read: whoever wrote "
                "it could make this process run anything. Remove the checkpoint to continue from "
                "the one before, or set another trial_name"
            ) from e
        raise ValueError(f"{path} is damaged: {type(e).__name__}: {_named(e)}") from e
    return found


def check_state(checkpoint: Checkpoint) -> None:
    """Raises ValueError unless the trainer's state can be read and is as it was written;
    RuntimeError as `read_state` does."""
    path = checkpoint.path / STATE_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if file_digest(path) != checkpoint.info.get(CHECKSUM):
        raise ValueError(f"{path} is damaged: its checksum is not what trainer.json says")
    read_state(checkpoint)


def _named(error: Exception) -> str:
    """Returns the line of torch's long message that says what it refused."""
    lines = [line.strip() for line in str(error).splitlines() if "unsupported" in line.lower()]
    return (lines or [str(error)])[0]
