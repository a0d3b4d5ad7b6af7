"""What servers are asked to release and to resume, and what is known of those that are lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.servers import ServerState
from megarl.utils.http import HttpError
from tests.unit.rollout_fakes import FakeServer

PATHS = ("/release_memory_occupation", "/resume_memory_occupation", "/flush_cache")


@pytest.fixture
def client(servers: list[FakeServer]) -> Iterator[RemoteSGLangEngine]:
    client = connect(servers)
    yield client
    client.destroy()


def connect(servers: list[FakeServer], timeout: float = 60.0) -> RemoteSGLangEngine:
    config = RolloutConfig(addresses=[s.address for s in servers], setup_timeout=60.0)
    sync = WeightSyncConfig(timeout=timeout, server_timeout=2)
    client = RemoteSGLangEngine(config, weight_sync=sync)
    client.initialize()
    return client


def asked(server: FakeServer) -> list[tuple[str, object]]:
    """The calls about memory since the last look, with their tags."""
    calls, server.calls = server.calls, []
    return [(p.strip("/").split("_")[0], body.get("tags")) for p, body in calls if p in PATHS]


def test_only_what_is_held_is_released_and_only_that_is_resumed(
    client: RemoteSGLangEngine, servers: list[FakeServer]
) -> None:
    memory = client.pauses.memory
    client.pause()
    memory.release(("weights", "kv_cache"))
    memory.release(("weights", "kv_cache"))
    memory.resume(("weights",))
    memory.resume(("weights", "kv_cache"))
    memory.resume(("kv_cache",))
    memory.release(("kv_cache",))
    expected = [
        ("flush", None),
        ("release", ["weights", "kv_cache", "cuda_graph"]),
        ("resume", ["weights"]),
        ("resume", ["kv_cache", "cuda_graph"]),
        ("flush", None),
        ("flush", None),
        ("release", ["kv_cache", "cuda_graph"]),
    ]
    for server in servers:
        assert asked(server) == expected


def test_a_server_that_works_while_it_is_paused_is_named(
    client: RemoteSGLangEngine, servers: list[FakeServer]
) -> None:
    client.pause()
    servers[0].busy = 3
    client.pauses.memory.release(("kv_cache",))  # it ends in time
    assert [name for name, _ in asked(servers[0])] == ["flush"] * 4 + ["release"]
    client.pauses.memory.resume(("kv_cache",))
    client.destroy()
    hasty = connect(servers, timeout=3.0)
    hasty.pause()
    servers[0].busy = 10**6
    asked(servers[0])
    with pytest.raises(RuntimeError, match=f"{servers[0].address}.*yet it works"):
        hasty.pauses.memory.release(("kv_cache",))
    hasty.destroy()
    assert "release" not in dict(asked(servers[0]))


def test_a_lost_server_is_remembered_and_joins_as_it_is(
    client: RemoteSGLangEngine, servers: list[FakeServer]
) -> None:
    """It comes back with what it had released, or, started again, with all of its memory; where
    its last call had no answer, nobody knows, and it stays lost."""
    memory, pool = client.pauses.memory, client.opened().pool
    lost = pool.present[0]
    back = next(s for s in servers if s.address == lost.address)
    for version, released, joins, tags in (
        ("3", frozenset({"weights"}), True, ["kv_cache", "cuda_graph"]),
        ("default", None, True, ["weights", "kv_cache", "cuda_graph"]),
        ("3", None, False, None),
    ):
        lost.state, lost.released, back.weight_version = ServerState.LOST, released, version
        back.calls.clear()
        client.pause()
        memory.release(("weights", "kv_cache"))
        assert (lost in pool.present) == joins
        assert dict(asked(back)).get("release") == tags


def test_a_server_that_gives_no_answer_to_a_release_is_lost(
    client: RemoteSGLangEngine, servers: list[FakeServer]
) -> None:
    client.pause()
    servers[0].close()
    client.pauses.memory.release(("kv_cache",))
    assert client.addresses == [servers[1].address]
    assert asked(servers[1])[-1] == ("release", ["kv_cache", "cuda_graph"])


@pytest.mark.parametrize("joins", [False, True])
def test_a_server_that_its_flush_loses_goes_on_in_the_end(
    servers: list[FakeServer], joins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has its weights; it is paused, until it joins or the run ends."""
    client = connect(servers, timeout=1.0)
    lost, other = servers
    client.pause()
    lost.hang = True
    client.pauses.memory.release(("weights", "kv_cache"))
    assert client.addresses == [other.address]
    lost.hang = False
    if joins:
        client.pause()
        assert sorted(client.addresses) == sorted([lost.address, other.address])
    client.destroy()
    assert [p for p, _ in lost.calls][-1] == "/continue_generation"
    assert "/release_memory_occupation" not in [p for p, _ in lost.calls]
    assert lost.address not in [w.split()[2] for w in caplog.messages if "left paused" in w]


def test_the_end_of_a_run_leaves_servers_that_can_work(
    client: RemoteSGLangEngine, servers: list[FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    pool = client.opened().pool
    client.pause()
    client.pauses.memory.release(("weights", "kv_cache"))
    client.pauses.memory.resume(("weights",))
    pool.present[0].empty = False  # as after an update
    whole = next(s for s in servers if s.address == pool.present[0].address)
    client.destroy()
    assert [p for p, _ in whole.calls][-2:] == [PATHS[1], "/continue_generation"]
    (empty,) = (s for s in servers if s is not whole)
    assert "/continue_generation" not in [p for p, _ in empty.calls]
    assert "weights were released" in caplog.text


def test_what_may_be_a_new_process_in_a_lost_servers_place_is_asked_for_no_memory(
    client: RemoteSGLangEngine, servers: list[FakeServer]
) -> None:
    pool = client.opened().pool
    client.pause()
    client.pauses.memory.release(("kv_cache",))
    lost = next(s for s in servers if s.address == pool.present[0].address)
    pool.drop({lost.address: HttpError(lost.address, "/health", "no answer")}, bound="")
    calls = len(lost.calls)
    client.destroy()
    assert len(lost.calls) == calls


def test_usage_is_of_the_device_that_has_most(
    client: RemoteSGLangEngine, servers: list[FakeServer]
) -> None:
    """The embedded server counts; SGLang says what it took when it started."""
    servers[0].info = {"internal_states": [{"memory_bytes": {"weights": 5, "kv_cache": 0}}]}
    servers[1].info = {"internal_states": [{"memory_usage": {"weight": 2.0, "kvcache": 1.0}}]}
    memory = client.pauses.memory
    assert memory.usage() == {"weights": 2 << 30, "kv_cache": 1 << 30}
    client.pause()
    memory.release(("weights", "kv_cache"))
    assert memory.usage() == {"weights": 5, "kv_cache": 0}
    servers[1].info["enable_memory_saver"] = False  # then it releases nothing
    assert memory.usage() == {"weights": 2 << 30, "kv_cache": 1 << 30}
