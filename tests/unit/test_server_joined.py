"""Joined layers give what the layers give one by one, wherever updates put their weights."""

from __future__ import annotations

import pytest
import torch

from megarl.server.kv_cache import Joined


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
