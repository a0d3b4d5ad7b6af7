"""The embedded server takes slices, and of them what changed since the last sync, bit for bit.

Every sync is verified by the servers' checksums. One sender lives on the ranks throughout a test
and sends versions that are HF directories.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import tests.embedded_server as embedded
from megarl.api.records import WeightUpdateMeta
from megarl.ckpt.hf import load_hf
from megarl.weight_sync import changes
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import hash_text, tensor_hash
from megarl.weight_sync.transports import WeightSender, WeightSource
from megarl.wire import block_fp8
from tests.dist.uploads import SOME, sharded
from tests.dist.world import World
from tests.embedded_server import (
    Server,
    addresses,
    checksums,
    embedded_server,
    load,
    two_servers,
    version,
)
from tests.tiny import is_linear, save_tiny

pytestmark = pytest.mark.system

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {}, "tp2": dict(tp=2), "pp2": dict(pp=2, pipeline_split=[3, 1]),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delta_sync")


@pytest.fixture(scope="module")
def versions(home: Path) -> list[Path]:
    """Saves a bf16 model; 1 % of its numbers changed; the same and one whole tensor changed."""
    first = save_tiny(home / "v0", "qwen2", dtype=torch.bfloat16, layers=4)
    return [first, changed(first, home / "v1", 0.01), changed(first, home / "v2", 0.01, whole=True)]


@pytest.fixture(scope="module")
def servers(versions: list[Path], home: Path) -> Iterator[list[Server]]:
    with two_servers(versions[0], home) as servers:
        yield servers


def changed(source: Path, target: Path, part: float, *, whole: bool = False) -> Path:
    """Copies `source` with bits flipped in `part` of its numbers, also the sign of a zero."""
    torch.manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    for t in tensors.values():
        t.view(torch.int16)[torch.rand(t.shape) < part] ^= 1
    tensors["model.norm.weight"][:2] = torch.tensor([0.0, -0.0])
    if whole:
        tensors["model.layers.1.mlp.up_proj.weight"].neg_()
        tensors["model.norm.weight"][:2] = torch.tensor([-0.0, -0.0])
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# ---- on the ranks

SENDER: dict[str, Any] = {}


def open_sender(source: Path, parallel: dict[str, Any], sender: int = 0) -> None:
    shards = sharded(source, parallel, torch.bfloat16)
    SENDER.update(shards=shards, sender=WeightSender(WeightSource(*shards, sender=sender)))


def send(source: Path, meta: WeightUpdateMeta) -> dict[str, float] | str:
    """Uploads `source`; returns the metrics, or the error."""
    load_hf(source, *SENDER["shards"])
    try:
        stats: dict[str, float] = SENDER["sender"].upload(meta)
        return stats
    except RuntimeError as e:
        return str(e)


def close_sender() -> None:
    if "sender" in SENDER:
        SENDER.pop("sender").close()


def send_and_fail(source: Path, meta: WeightUpdateMeta, at: int) -> dict[str, float] | str:
    """Rank 1 fails when it has packed so many of its messages, as they are and were."""
    packed, pack = itertools.count(), changes.pack

    def fail(*args: Any) -> Any:
        if dist.get_rank() == 1 and next(packed) == at:
            raise ValueError("broken")
        return pack(*args)

    with mock.patch.object(changes, "pack", fail):
        return send(source, meta)


class Sending:
    """A sender on the ranks; `to` sends with it and returns bytes and the share that changed."""

    def __init__(self, world: World, source: Path, parallel: dict[str, Any], sender: int = 0):
        self.world, self.version = world, 0
        world.run(open_sender, source, parallel, sender)

    def to(
        self, servers: list[Server], source: Path, job: Callable[..., Any] = send, **kw: Any
    ) -> tuple[float, float | None]:
        stats = self.try_to(servers, source, job, **kw)
        assert isinstance(stats, dict), stats
        assert stats["weight_sync/verified"] == 1
        assert [version(s) for s in servers] == [str(self.version)] * len(servers)
        return stats["weight_sync/bytes"], stats.get("weight_sync/changed")

    def try_to(
        self, servers: list[Server], source: Path, job: Callable[..., Any] = send, **kw: Any
    ) -> dict[str, float] | str:
        self.version += 1
        kw = {"bucket_bytes": SOME, "timeout": 60.0, "verify": True, "delta": True} | kw
        meta = WeightUpdateMeta(
            type="distributed", version=self.version, addresses=addresses(servers), **kw
        )
        results = self.world.run(job, source, meta)
        assert type(results[0]) is type(results[1])
        result: dict[str, float] | str = results[0]
        return result


@pytest.fixture
def sending(world: World, versions: list[Path]) -> Iterator[Callable[..., Sending]]:
    with ExitStack() as stack:

        def begin(parallel: dict[str, Any], sender: int = 0) -> Sending:
            sender = Sending(world, versions[0], parallel, sender)
            stack.callback(world.run, close_sender)
            return sender

        yield begin


def test_fp8_weights_are_held_as_their_products(
    sending: Callable[..., Sending], servers: list[Server], versions: list[Path]
) -> None:
    """The embedded server computes in its own dtype: it multiplies FP8 weights by their scales."""
    sender = sending(dict(tp=2))  # as whole tensors, which they multiply by the scales
    for i in (1, 2):
        nbytes, part = sender.to(servers, versions[i], delta=False, quantization="fp8_block")
        assert part is None and nbytes < 0.7 * size(versions[i])
        for name, t in load_file(versions[i] / "model.safetensors").items():
            if is_linear(name):
                t = block_fp8.dequantize(*block_fp8.quantize(t)).bfloat16()
            assert checksums(servers[0])[name] == hash_text(tensor_hash(t)), name


def size(path: Path) -> float:
    return float(sum(t.nbytes for t in load_file(path / "model.safetensors").values()))


def both(path: Path) -> float:
    """The bytes that two servers get."""
    return 2 * size(path)


@pytest.mark.parametrize("i", range(len(LAYOUTS)), ids=LAYOUTS)
def test_only_what_changed_is_sent(
    sending: Callable[..., Sending], servers: list[Server], versions: list[Path], i: int
) -> None:
    """For several layouts and senders."""
    sender, whole = sending(list(LAYOUTS.values())[i], sender=i % 2), both(versions[0])
    assert sender.to(servers, versions[0]) == (pytest.approx(whole, rel=0.01), None)
    nbytes, part = sender.to(servers, versions[1])
    assert part is not None and 0.009 < part < 0.011 and nbytes < 0.02 * whole
    nbytes, part = sender.to(servers, versions[2])
    assert part is not None and nbytes < 0.2 * whole
    streamed = [checksums(s) for s in servers]
    assert sender.to(servers, versions[2])[1] == 0.0  # again, and nothing changed
    load(servers[0], versions[2])
    assert streamed == [checksums(servers[0])] * 2


def test_what_does_not_pay_is_sent_whole(
    sending: Callable[..., Sending], servers: list[Server], versions: list[Path], tmp_path: Path
) -> None:
    sender, whole = sending(dict(tp=2)), both(versions[0])
    sender.to(servers, versions[0])
    other = save_tiny(tmp_path / "other", "qwen2", dtype=torch.bfloat16, seed=9)
    nbytes, part = sender.to(servers, other)
    assert part is not None and part > 0.9 and 0.9 * whole < nbytes <= 1.01 * whole
    assert sender.to(servers, changed(other, tmp_path / "next", 0.01))[0] < 0.02 * whole
    everything = pytest.approx(whole, rel=0.01), None
    # other messages than those kept
    assert sender.to(servers, versions[1], bucket_bytes=2 * SOME) == everything
    assert sender.to(servers, versions[2], delta=False) == everything
    assert sender.to(servers, versions[1]) == everything


@pytest.mark.full
def test_servers_that_hold_something_else_get_everything(
    world: World, sending: Callable[..., Sending], servers: list[Server], versions: list[Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Such servers are new, restarted or loaded by others; a resumed sender knows nothing."""
    one = servers[0]
    sender, two = sending(dict(tp=2)), pytest.approx(both(versions[0]), rel=0.01)
    whole = pytest.approx(size(versions[0]), rel=0.01)
    sender.to([one], versions[0])
    assert sender.to([one], versions[1])[0] < 0.04 * size(versions[0])
    with embedded_server(versions[0], log=tmp_path / "new.log") as new:
        assert sender.to([one, new], versions[0]) == (two, None)  # a new server
        assert sender.to([one, new], versions[1])[0] < 0.04 * size(versions[0])
        new.process.kill()
        new.process.wait()
        with (
            mock.patch.object(embedded, "free_port", lambda: new.port),
            embedded_server(versions[0], log=tmp_path / "again.log") as again,
        ):  # another process at its address, which has left no group
            assert sender.to([one, again], versions[0]) == (two, None)
            assert sender.to([one, again], versions[1])[0] < 0.04 * size(versions[0])
    assert sender.to([one], versions[2]) == (whole, None)  # with the server that is left
    load(one, versions[0])
    assert sender.to([one], versions[1]) == (whole, None)
    world.run(close_sender)
    resumed = sending(dict(tp=2))
    resumed.version = sender.version
    assert resumed.to([one], versions[2]) == (whole, None)


