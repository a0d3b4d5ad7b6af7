"""allocation_mode: what it means, what its errors name, and how it goes with other keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.check import check_config
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, save_config
from megarl.config.presets import AllocationMode
from megarl.config.recipe_engines import smallest_world_size
from megarl.config.recipes import GRPOConfig, SFTConfig
from tests.hf_stub import write_stub


def test_servers_beside_trainers() -> None:
    a = AllocationMode.from_str("sglang.d4t2p1+megatron.d2t2p2c1e1")
    assert a.servers is not None and (a.servers.gpus, a.trainers.gpus, a.colocated) == (8, 8, False)
    assert a.keys("actor") == {
        "actor.parallel.tp": 2, "actor.parallel.pp": 2, "actor.parallel.cp": 1,
        "actor.parallel.ep": 1, "server.type": "sglang", "server.count": 4, "server.tp": 2,
    }  # fmt: skip


def test_colons_any_order_and_colocation() -> None:
    a = AllocationMode.from_str("sglang:t2d4|megatron:c2p3t4d1")
    assert a.colocated and a.servers is not None and a.servers.gpus == 8 and a.trainers.gpus == 24
    assert "actor.parallel.ep" not in a.keys("actor")  # the configuration's own
    assert AllocationMode.from_str("sglang.d12p1t1+d4p1t1") == AllocationMode.from_str(
        "sglang.d12p1t1+megatron.d4p1t1"
    )
    assert AllocationMode.from_str("d2t2") == AllocationMode.from_str("megatron.d2t2")
    alone = AllocationMode.from_str("megatron.d2t2")
    assert alone.servers is None and alone.trainers.gpus == 4
    assert alone.keys("model") == {
        "model.parallel.tp": 2, "model.parallel.pp": 1, "model.parallel.cp": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "sglang.d4x2+megatron.d1",
        "sglang.d4t2+vllm.d2",
        "sglang.d4t2",
        "sglang.d4d2+megatron.d1",
        "sglang.d0+megatron.d1",
        "sglang.d4p2+megatron.d1",
        "sglang.d4e2+megatron.d1",
        "sglang.d4+megatron",
        "sglang.d4+megatron.",
        "megatron.d2+sglang.d4",
        "sglang.d4+sglang.d4",
        "sglang.d4+megatron.d1|megatron.d1",
        "sglang.d4 + megatron.d1",
        "+megatron.d1",
        "d1+d2",
        "sglang.d1+d4x2",
    ],
)
def test_an_error_shows_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AllocationMode.from_str(text)
    (line,) = caught.value.report().splitlines()
    assert f"allocation_mode={text}: " in line
    assert "sglang.d4t2+megatron.d2t2p2" in line


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    model = write_stub(tmp_path / "model")
    return [f"actor.path={model}", "actor.optimizer.lr=1e-5", "gconfig.n_samples=2"]


def test_it_sets_keys_that_are_not_set(args: list[str], tmp_path: Path) -> None:
    mode = "allocation_mode=sglang.d4t2+megatron.d2t2p2"
    cfg = load_config(None, [*args, mode, "actor.parallel.ep=2"])
    assert isinstance(cfg, GRPOConfig)
    assert (cfg.server.type, cfg.server.count, cfg.server.tp) == ("sglang", 4, 2)
    p = cfg.actor.parallel
    assert (p.tp, p.pp, p.cp, p.ep) == (2, 2, 1, 2)
    assert smallest_world_size(cfg) == 8
    check_config(cfg, 8)
    save_config(cfg, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == cfg


def test_an_sft_has_trainers_alone(tmp_path: Path) -> None:
    model = write_stub(tmp_path / "model")
    args = ["recipe=sft", f"model.path={model}", "model.optimizer.lr=1e-3"]
    cfg = load_config(None, [*args, "allocation_mode=megatron.d2t2"])
    assert isinstance(cfg, SFTConfig) and cfg.model.parallel.tp == 2
    check_config(cfg, 4)
    cfg = load_config(None, [*args, "allocation_mode=sglang.d1+megatron.d2"])
    with pytest.raises(ConfigError, match="recipe=sft has no servers"):
        check_config(cfg, 2)


@pytest.mark.parametrize(
    ("more", "world", "says"),
    [
        (["server.tp=4"], 8, r"means server\.tp=2, and server\.tp=4 is set"),
        (["actor.parallel.pp=1"], 8, r"means actor\.parallel\.pp=2, and actor\.parallel\.pp=1 is"),
        (["server.type=embedded"], 8, "means server.type=sglang, and server.type=embedded is set"),
        ([], 4, "its trainers are 8 processes, and 4 would be started"),
        (["weight_sync.type=colocated"], 8, "needs servers on the trainers' GPUs"),
    ],
)
def test_what_contradicts_it_is_named(
    args: list[str], more: list[str], world: int, says: str
) -> None:
    cfg = load_config(None, [*args, "allocation_mode=sglang.d4t2+megatron.d2t2p2", *more])
    with pytest.raises(ConfigError, match=says):
        check_config(cfg, world)


def test_a_wrong_allocation_is_reported_with_the_other_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["allocation_mode=vllm.d1+megatron.d1", "acto.path=x"])
    assert len(caught.value.problems) == 2
