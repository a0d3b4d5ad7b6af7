"""tests/waits.py: what would wait for a GPU is counted, once each, at its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megarl.parallel.mcore as mcore
from megarl.algos import critic_loss, example
from megarl.algos.losses import LOSS_WEIGHTS
from megarl.algos.policy_loss import PolicyLoss
from megarl.algos.surrogates import CISPO, RATIOS
from megarl.models.attention_batching import make_plan
from megarl.models.trie_attention import block_mask
from megarl.parallel.packing import Segment
from tests.waits import DEVICE, Device, pretend_device


def indexed(x: torch.Tensor) -> None:
    x[x > 1] = x[:1].clone()


def gradient(x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(x.requires_grad_().square().sum(), x)
    return grad


def copied_out(x: torch.Tensor) -> None:
    torch.empty(3).copy_(x)


# each gets a tensor on the device, 0, 1, 2
PLANTED: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "item": ("item", lambda x: x[1].item()),
    "int": ("item", lambda x: int(x[1])),
    "float": ("item", lambda x: float(x[1])),
    "bool": ("item", lambda x: bool(x[1])),
    "if": ("item", lambda x: 1 if (x > 0).any() else 0),
    "a list of scalars": ("item", lambda x: torch.tensor([x[1]])),
    "tolist": ("tolist", lambda x: x.tolist()),
    "numpy": ("numpy", lambda x: x.numpy()),
    "cpu": ("cpu", lambda x: x.cpu()),
    "to(cpu)": ("cpu", lambda x: x.to("cpu")),
    "to(device=cpu)": ("cpu", lambda x: (2 * x).to(device=torch.device("cpu"))),
    "copy_ to the host": ("cpu", copied_out),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "where": ("nonzero", lambda x: torch.where(x > 0)),
    "mask": ("mask", lambda x: x[x > 1]),
    "numbers of the host's list": ("copy", lambda x: x[[0, 2]]),
    "written by a mask": ("mask", indexed),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 1)),
    "repeat_interleave": ("repeat_interleave", lambda x: torch.repeat_interleave(x, x)),
    "unique": ("unique", lambda x: x.unique()),
    "unique_consecutive": ("unique", lambda x: torch.unique_consecutive(x)),
    "equal": ("equal", lambda x: torch.equal(x, x + 1)),
    "bincount": ("bincount", lambda x: x.bincount()),
    "tensor(device)": ("copy", lambda x: torch.tensor([1, 2], device=x.device)),
    "to(device)": ("copy", lambda x: torch.arange(2).to(mcore.device())),
    "pageable": ("pageable", lambda x: torch.arange(2).to(mcore.device(), non_blocking=True)),
    "cuda()": ("copy", lambda x: torch.arange(2).cuda()),
    "cuda by name": ("copy", lambda x: torch.tensor([1.0], device="cuda")),
    "copy_ to the device": ("copy", lambda x: x.copy_(torch.arange(3))),
    "pinned, and waited for": ("copy", lambda x: torch.arange(2).pin_memory().to(x.device)),
    "synchronize": ("synchronize", lambda x: torch.cuda.synchronize()),
    "stream": ("synchronize", lambda x: torch.cuda.current_stream().synchronize()),
    "a number of a gradient": ("item", lambda x: gradient(x.float()).sum().item()),
}  # fmt: skip
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (2 * x + x.new_ones(3)).float().norm(),
    "made there": lambda x: torch.zeros(3, device=x.device) + torch.arange(3, device="cuda"),
    "index": lambda x: x[x],
    "slice": lambda x: x[1:].clone(),
    "filled by a mask": lambda x: x.masked_fill_(x > 1, 5),
    "set by a mask": lambda x: x.__setitem__(x > 1, 5),
    "where of three": lambda x: torch.where(x > 1, x, 0),
    "of known size": lambda x: torch.repeat_interleave(x, x, output_size=3),
    "pinned": lambda x: torch.arange(2).pin_memory().to(x.device, non_blocking=True),
    "there already": lambda x: x.to(mcore.device()),
    "another dtype": lambda x: x.to(torch.float64),
    "the host's own": lambda x: (torch.arange(3).tolist(), torch.ones(2)[torch.ones(2).bool()]),
}


def waits(work: Callable[[torch.Tensor], Any]) -> dict[str, int]:
    """Returns how often `work` waits, by kind."""
    with pretend_device() as device:
        x = torch.arange(3).to(mcore.device())
        device.take()
        work(x)
        places = device.take()
    kinds: dict[str, int] = {}
    for place, times in places.items():
        kinds[place.kind] = kinds.get(place.kind, 0) + times
    return kinds


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wait_is_counted_once(name: str) -> None:
    kind, work = PLANTED[name]
    with pretend_device() as device:
        x = torch.arange(3).to(mcore.device())
        device.take()
        work(x)
        ((place, times),) = device.take().items()
    assert (place.kind, place.file, times) == (kind, "test_waits.py", 1)


@pytest.mark.parametrize("name", FREE)
def test_what_goes_on_without_the_device_is_not(name: str) -> None:
    assert waits(FREE[name]) == {}


@pytest.mark.parametrize("window, cp", [(None, 1), (20, 1), (None, 2)])
def test_the_plan_of_attention_is_made_on_the_host(window: int | None, cp: int) -> None:
    assert waits(lambda _: make_plan([40, 100, 4, 36], cp, 0, DEVICE, window)) == {}


def test_flex_attentions_mask_is_made_on_the_host() -> None:
    """It is for GPUs alone: no step on a CPU makes one. Where torch's vmap has its indices is
    not known: they count as copies."""
    segments = [Segment(0, 300, None), Segment(300, 400, 0), Segment(400, 900, 0)]
    assert waits(lambda _: block_mask(segments, DEVICE)) == {"copy": 4}


LOSSES: dict[str, Callable[..., Any]] = {
    **{ratio: PolicyLoss(ratio=ratio) for ratio in RATIOS},
    **{agg: PolicyLoss(loss_agg=agg, kl_coef=0.1, entropy_coef=0.1) for agg in LOSS_WEIGHTS},
    "cispo": PolicyLoss(surrogate=CISPO(eps_high=0.2)),
    "critic": critic_loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_statistics_wait_for_nothing(name: str) -> None:
    with pretend_device() as device:
        fields = {k: v.to(DEVICE) for k, v in example.batch.items()}
        logprobs = example.new.clone().to(DEVICE).requires_grad_()
        outputs = {"logprobs": logprobs, "values": logprobs, "entropy": -logprobs.detach()}
        device.take()
        LOSSES[name](outputs, fields)[0].backward()
        assert not device.take()


def test_numbers_are_the_hosts_and_devices_differ() -> None:
    def on(device: Device) -> tuple[Any, ...]:
        x = torch.arange(4.0)
        moved = x.to(mcore.device())
        moved += 1
        back = moved.cpu()
        back += 1
        return x.tolist(), moved.tolist(), back.tolist(), x.device, moved.device, back.device

    with pretend_device() as device:
        x, moved, back, *devices = on(device)
    assert (x, moved, back) == ([0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5])
    assert devices == [torch.device("cpu"), DEVICE, torch.device("cpu")]


def test_a_thread_is_counted_too() -> None:
    import threading

    def work(x: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: (2 * x).tolist())
        thread.start()
        thread.join()

    assert waits(work) == {"tolist": 1}
