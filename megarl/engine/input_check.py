"""Checks what a pass is given, before its first collective.

A batch that only one rank refuses would leave the others waiting, and ranks with different batches
would train on halves that do not belong together. So the ranks first compare what they were given,
and tell each other whether the rows that only some of them hold are sound. B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import GIVEN, LossFn, LossWeightFn
from megarl.engine.lm_head import check_outputs
from megarl.engine.micro_batch import GIVEN_IDS
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.parallel import mcore

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
    ranks = [rank for rank, theirs in enumerate(of_rank) if theirs != of_rank[0]]
    keys = {name for theirs in of_rank for name in theirs}
    differing = sorted(k for k in keys if len({theirs.get(k) for theirs in of_rank}) > 1)
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
