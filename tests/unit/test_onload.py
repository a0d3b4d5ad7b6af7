"""Parked weights come back while a pass runs: each module waits for its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megarl.engine import offload
from megarl.engine.offload import Onload, ParkedStorages, units


def late():
    """Stands in for `copy_stream`: makes the copies, in their order, when somebody waits for the
    last of them."""
    waiting = []

    def begin(copy):
        waiting.append(copy)
        number = len(waiting)

        def wait():
            for i in range(number):
                waiting[i]()
                waiting[i] = int

        return wait

    return begin


class Block(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    """Has the shape of a GPTModel, its weights in one storage as the buffers of DDP are."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(5, 4), Block(layers)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight  # tied
        params = list(self.parameters())
        flat = torch.zeros(3 + sum(p.numel() for p in params) + 5)  # padded at both ends
        at = 3
        for p in params:
            flat[at : at + p.numel()] = p.data.flatten()
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        self.flat = flat
        flat[:3] = flat[-5:] = 7.0

    def forward(self, x):
        return self.head(self.decoder(self.embedding(x)))


def test_units_are_what_a_pass_calls_in_its_order():
    model = Model()
    decoder = model.decoder
    want = [model, model.embedding, decoder, *decoder.layers, decoder.norm, model.head]
    found = list(units(model))
    assert [module for module, _ in found] == want
    listed = {id(p) for _, params in found for p in params}
    assert listed == {id(p) for p in model.parameters()}


def test_every_byte_comes_back_once_in_the_order_of_the_pass():
    model, parked = Model(), ParkedStorages()
    before, ids = model.flat.clone(), torch.tensor([0, 3, 4])
    want = model(ids)
    size = parked.park("params", model.parameters())
    assert model.flat.untyped_storage().nbytes() == 0
    modules = list(units(model))
    taken, copies = parked.pieces("params", [params for _, params in modules])
    assert taken == size == before.nbytes and len(copies) == len(modules) + 1
    model.flat.fill_(-1.0)
    done = 0
    for copy in copies:
        copy()
        there = int((model.flat == before).sum())
        assert there >= done
        done = there
    assert torch.equal(model.flat, before)
    assert torch.equal(model(ids), want)


@pytest.mark.parametrize("verb", ["park", "restore"])
def test_bytes_that_find_no_room_stay_where_they_are(verb, monkeypatch):
    model, parked = Model(), ParkedStorages()
    model.head.weight = nn.Parameter(torch.ones(5, 4))  # a second storage, the one that fails
    want = [p.detach().clone() for p in model.parameters()]
    made, first = [], model.flat.untyped_storage()

    def no_room(*args, **kw):
        made.append(args)
        if len(made) == 2:
            raise RuntimeError("out of memory")
        return really(*args, **kw)

    if verb == "park":
        really = torch.empty
        monkeypatch.setattr(torch, "empty", no_room)
        with pytest.raises(RuntimeError, match="out of memory"):
            parked.park("params", model.parameters())
        assert "params" not in parked
    else:
        parked.park("params", model.parameters())
        really = torch.UntypedStorage.resize_
        monkeypatch.setattr(torch.UntypedStorage, "resize_", no_room)
        with pytest.raises(RuntimeError, match="out of memory") as e:
            parked.restore("params")
        assert "'params' of the engine stays" in e.value.__notes__[0]
        assert "params" in parked and first.nbytes() == 0
        parked.restore("params")
    assert all(map(torch.equal, model.parameters(), want))


def test_a_pass_begins_before_the_last_layer_is_there(monkeypatch):
    monkeypatch.setattr(offload, "copy_stream", late)
    model, parked = Model(), ParkedStorages()
    ids = torch.tensor([0, 3, 4])
    want = model(ids)
    parked.park("params", model.parameters())
    modules = list(units(model))
    _, copies = parked.pieces("params", [params for _, params in modules])
    model.flat.fill_(torch.nan)
    first, last = model.decoder.layers[0], model.decoder.layers[-1]
    events = []
    first.register_forward_hook(lambda *_: events.append("first layer"))

    def copy_last(copy):
        def copied():
            events.append("last copy")
            copy()

        return copied

    pieces = [
        (module, copy_last(copy) if module is last else copy)
        for (module, _), copy in zip(modules, copies[1:], strict=True)
    ]
    onload = Onload([(None, copies[0]), *pieces])
    assert torch.equal(model(ids), want)
    assert events == ["first layer", "last copy"]
    onload.finish()
    assert torch.equal(model(ids), want)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_copy_that_fails_is_the_error_of_who_waits_for_it(monkeypatch):
    monkeypatch.setattr(offload, "copy_stream", late)
    model = Model()

    def fail():
        raise RuntimeError("no memory")

    onload = Onload([(model.embedding, lambda: None), (model.head, fail)])
    with pytest.raises(RuntimeError, match="no memory"):
        model(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="no memory"):
        onload.finish()
    assert not any(m._forward_pre_hooks for m in model.modules())
