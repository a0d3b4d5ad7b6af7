"""Changes of slices: what lands is what a whole message would have put there, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.models.piece_table import View
from megarl.transfer.geometry import Slice
from megarl.transfer.moves import Parts, Slot
from megarl.weight_sync.changes import SliceChanges
from megarl.weight_sync.receiver.megarl_receiver import messages
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import Holding
from megarl.weight_sync.receiver.megarl_receiver.messages import View as There
from megarl.weight_sync.receiver.megarl_receiver.messages import land

CPU = torch.device("cpu")
ROWS, COLUMNS = 30, 40
NUMBERS = ROWS * COLUMNS
SPLIT = 17 * COLUMNS  # numbers of the first of two views
NBYTES = 50 * 4 + 2 * NUMBERS * 2


def parts() -> Parts:
    """b in fp32; a part of w; all of w again, for another parameter."""
    b = Slice("b", (0,), (50,), "b", (View(3, (50,), (1,)),))
    w = Slice("w", (0,), (NUMBERS,), "w", (View(0, (ROWS, COLUMNS), (COLUMNS, 1)),))
    ends = [0, 200, 200 + 2 * NUMBERS, NBYTES]
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16]
    return Parts(NBYTES, [*map(Slot, [b, w, w], dtypes, ends, ends[1:])])


# transposed, in two views with other numbers between; held in a wider dtype
THERE: list[There] = [
    (0, 200, torch.float32, "b", 4, [50], [2]),
    (200, 200 + 2 * SPLIT, torch.bfloat16, "w", 5, [17, COLUMNS], [1, 100]),
    (200 + 2 * SPLIT, 200 + 2 * NUMBERS, torch.bfloat16, "w", 40, [13, COLUMNS], [1, 100]),
    (200 + 2 * NUMBERS, NBYTES, torch.bfloat16, "wide", 0, [NUMBERS], [1]),
]  # fmt: skip


def server() -> dict[str, torch.Tensor]:
    wide = torch.full((ROWS, COLUMNS), -1.0)
    return {
        "b": torch.full((120,), -1.0),
        "w": torch.full((41, 100), -1.0).bfloat16(),
        "wide": wide,
    }


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with mock.patch.object(messages, "CHUNK", 700):
        yield


def sent(
    changes: SliceChanges, params: dict[str, torch.Tensor], message: Any, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of a message and its bytes, as they go out."""
    heads, *rounds = changes.messages([[(0, 0, message)]], params, CPU, whole=whole)
    encoded = [give() for outgoing in rounds for _, _, give in outgoing]
    return heads[0][2](), encoded[0] if encoded else torch.empty(0, dtype=torch.uint8)


def test_changes_land_as_the_whole_message_does() -> None:
    """Trainers hold fp32 and send bf16, of which the server keeps a part in fp32."""
    torch.manual_seed(0)
    params = {"b": torch.randn(60), "w": torch.randn(ROWS, COLUMNS)}
    held, expected, message, changes = server(), server(), parts(), SliceChanges()
    lengths = []
    for share in (1.0, 0.0, 0.004, 0.1, 0.6, 1.0):
        for p in params.values():
            p[torch.rand(p.shape) < share] *= -2
        head, encoded = sent(changes, params, message, whole=not lengths)
        _, whole = sent(SliceChanges(), params, message, whole=True)
        assert head[0] == len(encoded) and len(whole) == NBYTES
        land(held, THERE, encoded, int(head[1]))
        land(expected, THERE, whole, 0)
        for name, p in expected.items():
            assert torch.equal(held[name], p), (name, share)
        lengths.append(len(encoded))
        changes.keep("v1", [[(0, 0, message)]], params)
    assert held["wide"][0, 0] == params["w"][0, 0].bfloat16(), "the last was whole"
    assert lengths[0] == lengths[-1] == NBYTES and lengths[1] == 0
    assert lengths[2] < 0.15 * NBYTES and lengths[2] < lengths[3] < 0.3 * NBYTES


def test_changes_of_another_message_are_refused() -> None:
    params = {"b": torch.zeros(60), "w": torch.zeros(ROWS, COLUMNS)}
    changes = SliceChanges()
    changes.keep("v1", [[(0, 0, parts())]], params)
    params["w"][3, 4] = 1
    head, encoded = sent(changes, params, parts(), whole=False)
    for views, message in ((THERE[:-1], encoded), (THERE, encoded[:-1])):
        with pytest.raises(ValueError, match="changes of"):
            land(server(), views, message, int(head[1]))


def test_other_numbers_of_parameters_in_one_memory_are_noticed() -> None:
    """A table names the first of them."""
    whole = torch.randn(6, 4)
    params, holding = {"q": whole[:4], "k": whole[4:], "other": torch.zeros(2)}, Holding()
    holding.note("v1", params, ["q"])
    params["other"] += 1
    assert holding.look(params) == "v1"
    params["k"] += 1
    assert holding.look(params) is None


def test_weights_from_elsewhere_are_noticed() -> None:
    """Loaders copy into `param.data`, which torch's own version counters do not see."""
    torch.manual_seed(0)
    params = {"w": torch.randn(6, 10).bfloat16(), "b": torch.tensor(2.0), "t": torch.randn(8, 6).T}
    holding, before = Holding(), {n: p.clone() for n, p in params.items()}
    assert holding.look(params) is None
    for name, other in (("w", before["w"].flip(0)), ("b", torch.tensor(2.5)), ("t", -before["t"])):
        holding.note("v1", params, params)
        params[name].data.copy_(before[name])
        assert holding.look(params) == "v1", "the same weights, wherever they come from"
        params[name].data.copy_(other)
        assert holding.look(params) is None and holding.look(before) is None
