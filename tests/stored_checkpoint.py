"""Writes and describes the checkpoints in tests/data. These calls wrote them:

    /usr/bin/python3 -m tests.stored_checkpoint tests/data/python3.11.2
    python3.13 -m tests.stored_checkpoint /tmp/stored/python3.13

The first Python was 3.11.2 with megatron-core 0.16.1, the second 3.13.0 with 0.19.2; both had torch
2.13.0. The second checkpoint was moved here: megatron-core 0.19 stores the path of the directory.

A call trains a model of two layers and width 16 for two steps and saves weights and optimizer in
ckpt/ of the directory. The file expected.json holds what a load must give: a digest of each tensor,
and the next number of each random generator.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.dist.engine_jobs import SP, ZERO, make_engine, state
from tests.dist.test_checkpoint import dist_meta, draws, local_tensors, seed_all, train
from tests.dist.world import World
from tests.tiny import save_tiny

SHAPE: dict[str, Any] = dict(layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2)


def save_stored_model(path: Path) -> str:
    """Saves the model whose settings the checkpoints in tests/data have; returns its path."""
    return str(save_tiny(path, "llama", tie=True, **SHAPE))


def described(engine: Any) -> dict[str, Any]:
    """Returns digests of all weights and optimizer tensors, and the next random numbers."""
    named = {**state(engine), **local_tensors(engine)}
    digests = {
        name: sha256(value.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }
    return dict(digests=digests, draws=draws(engine), version=engine.get_version())


def save(model: str, out: str) -> dict[str, Any]:
    engine = make_engine(model, {}, **ZERO)
    train(engine, 2)
    engine.set_version(5)
    seed_all(44)
    engine.save(dist_meta(out))
    found = described(engine)
    engine.destroy()
    return found


def load(model: str, source: str) -> dict[str, Any]:
    engine = make_engine(model, {}, **ZERO)
    engine.load(dist_meta(source))
    found = described(engine)
    found["loss"] = train(engine, 1)[0][0]
    engine.destroy()
    return found


def load_split(model: str, source: str) -> dict[str, Any]:
    """Returns the weights after a load into two ranks of tensor parallelism."""
    engine = make_engine(model, SP, **ZERO)
    engine.load(dist_meta(source))
    found = state(engine)
    engine.destroy()
    return found


def main(out: str) -> None:
    folder = Path(out).absolute()
    with tempfile.TemporaryDirectory() as scratch, World(1) as world:
        model = save_stored_model(Path(scratch) / "model")
        found = world.run(save, model, str(folder / "ckpt"))[0]
    found["python"] = platform.python_version()
    found["versions"] = {name: version(name) for name in ("torch", "megatron-core")}
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
