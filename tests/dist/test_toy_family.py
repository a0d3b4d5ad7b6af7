"""A family that a package of the user's own brings, with a kind of layer of its own, is trained as
Hugging Face's model with the same arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.errors import ConfigError
from tests.dist.engine_jobs import Tensors, make_engine
from tests.dist.invariance import SP, batch, check
from tests.dist.invariance import train as train_here
from tests.dist.losses import LOSSES
from tests.dist.reference import hf_steps
from tests.dist.test_hf_checkpoint import run_round_trip
from tests.files import same
from tests.tiny import tiny_hf
from tests.toy_linear import TOY, make_linear  # registers the family, on every rank too


def saved(path: Path) -> Any:
    hf = tiny_hf("qwen2", num_key_value_heads=4)
    make_linear(hf)
    hf.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": [TOY.architecture], "model_type": TOY.name}
    (path / "config.json").write_text(json.dumps(config))
    return hf


def train(path: str, parallel: dict[str, Any], loss: str, b: Tensors) -> Any:
    return train_here(path, parallel, loss, b)


@pytest.mark.parametrize("parallel", [{}, SP, dict(tp=2), dict(pp=2, vpp=2)], ids=str)
def test_a_kind_of_layer_from_outside(worlds, tmp_path, parallel):
    hf = saved(tmp_path)
    b = batch(hf)
    want = hf_steps(hf, b, LOSSES["policy"])
    check(worlds(2).run(train, str(tmp_path), parallel, "policy", b), want)


def test_its_weights_come_back_to_the_bit(world2, tmp_path):
    saved(tmp_path / "a")
    args = (round_trip, tmp_path / "a", tmp_path / "b", SP, torch.float32)
    assert all(world2.run(*args, base_model_path=tmp_path / "a"))
    same(tmp_path / "a", tmp_path / "b")


def round_trip(*args: Any, **kw: Any) -> bool:
    return run_round_trip(*args, **kw)


def shares(path: str, choice: str) -> str:
    try:
        engine = make_engine(path, {}, share_prefixes=choice)
    except ConfigError as e:
        return str(e)
    shared = engine.state.sharing is not None
    engine.destroy()
    return str(shared)


def test_prefixes_of_layers_with_a_state_are_not_shared(world1, tmp_path):
    saved(tmp_path)
    assert "[0, 2] of toy_linear" in world1.run(shares, str(tmp_path), "true")[0]
    assert world1.run(shares, str(tmp_path), "auto")[0] == "False"
