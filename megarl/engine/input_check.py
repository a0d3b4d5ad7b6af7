"""Checks what a pass is given, before its first collective.

A batch that only one rank refuses would leave the others waiting, and ranks with different batches
would train on halves that do not belong together. So the ranks first compare what they were given,
and tell each other whether the rows that only some of them hold are sound. B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens, row_lengths
from megarl.engine.lm_head import check_outputs
from megarl.engine.micro_batch import GIVEN_IDS
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.parallel import mcore
from megarl.parallel.vocab_parallel import GIVEN

_ARGUMENTS = "the call's arguments"
_HOME = "who holds which rows"


def check_input(
    state: EngineState,
    verb: str,
    given: Batch | Padded,
    outputs: Sequence[str],
    *,
    backward: bool,
    temperature: float,
    **arguments: Any,
) -> None:
    """Raises ValueError, on every rank, for a batch or arguments that differ between ranks, and for
    those that this engine cannot work on; TypeError for a plain dict of a Batch's Tokens.
    Collective where there are several ranks.

    The ranks compare `verb`, its arguments and the bytes of every tensor that all ranks have (a
    hash of 32 MiB takes a core a few milliseconds, and a few bytes of it travel); tokens that only
    some ranks hold are checked by these ranks."""
    if not isinstance(given, Batch):
        _check_no_tokens(given)
    wrong = _wrong_ids(given, state.model.vocab_size) if isinstance(given, Batch) else None
    found_wrong = wrong is not None and bool(wrong.any())
    if state.layout.world_size > 1:
        asked = repr((verb, tuple(outputs), temperature, sorted(arguments.items())))
        found_wrong = _same_everywhere(given, asked, found_wrong)
    from_head = [o for o in outputs if verb != "forward" or o != ROUTED]  # losses are not given it
    check_outputs(from_head, state.config.head, backward=backward, to_loss=verb != "forward")
    _check_given(given, outputs)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: logits are divided by it, it must be > 0")
    if not isinstance(given, Batch):
        row_lengths(given)
        _check_ids(given, state.model.vocab_size)
    elif "input_ids" not in given:
        raise ValueError(f"the batch has no 'input_ids', only {sorted(given.keys())}")
    elif found_wrong:
        assert wrong is not None
        _refuse(given, wrong, state.model.vocab_size)
    if backward and state.config.replays and ROUTED not in given:
        raise ValueError(
            f"router_replay={state.config.router_replay}: the batch has no {ROUTED!r} to "
            "replay; put forward()'s output of that name into it, as an actor with "
            "recompute_logprob does, or what the servers said (to_batch does)"
        )


def _check_no_tokens(given: Padded) -> None:
    for name, value in given.items():
        if isinstance(value, Tokens):
            raise TypeError(
                f"{name!r} of a Batch in a plain dict: pass the batch itself, to which keys can be "
                "added, or batch.padded(), a dict of tensors [b,S]"
            )


def _check_given(batch: Batch | Padded, outputs: Sequence[str]) -> None:
    """Raises ValueError where outputs are about given tokens, and the batch does not give any."""
    if set(GIVEN).isdisjoint(outputs):
        return
    if GIVEN_IDS not in batch:
        raise ValueError(f"outputs={tuple(outputs)}: the batch has no {GIVEN_IDS!r} [B,S,n]")
    ids = batch[GIVEN_IDS]
    values = ids.values[None] if isinstance(ids, Tokens) else ids
    if values.ndim != 3 or values.is_floating_point():
        shape = ["B", "S", *values.shape[2:]]
        raise ValueError(
            f"{GIVEN_IDS!r} of shape {shape}, {values.dtype}: it must be integers [B,S,n], the ids "
            "that each position is asked about"
        )


def _check_ids(batch: Padded, vocab_size: int) -> None:
    """Raises ValueError for an id outside of the vocabulary; padding may hold any."""
    ids = batch["input_ids"]
    if not ids.numel() or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return
    wrong = ((ids < 0) | (ids >= vocab_size)) & batch["attention_mask"].bool()
    if wrong.any():
        row, position = wrong.nonzero()[0].tolist()
        raise _outside(row, position, int(ids[row, position]), int(wrong.sum()), vocab_size)


def _wrong_ids(batch: Batch, vocab_size: int) -> Tensor | None:
    """Returns how many ids of each held row are outside of the vocabulary, [b], if it has ids."""
    if "input_ids" not in batch:
        return None
    ids, counts = batch["input_ids"], torch.zeros(len(batch["input_ids"].lengths))
    if not len(ids.values) or (int(ids.values.min()) >= 0 and int(ids.values.max()) < vocab_size):
        return counts
    wrong = (ids.values < 0) | (ids.values >= vocab_size)
    row = torch.repeat_interleave(torch.arange(len(ids.lengths)), ids.lengths)
    return counts.index_add_(0, row, wrong.float())


def _refuse(batch: Batch, wrong: Tensor, vocab_size: int) -> None:
    """Raises the ValueError about the first bad row, whoever holds it. Collective."""
    counts = batch.gather(wrong)
    row = int(counts.nonzero()[0])
    ids = batch.fetch([row], ["input_ids"])["input_ids"][0]
    position = int(((ids < 0) | (ids >= vocab_size)).nonzero()[0])
    raise _outside(row, position, int(ids[position]), int(counts.sum()), vocab_size)


def _outside(row: int, position: int, value: int, count: int, vocab_size: int) -> ValueError:
    return ValueError(
        f"input_ids[{row}, {position}] = {value} is outside of the model's "
        f"vocabulary of {vocab_size} ({count} such tokens in the batch); use the "
        "tokenizer that belongs to the model"
    )


def _same_everywhere(given: Batch | Padded, asked: str, found_wrong: bool) -> bool:
    """Raises ValueError where the ranks were given different things; else returns whether one
    `found_wrong`."""
    digests = {_ARGUMENTS: _hash(asked)} | _digests(given)
    whole = _hash(repr(sorted(digests.items()))) >> 2  # its negative is an int64, too
    bounds = torch.tensor([whole, -whole, int(found_wrong)], device=mcore.device())
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    largest, smallest, wrong_somewhere = bounds.tolist()
    if largest == -smallest:
        return bool(wrong_somewhere)
    found: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, digests)
    ranks = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    keys = {name for theirs in found for name in theirs}
    differing = sorted(k for k in keys if len({theirs.get(k) for theirs in found}) > 1)
    raise ValueError(
        f"the ranks were given different batches: {', '.join(differing)} of ranks {ranks} differ "
        "from rank 0's; every rank passes the whole batch, the same on all"
    )


def _digests(given: Batch | Padded) -> dict[str, int]:
    """Returns a hash by name: of every tensor of a dict; of a Batch, of its per-sample fields and
    of what ranks know about each other's per-token fields."""
    if not isinstance(given, Batch):
        return {name: _digest(given[name]) for name in given}
    home = given.home
    out = {name: _digest(value) for name, value in given.per_sample.items()}
    out |= {"lengths": _digest(given.lengths)}
    plan = given.minibatches if not given.placed else None  # where its rows will go
    out |= {_HOME: _hash(f"{home.of_rank} {given.placed} {_digest(home.of_row)} {plan}")}
    for name, tokens in given.per_token.items():
        out[name] = _hash(f"{tokens.values.dtype} {tuple(tokens.values.shape[1:])}")
    return out


def _hash(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode()))


def _digest(tensor: Tensor) -> int:
    """Returns a hash of dtype, shape and bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(raw.numpy().data)
    return int(digest.intdigest())
