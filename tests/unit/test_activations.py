"""Activations in host memory, over streams that copy as late as they may."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megarl.engine import activations
from megarl.engine.activations import HostActivations

LAYERS = 6


class Stream:
    """Does nothing before somebody waits for it. `Gpu.now`, on which tests compute, never lags."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], None]] = []
        self.done = 0

    def until(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.todo[self.done - 1]()

    def add(self, task: Callable[[], None]) -> None:
        self.todo.append(task)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        return Event(self, len(self.todo))

    def wait_event(self, event: Event) -> None:
        self.add(lambda: event.stream.until(event.count))


class Now(Stream):
    def add(self, task: Callable[[], None]) -> None:
        task()


class Event:
    def __init__(self, stream: Stream, count: int) -> None:
        self.stream, self.count = stream, count


class Gpu:
    """Stands for torch.cuda. log: ("out" or "in", number of the layer's input) for copies in the
    order in which they were asked for, ("layer", number) for what was computed. held: the most
    tensors that kept their memory for a copy out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.current = Now()
        self.log: list[tuple[str, int]] = []
        self.held, self._hosts = 0, []
        self._sources: list[weakref.ref[Tensor]] = []
        real = torch.Tensor.copy_

        def copy_(into: Tensor, of: Tensor, **kw: Any) -> Tensor:
            if self.current is self.now:
                return real(into, of, **kw)
            assert kw["non_blocking"]
            to, source = weakref.ref(into), weakref.ref(of)
            self._note(into, of)

            def copy() -> None:
                live, there = source(), to()
                assert live is not None and there is not None, "memory was given away too early"
                with torch.no_grad():
                    real(there, live)

            self.current.add(copy)
            return into

        @contextmanager
        def stream(s: Stream) -> Iterator[None]:
            before, self.current = self.current, s
            yield
            self.current = before

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)

    def _note(self, into: Tensor, of: Tensor) -> None:
        hosts = [host() for host in self._hosts]
        if any(of is host for host in hosts):
            self.log.append(("in", next(i for i, host in enumerate(hosts) if of is host)))
            return
        self.log.append(("out", len(hosts)))
        self._hosts.append(weakref.ref(into))
        self._sources.append(weakref.ref(of))
        self.held = max(self.held, sum(source() is not None for source in self._sources))


class Layer(nn.Module):
    def __init__(self, number: int, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.number, self.log, self.linear = number, log, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.log.append(("layer", self.number))
        return torch.tanh(self.linear(x)) + x


class Block(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i, log) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def gradients(block: Block, x: Tensor, host: HostActivations | None) -> list[Tensor]:
    for micro_batch in (x, 2 * x):
        given = micro_batch.requires_grad_()
        if host is None:
            out = block(given)
        else:
            with host.of(block):
                out = block(given)
        out.square().sum().backward()
    return [p.grad for p in block.parameters() if p.grad is not None]


def test_copies_run_beside_the_layers_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    want = gradients(Block([]), x.clone(), None)
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(activations, "MIN_BYTES", 0)
    with closing(HostActivations()) as host:
        got = gradients(Block(gpu.log), x.clone(), host)
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    assert gpu.held <= 3, "a layer's input leaves while two layers run"
    back = gpu.log[LAYERS : gpu.log.index(("out", LAYERS))]
    assert gpu.log[:LAYERS] == [("out", i) for i in range(LAYERS)]
    # the last two had not left yet; each other one is under way while the layer above it runs
    expected = [("layer", 5)]
    for i in range(LAYERS - 3, -1, -1):
        expected += [("in", i), ("layer", i + 1)]
    assert back == [*expected, ("layer", 0)]


def test_what_is_small_or_a_parameter_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    linear = nn.Linear(64, 256)  # its weight is as large as what goes
    x = torch.randn(256, 64, requires_grad=True)
    monkeypatch.setattr(activations, "MIN_BYTES", x.nbytes)
    with closing(HostActivations()) as host, host.of(linear):
        out = linear(x)
    small = linear(x[:1])
    assert gpu.log == [("out", 0)]
    (out.sum() + small.sum()).backward()
    assert linear.weight.grad is not None
