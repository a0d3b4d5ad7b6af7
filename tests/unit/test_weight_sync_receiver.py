"""The recorder on a made-up model, and a server's commands over processes, without SGLang."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megarl.weight_sync.receiver.megarl_receiver import commands, fingerprint
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import Holding, tensor_hash
from megarl.weight_sync.receiver.megarl_receiver.mailbox import Mailbox
from megarl.weight_sync.receiver.megarl_receiver.recording import (
    Table,
    Unsupported,
    digest_of,
    record,
)
from tests.stock_server import sglang_as

PARAMS = dict(a=(20, 12), b=(2, 6, 10), c=(30,), d=(8, 6), e=(4, 3, 2), f=(7, 4), g=(4, 5))
SIZES = dict(
    q=(24, 12), k=(8, 12), v=(8, 12), t=(2, 10, 9), g=(2, 10, 3), i=(16, 7), h=(12, 2),
    x=(6, 4), y=(1, 4), z=(1, 3), l=(4, 3), r=(4, 2), o=(3,),
)  # fmt: skip
SPEC = [(name, shape, "float32") for name, shape in SIZES.items()]


class Model(torch.nn.Module):
    """Does everything that a loader may do to a tensor on its way."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in PARAMS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        w = dict(weights)
        self.a.data[:8].copy_(w["q"].narrow(0, 8, 8))
        self.a.data[8:16].copy_(torch.cat([w["k"].chunk(2, 0)[1], w["v"][:4]]))  # two into one
        self.a[16:].data.fill_(0)  # padding
        self.b.data.copy_(w["t"].transpose(1, 2)[:, 2:8])
        self.c.data.copy_(w["g"].reshape(-1)[30:])
        self.d.data.copy_(w["i"][::2, :6])  # no box: several
        self.e.data.copy_(w["h"].view(3, 4, 2).transpose(0, 1).contiguous().to(torch.float64))
        self.f.data[:6].copy_(w["x"].double()[torch.tensor([3, 0, 1, 2, 5, 4])])  # permuted rows
        self.f.data[6:, :2].copy_((w["y"].float() * 2 + 1)[:, :2])  # arithmetic
        self.f.data[6:, 2:].copy_(w["z"].view(torch.int32)[:, :2])  # bits as other numbers
        self.g.data.copy_(torch.cat([w["l"], w["r"]], 1))  # beside each other


def values(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=rng) for name, size in SIZES.items()}


def loaded(seed: int) -> Model:
    model = Model()
    with torch.no_grad():
        model.load_weights(values(seed).items())
    return model


def test_a_table_applied_is_a_normal_load() -> None:
    model, normal, tensors = Model(), loaded(0), values(0)
    table = record(model, SPEC)
    assert all((p == 0).all() for p in model.parameters()), "recording writes nothing"
    assert (table.computed, table.unfilled, table.twice) == ({"f": ["y", "z"]}, {}, {})
    with torch.no_grad():
        for e in table.entries:
            box = tensors[e.tensor][tuple(map(slice, e.start, e.stop))]
            param = model.get_parameter(e.param)
            param.as_strided(e.shape, e.strides, e.offset).copy_(box.reshape(e.shape))
        model.f[6:] = normal.f[6:]  # computed
    for name, p in normal.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name
    by_tensor = [e.tensor for e in table.entries]
    assert [by_tensor.count(n) for n in "qlrg"] == [1, 1, 1, 1], "few boxes where few will do"


@dataclass
class Bench:
    """A server's rank without SGLang, and a store beside it. do: gives a command, returns the
    reply; None where there is none."""

    model: Model
    store: dist.TCPStore
    box: Mailbox

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        command = dict(
            do=what, id=what, server=0, host="127.0.0.1", port=self.store.port, session="s",
            timeout=60.0, backend="gloo",
        )  # fmt: skip
        commands.load(self.model, [(json.dumps(command | more), torch.empty(0))])
        return dict(json.loads(self.box.take(f"reply/{(command | more)['id']}/0/0")))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("MEGARL_JOB_TOKEN", "secret")
    monkeypatch.setattr(commands, "held", commands.Held())
    for name, content in sglang_as(rank=0).items():
        monkeypatch.setitem(sys.modules, name, content)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    box = Mailbox(store, "s", "secret")
    box.put("spec", zlib.compress(json.dumps(SPEC).encode()))
    return Bench(Model(), store, box)


