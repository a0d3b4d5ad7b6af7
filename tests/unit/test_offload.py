"""Storages leave memory and come back under every tensor that looks at them."""

import torch

from megarl.engine.offload import ParkedStorages


def test_views_survive_and_scratch_comes_back_as_zeros():
    buffer = torch.arange(12.0)
    param = torch.nn.Parameter(buffer[2:8].view(2, 3))
    shard = param.data.view(-1)[:3]
    moment = torch.full((4,), 7.0, dtype=torch.bfloat16)
    grad = torch.ones(5)
    empty = torch.empty(0)
    parked = ParkedStorages()
    parked.park([param, shard, moment, empty], scratch=[grad[1:], buffer])
    assert buffer.untyped_storage().nbytes() == 0
    assert moment.untyped_storage().nbytes() == 0 and grad.untyped_storage().nbytes() == 0
    parked.restore()
    assert buffer.tolist() == list(range(12))  # kept, although named as scratch too
    assert param.tolist() == [[2, 3, 4], [5, 6, 7]] and shard.tolist() == [2, 3, 4]
    assert moment.tolist() == [7.0] * 4 and grad.tolist() == [0.0] * 5
    buffer[2] = -1.0
    assert param[0, 0] == -1.0  # still the same memory
    parked.park([param])  # reusable
    parked.restore()
    assert param[0, 0] == -1.0
