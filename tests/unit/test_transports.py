"""Transports by name and by import path: what they need, and what is refused before a start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.api.records import WeightUpdateMeta
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import GRPOConfig
from megarl.config.rollout import (
    ALIASES,
    TRANSPORTS,
    Requirements,
    requirements_of,
    transport_class,
)
from megarl.trainer.user_code import Named, code_problems, transport_needs
from megarl.weight_sync.transports import Transport
from tests.transports import documented_transport


class Unfinished(Transport):
    """Sends nothing."""


class Alike:
    requirements = Requirements()

    def __init__(self, source: Any) -> None: ...


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> str:
    return documented_transport(tmp_path_factory.mktemp("outside"))


def grpo(*overrides: str) -> GRPOConfig:
    cfg = load_config(None, ["recipe=grpo", "actor.path=m", *overrides])
    assert isinstance(cfg, GRPOConfig)
    return cfg


def problems(target: str, *overrides: str, **options: Any) -> list[str]:
    cfg = grpo(f"weight_sync.type={target}", *overrides)
    code = Named(
        key="weight_sync.type", target=target, kind="transport", options=options, config=cfg
    )
    return code_problems([code])


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_name_stands_for_one_transport(name: str) -> None:
    found = transport_class(name)
    assert issubclass(found, Transport) and found.__name__.lower() == f"{name}transport"
    assert found.requirements == requirements_of(name) == TRANSPORTS[name].requirements


def test_an_alias_means_the_same() -> None:
    assert all(requirements_of(a) == requirements_of(name) for a, name in ALIASES.items())
    assert WeightUpdateMeta(type="nccl").type == "distributed"


def test_one_from_outside_says_what_it_needs(outside: str) -> None:
    assert requirements_of(outside) == Requirements(directory=True)
    with pytest.raises(ValueError, match="needs a path on shared storage"):
        WeightUpdateMeta(type=outside)
    with pytest.raises(ValueError, match="sends whole weights"):
        WeightUpdateMeta(type=outside, path="p", delta=True)
    cfg = grpo(f"weight_sync.type={outside}", "weight_sync.options={prefix: part}").weight_sync
    meta = WeightUpdateMeta.from_config(cfg, path="p", addresses=["a:1"], version=1)
    assert (meta.type, dict(meta.options), meta.adapter) == (outside, {"prefix": "part"}, None)


@pytest.mark.parametrize(
    "target, words",
    (
        ("rdma", "not one of distributed, disk, colocated, adapter, nccl, and no pkg.module:name"),
        ("tests.transports:Nobody", "has no Nobody"),
        ("tests.transports:Path", "a type without `requirements`; expected a subclass of"),
    ),
)
def test_what_is_no_transport_is_refused(target: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"WeightUpdateMeta.type.*{words}"):
        WeightUpdateMeta(type=target)


def test_mistakes_are_found_before_a_start(outside: str) -> None:
    assert problems(outside, prefix="part") == []
    (found,) = problems(outside, prefx="part")
    assert found.startswith("weight_sync.options.prefx='part': BucketFiles has no such option")
    (found,) = problems(outside, "server.type=sglang")
    assert found.startswith(f"weight_sync.type={outside}: server.type=sglang: only the embedded")
    (found,) = problems(f"{__name__}:Unfinished")
    assert "has no method upload; write a subclass of Transport" in found
    (found,) = problems(f"{__name__}:Alike")
    assert found.endswith("no subclass of megarl.weight_sync.transports.Transport; make it one")
    for options, words in ((dict(prefix="part"), "prefix='part'"), (dict(delta="yes"), "bool")):
        (found,) = problems("disk", **options)
        assert found.startswith("weight_sync.options.") and words in found


def test_the_launcher_asks_one_from_outside_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text(
        "from megarl.config.rollout import Requirements\n"
        "class Beside: requirements = Requirements(shares_devices=True)\n"
    )
    path = [str(tmp_path)]
    assert transport_needs(grpo("weight_sync.type=beside:Beside"), path).shares_devices
    assert "beside" not in sys.modules
    with pytest.raises(ConfigError, match=r"weight_sync\.type: .*beside has no Besides"):
        transport_needs(grpo("weight_sync.type=beside:Besides"), path)