def send(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, rounds: list[Any], **plan: Any
) -> dict[str, Any]:
    """Has the rank receive a plan of one sender; bytes come by hand instead of through a group."""
    tensors = values(1)

    def arrive(ops: Any) -> list[Any]:
        for (_, buffer), (_, slices) in zip(ops, rounds[ops[0][0]]):
            end = 0
            for part in slices:
                e = commands.held.table.entries[part if isinstance(part, int) else part[0]]
                box = tensors[e.tensor][tuple(map(slice, e.start, e.stop))].contiguous()
                raw = box.view(torch.uint8).flatten()[: buffer.numel() - end]
                buffer[end : end + raw.numel()] = raw
                end += raw.numel()
        return []

    monkeypatch.setattr(commands.dist, "batch_isend_irecv", arrive)
    monkeypatch.setattr(commands.dist, "P2POp", lambda _, buffer, *, tag, **to: (tag, buffer))
    monkeypatch.setattr(commands.dist, "get_backend", lambda group: "other than gloo")
    monkeypatch.setattr(commands.dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(commands.held, "group", mock.Mock())
    whole = {"digest": digest_of(bench.model), "rounds": rounds} | plan
    bench.box.put("plan/0/0", zlib.compress(json.dumps(whole).encode()))
    return bench.do("receive")


def test_slices_land_where_a_load_puts_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.do("record")["ok"]
    table = Table(**json.loads(zlib.decompress(bench.box.take("table/record/0/0"))))
    rounds = [[[0, [i]]] for i in range(len(table.entries))]
    reply = send(bench, monkeypatch, rounds)
    assert reply["ok"] and reply["received"] > reply["peak"] > 0 and reply["wrote"], reply
    bench.model.f.data[6:] = loaded(1).f[6:]
    for name, p in loaded(1).named_parameters():
        assert torch.equal(p, bench.model.get_parameter(name)), name
    assert bench.do("hash")["ok"] and bench.do("hash", id="q", names=["q"])["entries"] == 1
    sums = json.loads(zlib.decompress(bench.box.take("hash/hash/0/0")))
    for (name, start, stop, *_), held in zip(table.entries, sums, strict=True):
        if name not in "yz":  # computed
            box = values(1)[name][tuple(map(slice, start, stop))]
            assert held == int(tensor_hash(box, start)), name


BOXES: dict[str, tuple[list[int], list[tuple[list[int], list[int]]]]] = {
    "matrix": ([6, 8], [([0, 0], [6, 3]), ([0, 3], [2, 8]), ([2, 3], [6, 8])]),
    "experts": ([3, 4, 6], [([0, 1, 0], [3, 3, 6]), ([0, 0, 2], [3, 1, 5])]),
    "planes": ([3, 4, 6], [([1, 0, 0], [2, 4, 6]), ([0, 0, 1], [3, 4, 3])]),
    "vector": ([7], [([0], [3]), ([3], [7])]),
    "scalar": ([], [([], [])]),
}


@pytest.mark.parametrize("case", BOXES)
def test_hashes_of_parts_add_up_to_the_whole(case: str) -> None:
    """However many elements are taken at a time, and of a view in other strides."""
    shape, boxes = BOXES[case]
    x = torch.randn(shape).bfloat16()
    view, wide = x.t().contiguous().t() if x.ndim == 2 else x, x.float() * (1 + 1e-4)
    whole, bits = int(tensor_hash(x)), x.clone()
    for start, stop in boxes:
        box = tuple(map(slice, start, stop))
        inside = torch.zeros(shape, dtype=torch.bool)
        inside[box] = True
        rest = tensor_hash(torch.where(inside, torch.zeros_like(x), x))
        for part in (x[box], view[box]):
            assert int(tensor_hash(part, start) + rest) == whole
        assert int(tensor_hash(wide[box], start, [torch.bfloat16]) + rest) == whole
    assert torch.equal(x, bits), "nothing is written"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3)])
