"""Takes what a pass is given: checks it, places it on the ranks that work on it, and cuts it into
micro-batches.

A batch that only one rank refuses would leave the others waiting, and ranks with different batches
would train on halves that do not belong together. So before its first collective the ranks of a
pass compare what they were given, and tell each other whether the rows that only some of them hold
are sound.

A batch is placed for the step, or borrowed from where another engine has it. Where passes compute
shared prefixes once (mb_spec.share_prefixes), what sequences share is known from their tokens,
which only the ranks of their data-parallel index hold: each index plans by itself, and they agree
on the number of micro-batches. B samples, b of them held by a rank, S positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megarl.api.batch import Batch, Home, Padded, Tokens
from megarl.api.engine import GIVEN, LossFn, LossWeightFn
from megarl.engine.lm_head import check_outputs
from megarl.engine.micro_batch import GIVEN_IDS, MicroBatch, Sharing, build
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.parallel import exchange, mcore
from megarl.parallel.packing import place_rows, plan_micro_batches, units_of
from megarl.parallel.ranks import Ranks, world_comm
from megarl.parallel.trie import Bytes, plan_tries, token_bytes

_ARGUMENTS = "the call's arguments"
_HOME = "who holds which rows"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Says what a verb asks of a pass: `outputs` at a `temperature`, the sum of a `loss` and the
    `weight` to divide it by, with `backward` its gradients; of whole groups in each micro-batch,
    with `whole_groups`. `keep`: the outputs that are returned by token."""

    verb: str
    outputs: Sequence[str] = ("logprobs",)
    temperature: float = 1.0
    loss: LossFn | None = None
    weight: LossWeightFn | None = None
    backward: bool = False
    whole_groups: bool = False
    keep: Sequence[str] = ()

    @property
    def of_head(self) -> tuple[str, ...]:
        """Returns the outputs that the output layer computes."""
        return tuple(name for name in self.outputs if self.loss is not None or name != ROUTED)


def as_batch(state: EngineState, given: Padded) -> Batch:
    """Makes a Batch, which every rank holds whole, of a plain dict. Raises ValueError, on every
    rank, where the ranks' dicts differ (a hash of 32 MiB takes a core a few milliseconds, and a few
    bytes of it travel) or are no batch; TypeError for a Batch's Tokens. Collective."""
    for name, value in given.items():
        if isinstance(value, Tokens):
            raise TypeError(
                f"{name!r} of a Batch in a plain dict: pass the batch itself, to which keys can be "
                "added, or batch.padded(), a dict of tensors [b,S]"
            )
    if state.layout.world_size > 1:
        _same_everywhere({name: _digest(value) for name, value in given.items()})
    return Batch.from_padded(given)


def check_input(state: EngineState, batch: Batch, ask: Request) -> None:
    """Raises ValueError, on every rank, for a batch or a request that differ between ranks, and for
    those that this engine cannot work on. Collective where there are several ranks.

    The ranks compare the request and the numbers that all of them have; tokens are checked by the
    ranks that hold them."""
    wrong = _wrong_ids(batch, state.model.vocab_size)
    is_wrong = bool(wrong.any())
    if state.layout.world_size > 1:
        request = (ask.verb, *ask.outputs, ask.temperature, ask.whole_groups, *ask.keep)
        is_wrong = _same_everywhere({_ARGUMENTS: _hash(repr(request))} | _digests(batch), is_wrong)
    to_loss = ask.loss is not None
    check_outputs(ask.of_head, state.config.head, backward=ask.backward, to_loss=to_loss)
    if missing := [name for name in ask.keep if name not in ask.outputs]:
        raise ValueError(
            f"keep={missing}: not among what the pass computes, outputs={tuple(ask.outputs)}"
        )
    if ROUTED in ask.keep and state.model.moe is None:
        raise ValueError(f"outputs: {ROUTED!r} needs a mixture-of-experts model")
    _check_given(batch, ask.outputs)
    if not ask.temperature > 0:
        raise ValueError(f"temperature={ask.temperature}: logits are divided by it, it must be > 0")
    if "input_ids" not in batch:
        raise ValueError(f"the batch has no 'input_ids', only {sorted(batch.keys())}")
    if is_wrong:
        _refuse(batch, wrong, state.model.vocab_size)
    if ask.backward and state.replays and ROUTED not in batch:
        raise ValueError(
            f"router_replay={state.config.router_replay}: the batch has no {ROUTED!r} to "
            "replay; put forward()'s output of that name into it, as an actor with "
            "recompute_logprob does, or what the servers said (to_batch does)"
        )


