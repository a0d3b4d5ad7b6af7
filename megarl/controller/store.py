"""Holds what calls leave on a worker: objects, batches, and values by key; other workers read rows
of tokens here.

B rows of a batch, b rows that this worker holds, T tokens of some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.api.batch import Batch
from megarl.api.tokens import Comm, Home, Tokens, as_bytes, comm_or_default, from_bytes
from megarl.controller.messages import BatchChange, BatchState, Field, Peer, Ref, Rows, Source

# (worker, rows) -> the bytes that the worker's store has for them
Fetch = Callable[[Peer, Rows], bytearray]

MESSAGE = 64 << 20  # bytes of an answer, unless a row alone is longer


@dataclass(frozen=True)
class Held:
    """Holds the values of some rows: tokens [b rows], rows [b] ascending."""

    tokens: Tokens
    rows: Tensor


@dataclass
class Replica:
    """Holds a group's copy of a batch, the keys of its fields by name, and the home that the
    controller knows."""

    batch: Batch
    keys: dict[str, str] = field(default_factory=dict)
    home: Home | None = None


class Store:
    """Holds objects by id, batches by group and id, values by group and key. `read` may be called
    from another thread than the rest."""

    def __init__(
        self, name: str, fetch: Fetch, comm: Callable[[], Comm | None] | None = None
    ) -> None:
        """Takes the worker's name, how it reads from others, and how it talks to its group in
        collectives (None: as torch.distributed's processes do)."""
        self.name, self._fetch, self._comm = name, fetch, comm
        self.objects: dict[str, Any] = {}
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._tokens: dict[tuple[str, str], Held] = {}
        self._samples: dict[tuple[str, str], Tensor] = {}

    def resolve(self, group: str, ref: Ref) -> Any:
        """Returns what a group's reference stands for. Raises KeyError where it is not here."""
        try:
            match ref.kind:
                case "object":
                    return self.objects[ref.id]
                case "batch":
                    return self._replicas[group, ref.id].batch
                case _:
                    return self._tokens[group, ref.id].tokens
        except KeyError as e:
            where = "not on this worker: use it with the group that made it"
            raise KeyError(f"the {ref.kind} {ref.id} is {where}") from e

    def object_id(self, value: Any) -> str | None:
        """Returns the id of an object that is held here, None for any other."""
        return next((id for id, held in self.objects.items() if held is value), None)

    def batch_id(self, group: str, batch: Batch) -> str | None:
        """Returns the id of a batch that the group holds here, None for any other."""
        ids = (id for (g, id), r in self._replicas.items() if g == group and r.batch is batch)
        return next(ids, None)

    def tokens_key(self, group: str, tokens: Tokens) -> str | None:
        """Returns the key of tokens that the group holds here, None for any other."""
        keys = (key for (g, key), held in self._tokens.items() if g == group)
        return next((key for key in keys if self._tokens[group, key].tokens is tokens), None)

    def keep(self, group: str, key: str, tokens: Tokens, rows: Tensor) -> None:
        """Holds tokens of these rows [b] under a key."""
        self._tokens[group, key] = Held(tokens, rows)

    def drop(self, group: str, name: str) -> None:
        """Forgets what has this id or key; does nothing where it is gone."""
        self.objects.pop(name, None)
        for held in (self._replicas, self._tokens, self._samples):
            held.pop((group, name), None)  # type: ignore[attr-defined]

    def sizes(self) -> dict[str, int]:
        """Returns how many objects, batches and keys are held, and the bytes of tokens."""
        held = {id(h.tokens): h.tokens.values.nbytes for h in self._tokens.values()}
        return {
            "objects": len(self.objects),
            "batches": len(self._replicas),
            "keys": len(self._tokens) + len(self._samples),
            "bytes": sum(held.values()),
        }

    # -- rows for others

    def read(self, asked: Rows) -> bytearray:
        """Returns the bytes of rows. Raises KeyError for a key that is not here, ValueError for
        rows that are not."""
        return bytearray().join(self._rows(asked.group, key, asked.rows) for key in asked.keys)

    def _rows(self, group: str, key: str, rows: Tensor) -> bytes:
        held = self._tokens.get((group, key))
        if held is None:
            raise KeyError(f"{self.name} holds no tokens {key} of group {group}")
        if not bool(torch.isin(rows, held.rows).all()):
            named = f"rows {rows.tolist()[:8]} ... of tokens {key}"
            raise ValueError(f"{self.name} does not hold {named}")
        some = held.tokens.take(torch.searchsorted(held.rows, rows))
        raw: bytes = as_bytes(some.values.detach().cpu()).numpy().tobytes()
        return raw

    # -- batches

    def adopt(self, group: str, id: str, batch: Batch) -> None:
        """Holds a batch that a call has made here."""
        self._replicas[group, id] = Replica(batch)
        batch.written.update(batch.keys())

    def receive(self, group: str, id: str, state: BatchState, rank: int, size: int) -> None:
        """Makes the group's copy of a batch what `state` says: a new one where there is none, in
        which this worker, `rank` of `size`, holds a share of the rows. Per-token fields that it
        lacks come from their holders."""
        if (group, id) not in self._replicas:
            self._replicas[group, id] = Replica(self._new(group, state, size))
        replica = self._replicas[group, id]
        batch = replica.batch
        names = {**state.samples, **{name: f.key for name, f in state.tokens.items()}}
        for name in [name for name in batch if name not in names]:
            batch.pop(name)
        for name, key in state.samples.items():
            if (group, key) not in self._samples:
                self._samples[group, key] = state.values[key]
            if batch.get(name) is not self._samples[group, key]:
                batch[name] = self._samples[group, key]
        self._pull(group, batch, state, rank)
        for name, described in state.tokens.items():
            tokens = self._tokens[group, described.key].tokens
            if batch.get(name) is not tokens:
                batch[name] = tokens
        if state.minibatches is not None:
            batch.minibatches = state.minibatches
        replica.keys = names
        batch.written.clear()

    def _pull(self, group: str, batch: Batch, state: BatchState, rank: int) -> None:
        """Gets the tokens of the held rows that are not here, those of one source at once."""
        rows, lacking = batch.rows, dict[tuple[str, int], list[Field]]()
        for described in state.tokens.values():
            held = self._tokens.get((group, described.key))
            if held is None or not torch.equal(held.rows, rows):
                source = state.sources[described.key]
                lacking.setdefault((source.group, id(source.home)), []).append(described)
        for fields in lacking.values():
            source, fetch = state.sources[fields[0].key], self._read_from
            pulled = pull(source, fields, batch.lengths, rows, fetch, self.name, rank)
            for key, tokens in pulled.items():
                self.keep(group, key, tokens, rows)

    def _new(self, group: str, state: BatchState, size: int) -> Batch:
        assert state.lengths is not None
        comm = self._comm() if self._comm else comm_or_default(None)
        if comm is None and size > 1:
            why = f"torch.distributed has not started on the {size} workers of {group}"
            raise RuntimeError(f"batch on {self.name}: {why}; initialize a model there first")
        return Batch(state.lengths, {}, {}, home=shares(state.lengths, size), comm=comm)

    def _read_from(self, peer: Peer, asked: Rows) -> bytearray:
        return self.read(asked) if peer.name == self.name else self._fetch(peer, asked)

    def changes(self, group: str, id: str, new: Iterator[str]) -> BatchChange:
        """Returns what a call has made of a batch, whose fields have keys from now on, of `new`."""
        replica = self._replicas[group, id]
        batch, before, is_first = replica.batch, replica.keys, replica.home is None
        fresh = {name for name in batch if name in batch.written or name not in before}
        replica.keys = {name: next(new) if name in fresh else before[name] for name in batch}
        batch.written.clear()
        samples, tokens = dict[str, tuple[str, Tensor]](), dict[str, Field]()
        for name, key in replica.keys.items():
            if name in batch.per_sample:
                values = self._samples[group, key] = batch.per_sample[name]
                samples[name] = key, values
            else:
                values = batch.per_token[name].values
                tokens[name] = Field(key, values.dtype, tuple(values.shape[1:]))
                self.keep(group, key, batch.per_token[name], batch.rows)  # it may have been moved
        home = None if replica.home is batch.home else batch.home
        replica.home = batch.home
        return BatchChange(
            lengths=batch.lengths if is_first else None,
            minibatches=batch.minibatches,
            placed=batch.placed,
            home=home,
            samples={name: samples[name] for name in samples if name in fresh},
            tokens={name: tokens[name] for name in tokens if name in fresh},
            removed=tuple(name for name in before if name not in batch),
        )


def shares(lengths: Tensor, size: int) -> Home:
    """Returns the home in which `size` workers hold neighbouring rows of about as many tokens
    each."""
    ends = lengths.cumsum(0)
    middles = 2 * ends - lengths
    of_row = middles * size // max(1, 2 * int(ends[-1]))
    return Home(tuple(range(size)), of_row.clamp(max=size - 1))


def pull(
    source: Source,
    fields: Sequence[Field],
    lengths: Tensor,
    rows: Tensor,
    fetch: Fetch,
    own: str = "",
    rank: int = 0,
) -> dict[str, Tokens]:
    """Returns `rows` (ascending) of the fields, by key; `lengths` [B] are those of all rows. Where
    several workers hold a row, the one named `own` is asked, else one of them by `rank`."""
    parts: dict[str, list[Tokens]] = {f.key: [_none(f)] for f in fields}
    order = [rows[:0]]
    keys = tuple(f.key for f in fields)
    for peer, theirs in _holders(source, rows, own, rank):
        for some in _portions(theirs, lengths, sum(f.token_bytes for f in fields)):
            raw = fetch(peer, Rows(source.group, keys, some))
            for key, tokens in _split(raw, fields, lengths[some]):
                parts[key].append(tokens)
            order.append(some)
    back = torch.cat(order).argsort()
    return {key: Tokens.concat(found).take(back) for key, found in parts.items()}


def _holders(source: Source, rows: Tensor, own: str, rank: int) -> Iterator[tuple[Peer, Tensor]]:
    """Yields (worker, rows) of whom to ask for what."""
    of_row = source.home.of_row[rows]
    for index in of_row.unique().tolist():
        homes = zip(source.peers, source.home.of_rank, strict=True)
        holders = [peer for peer, i in homes if i == index]
        itself = [peer for peer in holders if peer.name == own]
        yield (itself or holders[rank % len(holders) :])[0], rows[of_row == index]


def _portions(rows: Tensor, lengths: Tensor, token_bytes: int) -> list[Tensor]:
    """Returns `rows` in parts of about MESSAGE bytes."""
    part = (lengths[rows] * token_bytes).cumsum(0) // MESSAGE
    return [rows[part == number] for number in part.unique().tolist()]


def _split(
    raw: bytearray, fields: Sequence[Field], lengths: Tensor
) -> Iterator[tuple[str, Tokens]]:
    """Yields (key, tokens) of an answer that has one field after the other."""
    total, begin = int(lengths.sum()), 0
    whole = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    for f in fields:
        end = begin + total * f.token_bytes
        yield f.key, Tokens(from_bytes(whole[begin:end], f.dtype, f.inner), lengths)
        begin = end


def _none(f: Field) -> Tokens:
    return Tokens(torch.empty((0, *f.inner), dtype=f.dtype), torch.empty(0, dtype=torch.long))