def test_a_tensor_without_elements_adds_nothing_to_a_hash(shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape)
    for casts in ([], [torch.bfloat16]):
        assert int(tensor_hash(empty, (5,) * len(shape), casts)) == 0
    held = Holding()
    held.note("weights", {"empty": empty}, ["empty"])
    assert held.look({"empty": empty.clone()}) == "weights"


def test_a_hash_of_many_elements_at_a_time_is_that_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 8).bfloat16()
    whole = int(tensor_hash(x))
    monkeypatch.setattr(fingerprint, "ON_HOST", 20)
    assert int(tensor_hash(x)) == whole
    swapped = x.clone()
    swapped[0, :2] = x[0, :2].flip(0)
    assert int(tensor_hash(swapped)) != whole


@pytest.mark.parametrize(
    "view", ([4 * 6 * 8 - 40, [10, 6], [6, 1]], [-6, [1], [1]], [0, [2], [99]])
)
def test_a_plan_cannot_write_outside_of_parameters(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, view: Any
) -> None:
    assert bench.do("record")["ok"]
    entry = next(i for i, e in enumerate(commands.held.table.entries) if e.param == "d")
    reply = send(bench, monkeypatch, [[[0, [[entry, [view]]]]]])
    assert not reply["ok"] and "RuntimeError" in reply["error"], reply
    assert all((p == 0).all() for p in bench.model.parameters())


def test_a_plan_for_other_parameters_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.do("record")["ok"]
    bench.model.c = torch.nn.Parameter(torch.zeros(30, dtype=torch.bfloat16))
    reply = send(bench, monkeypatch, [], digest=digest_of(Model()))
    assert "parameters have changed since their table" in reply["error"]
    assert "record first" in bench.do("hash")["error"]
    assert bench.do("record")["ok"] and bench.do("hash", id="hash")["ok"]


def test_changes_of_other_weights_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.do("record")["ok"]
    reply = send(bench, monkeypatch, [])
    assert reply["ok"] and bench.do("holds")["weights"] is None
    changes = [{"base": None, "id": "v1"}, {"base": "v1", "id": "v2"}, {"base": "v1", "id": "v3"}]
    replies = [bench.do("receive", id=f"receive {c['id']}", changes=c) for c in changes]
    assert [r["ok"] for r in replies] == [True, True, False]
    assert "these are changes to v1, and v2 is held" in replies[2]["error"]
    assert bench.do("holds", id="again")["weights"] == "v2"
    bench.model.a.data[0, 0] += 1
    assert bench.do("holds", id="and again")["weights"] is None


class Odd(Model):
    """Loads in ways that cannot be followed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        w = dict(weights)
        if self.how == "twice":
            self.d.data[:4].copy_(w["i"][:4, :6])
            self.d.data[2:6].copy_(w["i"][4:8, :6])
        elif self.how == "item":
            self.d.data.fill_(w["i"].sum().item())
        elif self.how == "elsewhere":
            torch.zeros(16, 7).copy_(w["i"])
        elif self.how == "joined with real numbers":
            self.f.data[:5].copy_(torch.cat([w["y"], torch.ones(4, 4)]))
        elif self.how == "two casts":
            self.f.data[:1].copy_(w["y"].bfloat16().float())
        elif self.how == "zeros":  # of which another rank has the rest
            self.f.data[:6].copy_(w["x"].zero_()[:, :4])
        elif self.how == "zeros beside others":
            zeros = w["y"].zero_()
            self.f.data[:7].copy_(torch.cat([w["x"], zeros]))
        elif self.how == "zeros after a view":
            view = w["x"][:2]
            w["x"].zero_()
            self.f.data[:2].copy_(view)
        elif self.how == "zeros in a view":
            w["x"][:2].zero_()


def test_what_cannot_be_followed_is_said() -> None:
    table = record(Odd("twice"), SPEC)
    assert table.twice == {"d": 12} and table.unfilled["d"] == 12
    assert record(Odd("joined with real numbers"), SPEC).computed == {"f": ["y"]}
    assert record(Odd("two casts"), SPEC).computed == {"f": ["y"]}
    assert record(Odd("zeros beside others"), SPEC).computed == {"f": ["x", "y"]}
    for how, words in (
        ("item", "looks at the numbers"),
        ("elsewhere", "no parameter"),
        ("zeros after a view", "zero_"),
        ("zeros in a view", "zero_"),
    ):
        with pytest.raises(Unsupported, match=words):
            record(Odd(how), SPEC)


def test_zeros_that_replace_a_tensor_are_constants() -> None:
    """As other padding they are there, so nothing is sent."""
    table = record(Odd("zeros"), SPEC)
    assert table.unfilled["f"] == 4 and not table.entries and not table.computed


class Neighbours(torch.nn.Module):
    """Two parameters in one memory, of which loading fills one."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(6, 4)
        self.q, self.k = torch.nn.Parameter(both[:4]), torch.nn.Parameter(both[4:])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            self.get_parameter(name).data.copy_(w)


