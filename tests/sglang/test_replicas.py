"""One server of two data-parallel replicas: files reach both, and SGLang refuses other ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.api.records import WeightUpdateMeta
from megarl.weight_sync.servers import Deadline, Servers
from tests.dist.uploads import Upload, run_uploads
from tests.dist.world import World
from tests.sglang.conftest import Pair
from tests.sglang.servers import RealServer

VERSION = 7


@pytest.fixture(scope="module")
def uploaded(
    pair: Pair, replicas: RealServer, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """What `save` wrote of m1, which a sync through files has brought to the replicas."""
    home = tmp_path_factory.mktemp("replicas")
    meta = WeightUpdateMeta(
        type="disk", path=str(home / "shared"), version=VERSION, timeout=120.0, verify=True,
        addresses=(replicas.address,),
    )  # fmt: skip
    for figures in world.run(run_uploads, dict(tp=2), [Upload(pair.m1, home / "saved", meta)]):
        assert isinstance(figures[0], dict), figures[0]
    yield home / "saved"


def test_both_replicas_hold_what_was_saved(
    pair: Pair, replicas: RealServer, uploaded: Path
) -> None:
    server, info = replicas, Servers([replicas.address]).info(Deadline(30))
    assert server.version == str(VERSION)
    first, second = server.checksums()
    assert first == second and info[server.address].replicas == 2
    said = server.said()
    server.load(uploaded)
    assert server.checksums() == [first, second] and server.said() == said
    server.load(pair.m0)
    assert server.checksums()[0] != first and server.said() != said


@pytest.mark.parametrize("type_", ("distributed", "colocated"))
def test_other_transports_say_why_not(
    pair: Pair, replicas: RealServer, world: World, type_: str
) -> None:
    meta = WeightUpdateMeta(
        type=type_, version=VERSION + 1, timeout=60.0, addresses=(replicas.address,)
    )
    for (error,) in world.run(run_uploads, dict(tp=2), [Upload(pair.m1, None, meta)]):
        assert isinstance(error, str) and "runs with dp_size=2" in error and "disk" in error, error


def test_sglang_itself_refuses(replicas: RealServer) -> None:
    """Where this no longer fails, SGLang has learnt to stream to replicas, and so could megarl."""
    group = dict(
        master_address="127.0.0.1",
        master_port=9,
        rank_offset=1,
        world_size=3,
        group_name="g",
        backend="gloo",
    )
    status, _ = replicas.post("/init_weights_update_group", group)
    assert status == 500 and replicas.process.poll() is None