def _check_given(batch: Batch, outputs: Sequence[str]) -> None:
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


def _wrong_ids(batch: Batch, vocab_size: int) -> Tensor:
    """Returns how many ids of each held row are outside of the vocabulary, [b]."""
    counts = torch.zeros(len(batch.rows))
    if "input_ids" not in batch:
        return counts
    ids = batch["input_ids"]
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
    raise ValueError(
        f"input_ids[{row}, {position}] = {int(ids[position])} is outside of the model's "
        f"vocabulary of {vocab_size} ({int(counts.sum())} such tokens in the batch); use the "
        "tokenizer that belongs to the model"
    )


def _same_everywhere(digests: dict[str, int], is_wrong: bool = False) -> bool:
    """Raises ValueError where the ranks have different `digests`; else returns whether one has
    `is_wrong`. Collective."""
    whole = _hash(repr(sorted(digests.items()))) >> 2  # its negative is an int64, too
    bounds = torch.tensor([whole, -whole, int(is_wrong)], device=mcore.device())
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    largest, smallest, wrong_somewhere = bounds.tolist()
    if largest == -smallest:
        return bool(wrong_somewhere)
    of_rank: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_rank, digests)
    ranks = [rank for rank, each in enumerate(of_rank) if each != of_rank[0]]
    keys = {name for each in of_rank for name in each}
    differing = sorted(k for k in keys if len({each.get(k) for each in of_rank}) > 1)
    raise ValueError(
        f"the ranks were given different batches: {', '.join(differing)} of ranks {ranks} differ "
        "from rank 0's; every rank passes the whole batch, the same on all"
    )


def _digests(batch: Batch) -> dict[str, int]:
    """Returns a hash by name: of the per-sample fields, and of what ranks know about each other's
    per-token fields."""
    home = batch.home
    out = {name: _digest(value) for name, value in batch.per_sample.items()}
    out |= {"lengths": _digest(batch.lengths)}
    plan = batch.minibatches if not batch.placed else None  # where its rows will go
    out |= {_HOME: _hash(f"{home.of_rank} {batch.placed} {_digest(home.of_row)} {plan}")}
    for name, tokens in batch.per_token.items():
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


# ---- where a batch is ---------------------------------------------------------------------------


def group_ids(batch: Batch, *, whole_groups: bool) -> Tensor | None:
    """Returns ids [B] of rows that stay together on a rank, with `whole_groups` in a micro-batch
    too; None if each is by itself. Raises ValueError where `whole_groups` has no field to go by."""
    if "unit_ids" in batch or ("rollout_ids" in batch and not whole_groups):
        return batch.unit_ids
    if not whole_groups:
        return None
    if "group_ids" not in batch:
        raise ValueError(
            "whole_groups=True needs batch['group_ids'] [B]: which rows belong together"
        )
    ids: Tensor = batch["group_ids"]
    return ids


def home_of(state: EngineState, batch: Batch, *, whole_groups: bool = False) -> Home:
    """Returns the batch's own home if this engine can work on it there, else the home that this
    engine would give it; where prefixes are shared, rows of a group stay together in it as far as
    the work stays even. Raises ValueError for a batch of other ranks than the engine's."""
    _check_ranks(batch)
    of_rank = tuple(c.dp for c in state.layout.all_coords)
    units = group_ids(batch, whole_groups=whole_groups)
    if batch.placed and batch.home.of_rank == of_rank and _whole(units, batch.home.of_row):
        return batch.home
    of_row = place_rows(
        batch.lengths.tolist(),
        torch.arange(len(batch)) if units is None else units,
        batch.minibatches,
        dp=state.layout.dp,
        cost=state.cost,
        slot=state.align.slot,
        together=batch.get("group_ids") if state.sharing else None,
    )
    return Home(of_rank, of_row)


def _check_ranks(batch: Batch) -> None:
    """Raises ValueError unless the batch is of the ranks of the world in scope."""
    of_batch, of_engine = batch.comm, world_comm()
    if of_batch is of_engine or not isinstance(of_batch, Ranks | None):
        return
    named = [f"ranks {list(c.ranks)}" if c else "one rank alone" for c in (of_batch, of_engine)]
    raise ValueError(
        f"this batch is of {named[0]}, the engine of {named[1]}: make the batch on the engine's "
        "ranks, inside `with world.scope():`"
    )