@pytest.mark.parametrize(("at", "torn"), ((6, False), (12, True)))
def test_after_a_failure_everything_is_sent(
    sending: Callable[..., Sending],
    servers: list[Server],
    versions: list[Path],
    at: int,
    torn: bool,
) -> None:
    """Until then servers that have written some of it generate nothing; all keep their version."""
    sender, whole = sending(dict(pp=2)), both(versions[0])
    sender.to(servers, versions[0])
    error = sender.try_to(servers, versions[1], partial(send_and_fail, at=at))
    assert isinstance(error, str) and "ValueError: broken" in error
    for server in servers:
        assert version(server) == str(sender.version - 1)
        status, answer = server.post("/generate", {"input_ids": [1, 2]})
        assert status == (500 if torn else 200)
        assert ("update the weights again" in str(answer)) == torn
    assert sender.to(servers, versions[1]) == (pytest.approx(whole, rel=0.01), None)
    assert server.post("/generate", {"input_ids": [1, 2]})[0] == 200


def test_a_server_that_released_its_weights_is_named(
    sending: Callable[..., Sending], servers: list[Server], versions: list[Path]
) -> None:
    """There is nothing to record, nor to copy into."""
    sender = sending(dict(tp=2))
    servers[1].ok("/pause_generation", {})
    servers[1].ok("/release_memory_occupation", {"tags": ["weights"]})
    error = sender.try_to(servers, versions[0])
    assert isinstance(error, str) and f"127.0.0.1:{servers[1].port}" in error
    assert "the weights are released; resume_memory_occupation first" in error
    servers[1].ok("/resume_memory_occupation", {"tags": ["weights"]})
    servers[1].ok("/continue_generation")
    sender.to(servers, versions[0])
