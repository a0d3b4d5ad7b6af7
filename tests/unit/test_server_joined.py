"""Joined layers give what the layers give one by one, wherever updates put their weights."""

from __future__ import annotations

import pytest
import torch

from megarl.server.args import ServerArgs
from megarl.server.kv_cache import Joined
from megarl.server.runner import ModelRunner
from megarl.server.weights import WeightStore
from tests.tiny import save_tiny
from tests.unit.test_server_runner import make_sequence, prompts, teacher_forced


@pytest.mark.parametrize("bias", [False, True])
def test_neighbours_are_one_weight_and_others_are_not(bias):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, n, bias=bias).requires_grad_(False) for n in (8, 4, 4)]
    x = torch.randn(5, 16)
    joined = Joined(layers)
    weight, _ = joined.whole()
    assert weight.data_ptr() == layers[0].weight.data_ptr() and weight.shape == (16, 16)
    with torch.inference_mode():
        layers[1].weight.mul_(2.0)  # an update in place is seen
        torch.testing.assert_close(joined(x), torch.cat([f(x) for f in layers], -1))
        layers[1].weight.data = torch.randn(4, 16)  # a bucket that became the weight
        assert joined.whole() is None
        torch.testing.assert_close(joined(x), torch.cat([f(x) for f in layers], -1))
        parts = torch.randn(16, 16).split([8, 4, 4])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight.data = part
        assert joined.whole() is not None
        torch.testing.assert_close(joined(x), torch.cat([f(x) for f in layers], -1))


@pytest.mark.parametrize("order", [1, -1])
def test_weights_that_are_adopted_in_any_order_are_served(order, tmp_path):
    path = save_tiny(tmp_path, "qwen3", layers=1)
    runner, fresh = (
        ModelRunner(ServerArgs(model_path=str(path), dtype="float32", device="cpu"))
        for _ in range(2)
    )
    new = {n: t + 0.01 for n, t in WeightStore(fresh.model).tensors.items()}
    WeightStore(fresh.model).load(new.items())
    given = prompts([5, 9])
    want = teacher_forced(fresh, [make_sequence(p) for p in given], steps=3)
    teacher_forced(runner, [make_sequence(p) for p in given], steps=3)  # views are made
    names = list(new)[::order]
    flat = torch.cat([new[n].flatten() for n in names])
    cut = flat.split([new[n].numel() for n in names])
    adopted = {n: part.view(new[n].shape) for n, part in zip(names, cut, strict=True)}
    WeightStore(runner.model).adopt(adopted)
    runner.cache.clear()
    got = teacher_forced(runner, [make_sequence(p) for p in given], steps=3)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