def _whole(units: Tensor | None, of_row: Tensor) -> bool:
    """Returns whether every unit stands at one data-parallel index."""
    if units is None:
        return True
    index = of_row.tolist()
    return all(len({index[r] for r in unit}) == 1 for unit in units_of(units))


def place(
    state: EngineState, batch: Batch, names: Iterable[str] | None = None, **how: Any
) -> Batch:
    """Returns the batch, or its fields `names`, where this engine works on it. A batch that has not
    been placed in this step is placed for good; of one placed for another layout, a copy is made of
    what is not at hand. how: of `home_of`. Collective."""
    home = home_of(state, batch, **how)
    if not batch.placed:
        exchange.place(batch, home)
    at_hand = home is batch.home
    if names is not None:
        batch = batch.select(torch.arange(len(batch)), [name for name in names if name in batch])
    return batch if at_hand else exchange.placed(batch, home)


# ---- which rows make a micro-batch ---------------------------------------------------------------


def micro_batches(state: EngineState, batch: Batch, ask: Request) -> list[MicroBatch]:
    """Cuts this rank's rows of a batch that has been placed into micro-batches, as many as on
    every data-parallel index, and under the interleaved schedule a multiple of pp. Collective where
    prefixes may be shared."""
    spec, layout, match = state.config.mb_spec, state.layout, _match_field(state, batch)
    larger = None if ask.backward else spec.forward_max_tokens_per_mb
    max_tokens = larger or spec.max_tokens_per_mb  # of a device
    groups = group_ids(batch, whole_groups=True) if ask.whole_groups else None
    multiple_of = layout.pp if layout.vpp > 1 else 1
    plan = None
    if state.sharing:
        plan = _plan_tries(state, state.sharing, batch, match, max_tokens, groups, multiple_of)
    shares = plan is not None
    if plan is None:
        plan = plan_micro_batches(
            batch.lengths.tolist(),
            dp=layout.dp,
            max_tokens=max_tokens * layout.cp,
            align=state.align,
            multiple_of=multiple_of,
            cost=state.cost,
            groups=None if groups is None else units_of(groups),
            index=batch.home.of_row.tolist(),
        )[state.groups.coords.dp]
    return build(
        batch,
        plan,
        state.align,
        cp=layout.cp,
        cp_rank=state.groups.coords.cp,
        given=not set(GIVEN).isdisjoint(ask.outputs),
        share_prefixes=shares,
        match=match if shares else None,
    )


def _plan_tries(
    state: EngineState,
    sharing: Sharing,
    batch: Batch,
    match: str | None,
    max_tokens: int,
    groups: Tensor | None,
    multiple_of: int,
) -> list[list[int]] | None:
    """Returns the rows of each micro-batch of tries, or None, on every rank, where tries do not
    pay. Collective."""
    rows = batch.rows
    needs = plan_tries(
        _row_bytes(batch, match),
        max_tokens=max_tokens,
        align=state.align,
        cost=state.cost,
        units=None if groups is None else units_of(groups[rows]),
    )
    whole = sum(map(state.cost, batch.lengths[rows].tolist()))
    own = needs.count, whole, sum(item.work for item in needs.items)
    counts, *work = zip(*Ranks.of().gather(own, "micro_batches"), strict=True)
    if not sharing.pays(*map(sum, work)):
        return None
    filled = needs.micro_batches(-(-max(counts) // multiple_of) * multiple_of)
    return [sorted(rows[mb].tolist()) for mb in filled]


def _match_field(state: EngineState, batch: Batch) -> str | None:
    """Returns the field that tokens must have equal to be one beside their ids: the routes that a
    pass over the batch replays."""
    return ROUTED if state.sharing and state.replays and ROUTED in batch else None


def _row_bytes(batch: Batch, field: str | None) -> list[Bytes]:
    """Returns token_bytes [n,w] of each row that this rank holds."""
    ids = batch["input_ids"]
    whole = token_bytes(ids.values, None if field is None else batch[field].values)
    ends = ids.lengths.cumsum(0)
    return [whole[e - n : e] for n, e in zip(ids.lengths.tolist(), ends.tolist(), strict=True)]