def test_parameters_in_one_memory_are_each_filled_or_not() -> None:
    for name, other, rows in (("q", "k", 4), ("k", "q", 2)):
        table = record(Neighbours(), [(name, (rows, 4), "float32")])
        assert table.unfilled == {other: 24 - 4 * rows}


def test_load_never_raises(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("no JSON", "{}", json.dumps({"do": "record", "host": "127.0.0.1", "port": 1})):
        commands.load(bench.model, [(name, torch.empty(0))])
    commands.load(bench.model, [])
    assert "KeyError" in bench.do("dance")["error"]
    bench.model = Odd("item")
    assert "looks at the numbers" in bench.do("record")["error"]
    assert "Traceback" in capfd.readouterr().err


def far(port: int, seconds: float) -> int:
    """Returns a port of one connection to another port, on which bytes are `seconds` under way."""
    door = socket.create_server(("127.0.0.1", 0))

    def carry(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                time.sleep(seconds)
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)

    def connect() -> None:
        with door:
            here, there = door.accept()[0], socket.create_connection(("127.0.0.1", port))
        for ends in ((here, there), (there, here)):
            threading.Thread(target=carry, args=ends, daemon=True).start()

    threading.Thread(target=connect, daemon=True).start()
    return int(door.getsockname()[1])


def test_the_word_of_whoever_gave_up_is_there_before_its_connections_close() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = far(store.port, 0.1)
    away = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    first, second = Mailbox(away, "s", "secret"), Mailbox(store, "s", "secret")
    assert first.stop("rank 3: out of memory") == "rank 3: out of memory"
    assert second.stopped() == "rank 3: out of memory"
    assert second.stop("rank 0: connection closed") == "rank 3: out of memory"


def test_the_first_of_two_words_stays_also_when_both_are_under_way() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [
        dist.TCPStore("127.0.0.1", far(store.port, away), is_master=False, wait_for_workers=False)
        for away in (0.1, 0.25)
    ]
    near, far_off = (Mailbox(end, "s", "secret") for end in ends)
    with ThreadPoolExecutor() as pool:
        words = [pool.submit(near.stop, "near"), pool.submit(far_off.stop, "far off")]
        assert [word.result(60.0) for word in words] == ["near", "near"]
    assert Mailbox(store, "s", "secret").stopped() == "near"


def test_without_the_token_nothing_is_found_or_believed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store.set_timeout(commands.timedelta(seconds=0.5))
    other = Mailbox(bench.store, "s", "another")
    with pytest.raises(dist.DistStoreError):
        other.take("spec")
    bench.store.set(bench.box.name("spec"), b"0" * 32 + zlib.compress(b"[]"))
    with pytest.raises(PermissionError, match="not put by a process with this job's"):
        bench.box.take("spec")
    assert "PermissionError" in bench.do("record")["error"]
