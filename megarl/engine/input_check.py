"""The engine's door: what a pass is given is checked here, before its first collective.

A batch that only one rank refuses would leave the others waiting, and ranks with different batches
would train on halves that do not belong together. So the ranks first compare what they were given;
from then on each of them finds what the others find. B sequences, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megarl.api.engine import Batch
from megarl.engine.lm_head import check_outputs
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.parallel import mcore
from megarl.parallel.packing import check_right_padded

_ARGUMENTS = "the call's arguments"


def check_input(
    state: EngineState, verb: str, batch: Batch, outputs: Sequence[str], *, backward: bool,
    temperature: float, **arguments: Any,
) -> None:  # fmt: skip
    """ValueError, on every rank, for a batch or arguments that differ between ranks, and for those
    that this engine cannot work on. Collective where there are several ranks.

    What `verb` is, what it was asked and the bytes of every tensor are compared: a hash of 32 MiB
    takes a core a few milliseconds, and 16 bytes of it travel.
    """
    if state.layout.world_size > 1:
        asked = repr((verb, tuple(outputs), temperature, sorted(arguments.items())))
        _same_everywhere(batch, asked)
    from_head = [o for o in outputs if verb != "forward" or o != ROUTED]  # losses are not given it
    check_outputs(from_head, state.config.head, backward=backward)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: logits are divided by it, it must be > 0")
    check_right_padded(batch)
    _check_ids(batch, state.model.vocab_size)
    if backward and state.config.moe.router_replay and ROUTED not in batch:
        raise ValueError(
            f"moe.router_replay=True: the batch has no {ROUTED!r} to replay; put forward()'s "
            "output of that name into it, as an actor with recompute_logprob does"
        )


def _check_ids(batch: Batch, vocab_size: int) -> None:
    """Raises ValueError for an id outside of the vocabulary; padding may hold any."""
    ids = batch["input_ids"]
    if not ids.numel() or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    wrong = ((ids < 0) | (ids >= vocab_size)) & batch["attention_mask"].bool()
    if not wrong.any():
        return
    row, position = wrong.nonzero()[0].tolist()
    raise ValueError(
        f"input_ids[{row}, {position}] = {int(ids[row, position])} is outside of the model's "
        f"vocabulary of {vocab_size} ({int(wrong.sum())} such tokens in the batch); use the "
        "tokenizer that belongs to the model"
    )


def _same_everywhere(batch: Batch, asked: str) -> None:
    digests = {_ARGUMENTS: xxhash.xxh3_64_intdigest(asked.encode())}
    digests |= {name: _digest(batch[name]) for name in sorted(batch)}
    whole = xxhash.xxh3_64_intdigest(repr(digests).encode()) >> 2  # its negative is an int64, too
    bounds = torch.tensor([whole, -whole], device=mcore.device())
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    largest, smallest = bounds.tolist()
    if largest == -smallest:
        return
    found: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, digests)
    ranks = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    keys = {name for theirs in found for name in theirs}
    differing = sorted(k for k in keys if len({theirs.get(k) for theirs in found}) > 1)
    raise ValueError(
        f"the ranks were given different batches: {', '.join(differing)} of ranks {ranks} differ "
        "from rank 0's; every rank passes the whole batch, the same on all"
    )


def _digest(tensor: torch.Tensor) -> int:
    """Returns a hash of dtype, shape and bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(raw.numpy().data)
    return digest.intdigest()
