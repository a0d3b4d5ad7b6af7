"""Checkpoints that other versions of Python and megatron-core wrote load here to the bit."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from tests.dist.world import World
from tests.stored_checkpoint import load, load_split, save_stored_model

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("writer", ["python3.11.2", "python3.13"])
def test_weights_and_optimizer_load_to_the_bit(
    world1: World, world2: World, tmp_path: Path, writer: str
) -> None:
    expected = json.loads((DATA / writer / "expected.json").read_text())
    assert expected["python"].startswith(writer.removeprefix("python"))
    source, model = str(DATA / writer / "ckpt"), save_stored_model(tmp_path / "model")
    found = world1.run(load, model, source)[0]
    assert found["loss"] > 0
    assert {key: found[key] for key in ("digests", "draws", "version")} == {
        key: expected[key] for key in ("digests", "draws", "version")
    }
    for rank in world2.run(load_split, model, source):
        for name, tensor in rank.items():
            digest = sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
            assert digest == expected["digests"][name], name
