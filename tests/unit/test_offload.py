"""Storages leave memory and come back under every tensor that looks at them."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.engine.offload import (
    ParkedStorages,
    check_parts,
    memory_in_use,
    other_bytes_in_use,
)
from megarl.parallel import mcore


def test_views_survive_and_what_is_not_kept_comes_back_as_zeros():
    buffer = torch.arange(12.0)
    param = torch.nn.Parameter(buffer[2:8].view(2, 3))
    shard = param.data.view(-1)[:3]
    moment = torch.full((4,), 7.0, dtype=torch.bfloat16)
    grad = torch.ones(5)
    empty = torch.empty(0)
    parked = ParkedStorages()
    # a storage counts once, however many look at it
    assert parked.park("weights", [param, shard, empty]) == 12 * 4
    assert parked.park("state", [moment]) == 4 * 2
    assert parked.park("grads", [grad[1:], buffer], keep=False) == 5 * 4  # the buffer is away
    for t in (buffer, moment, grad):
        assert t.untyped_storage().nbytes() == 0
    assert all(name in parked for name in ("weights", "state", "grads"))
    assert [parked.restore(n) for n in ("grads", "weights", "state")] == [20, 48, 8]
    assert "weights" not in parked
    assert buffer.tolist() == list(range(12))
    assert param.tolist() == [[2, 3, 4], [5, 6, 7]] and shard.tolist() == [2, 3, 4]
    assert moment.tolist() == [7.0] * 4 and grad.tolist() == [0.0] * 5
    buffer[2] = -1.0
    assert param[0, 0] == -1.0  # still the same memory
    parked.park("weights", [param])  # reusable
    parked.restore("weights")
    assert param[0, 0] == -1.0


def test_what_is_away_can_be_read_where_it_rests():
    buffer = torch.arange(12.0)
    param, gone = torch.nn.Parameter(buffer[2:8].view(2, 3).t()), torch.ones(3)
    here = torch.ones(2)
    parked = ParkedStorages()
    parked.park("weights", [param])
    parked.park("grads", [gone], keep=False)
    with parked.readable([param, buffer, here, gone, param]):
        assert param.tolist() == [[2, 5], [3, 6], [4, 7]] and buffer.tolist() == list(range(12))
        assert here.tolist() == [1, 1] and gone.untyped_storage().nbytes() == 0
    assert param.untyped_storage().nbytes() == buffer.untyped_storage().nbytes() == 0
    parked.restore("weights")
    assert param.tolist() == [[2, 5], [3, 6], [4, 7]]
    buffer[2] = -1.0
    assert param[0, 0] == -1.0  # the same memory as before


def test_what_belongs_to_another_part_stays():
    buffer, moment = torch.arange(6.0), torch.ones(3)
    parked = ParkedStorages()
    # main weights of fp32 training are a part of the model's
    assert parked.park("optimizer", [buffer[:3], moment], but_not=[buffer]) == 3 * 4
    assert buffer.tolist() == list(range(6)) and moment.untyped_storage().nbytes() == 0
    parked.restore("optimizer")
    assert moment.tolist() == [1.0] * 3


def test_parts_are_named():
    assert check_parts(["grads", "params"]) == ("params", "grads")
    for wrong in ("params", ("weights",)):
        with pytest.raises(ValueError, match=r"parts=.*'params', 'optimizer', 'grads'"):
            check_parts(wrong)
    assert memory_in_use() > 0


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied as bytes, as storages are."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8:
            self.nbytes += args[0].nbytes
        return op(*args, **(kwargs or {}))


def test_numbers_that_did_not_change_are_not_copied_back() -> None:
    weights = torch.arange(8.0)
    parked = ParkedStorages()
    parked.park("weights", [weights])
    for _ in range(2):
        parked.remember("weights")
        parked.restore("weights")
        assert weights.tolist() == list(range(8))
        with Copies() as copies:
            assert parked.park("weights", [weights], release=False) == 32
        assert copies.nbytes == 0
    parked.restore("weights")  # nobody says that they stay as they are
    weights += 1
    with Copies() as copies:
        parked.park("weights", [weights])
    assert copies.nbytes == 32
    parked.restore("weights")
    assert weights.tolist() == list(range(1, 9))


def test_new_numbers_are_kept_after_a_restore_that_found_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, parked = torch.arange(8.0), ParkedStorages()
    parked.park("weights", [weights])
    parked.remember("weights")

    def no_room(*args: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.UntypedStorage, "resize_", no_room)
    with pytest.raises(RuntimeError, match="out of memory"):
        parked.restore("weights")
    parked.restore("weights")  # by one who changes them, and so remembers nothing
    weights += 1
    parked.park("weights", [weights])
    parked.restore("weights")
    assert weights.tolist() == list(range(1, 9))


def test_what_others_hold_of_a_device_is_what_is_taken_besides_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert other_bytes_in_use(5) is None  # on a CPU
    monkeypatch.setattr(mcore, "on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 100))
    assert other_bytes_in_use(25) == 15
