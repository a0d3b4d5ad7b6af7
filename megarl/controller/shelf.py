"""Holds a worker's batches and tokens, and serves rows of them to other workers as raw bytes.

B rows of a batch, b rows that this worker holds, T tokens of some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.api.batch import Batch
from megarl.api.tokens import Comm, Home, Tokens, as_bytes, comm_or_default, from_bytes
from megarl.controller.messages import BatchState, Field, Peer, Source, read_path, rows_path

# (worker, path) -> the bytes that the worker's shelf serves there
Fetch = Callable[[Peer, str], bytearray]

MESSAGE = 64 << 20  # bytes of an answer, unless a row alone is longer


@dataclass(frozen=True)
class Stamp:
    """Tells a tensor in one state from other tensors, and from itself after an in-place change."""

    tensor: Tensor = field(compare=False, repr=False)  # alive, so that its id stays its own
    id: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Stamp:
        """Returns the stamp of a tensor as it is now."""
        return cls(tensor, id(tensor), tensor._version)


@dataclass(frozen=True)
class Held:
    """Holds the values of some rows: tokens [b rows], rows [b] ascending."""

    tokens: Tokens
    rows: Tensor


@dataclass
class Replica:
    """Holds a group's copy of a batch, and what the controller knows of it: by name the stamps of
    per-sample fields, and the keys and stamps of per-token fields."""

    batch: Batch
    samples: dict[str, Stamp] = field(default_factory=dict)
    tokens: dict[str, tuple[str, Stamp]] = field(default_factory=dict)


class Shelf:
    """Holds what calls leave on this worker: batches by group and id, tokens by group and key.
    `read` may be called from another thread than the rest."""

    def __init__(
        self, name: str, fetch: Fetch, comm: Callable[[], Comm | None] | None = None
    ) -> None:
        """Takes the worker's name, how it reads from others, and how it talks to its group in
        collectives (None: as torch.distributed's processes do)."""
        self.name, self._fetch, self._comm = name, fetch, comm
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._held: dict[tuple[str, str], Held] = {}

    # -- tokens

    def read(self, path: str) -> bytearray:
        """Returns the bytes at a path that `rows_path` made. Raises KeyError for a key that is not
        here, ValueError for rows that are not."""
        group, keys, rows = read_path(path)
        return bytearray().join(self._rows(group, key, rows) for key in keys)

    def _rows(self, group: str, key: str, rows: Tensor) -> bytes:
        held = self._held.get((group, key))
        if held is None:
            raise KeyError(f"{self.name} holds no tokens {key} of group {group}")
        if not bool(torch.isin(rows, held.rows).all()):
            named = f"rows {rows.tolist()[:8]} ... of tokens {key}"
            raise ValueError(f"{self.name} does not hold {named}")
        some = held.tokens.take(torch.searchsorted(held.rows, rows))
        return as_bytes(some.values.detach().cpu()).numpy().tobytes()

    def keep(self, group: str, key: str, tokens: Tokens, rows: Tensor) -> None:
        """Holds tokens of these rows [b] under a key."""
        self._held[group, key] = Held(tokens, rows)

    def tokens(self, group: str, key: str) -> Tokens:
        """Returns the tokens of a key, of the rows held here. Raises KeyError where there are
        none."""
        return self._held[group, key].tokens

    def key_of(self, group: str, tokens: Tokens) -> str | None:
        """Returns the key of tokens that the group holds here, None for any other."""
        found = (key for (g, key), h in self._held.items() if g == group and h.tokens is tokens)
        return next(found, None)

    def pull(
        self,
        source: Source,
        fields: Sequence[Field],
        lengths: Tensor,
        rows: Tensor,
        rank: int = 0,
    ) -> dict[str, Tokens]:
        """Returns `rows` (ascending) of the fields, by key; `lengths` [B] are those of all rows.
        Where several workers hold a row, this one asks itself, else one of them by its `rank`."""
        parts: dict[str, list[Tokens]] = {f.key: [_none(f)] for f in fields}
        order = [rows[:0]]
        for peer, theirs in _holders(source, rows, self.name, rank):
            for some in _portions(theirs, lengths, sum(f.token_bytes for f in fields)):
                path = rows_path(source.group, [f.key for f in fields], some, len(lengths))
                raw = self.read(path) if peer.name == self.name else self._fetch(peer, path)
                for key, tokens in _split(raw, fields, lengths[some]):
                    parts[key].append(tokens)
                order.append(some)
        back = torch.cat(order).argsort()
        return {key: Tokens.concat(found).take(back) for key, found in parts.items()}

    # -- batches

    def batch(self, group: str, id: str) -> Batch:
        """Returns the group's batch. Raises KeyError where there is none."""
        return self._replicas[group, id].batch

    def id_of(self, group: str, batch: Batch) -> str | None:
        """Returns the id of a batch that the group holds here, None for any other."""
        found = (id for (g, id), r in self._replicas.items() if g == group and r.batch is batch)
        return next(found, None)

    def adopt(self, group: str, id: str, batch: Batch) -> None:
        """Holds a batch that a call has made here."""
        self._replicas[group, id] = Replica(batch)

    def receive(self, group: str, id: str, state: BatchState, rank: int, size: int) -> None:
        """Brings the group's copy of a batch to `state`: makes it where there is none, in which
        this worker, `rank` of `size`, holds a share of the rows, and gets the per-token fields that
        it lacks from their holders."""
        if (group, id) not in self._replicas:
            assert state.lengths is not None
            comm = self._comm() if self._comm else comm_or_default(None)
            if comm is None and size > 1:
                raise RuntimeError(
                    f"a batch came to {self.name} before torch.distributed has started on the "
                    f"{size} workers of {group}: initialize a model there first"
                )
            home = shares(state.lengths, size)
            self.adopt(group, id, Batch(state.lengths, {}, {}, home=home, comm=comm))
        replica = self._replicas[group, id]
        batch = replica.batch
        for name in state.removed:
            if name in batch:
                batch.pop(name)
            replica.samples.pop(name, None)
            replica.tokens.pop(name, None)
        for name, values in state.per_sample.items():
            batch[name] = values
            replica.samples[name] = Stamp.of(values)
        for name, key, tokens in self._lacking(replica, state, rank):
            batch[name] = tokens
            replica.tokens[name] = key, Stamp.of(tokens.values)
        if state.minibatches is not None:
            batch.minibatches = state.minibatches
        batch.written.clear()
        self._index(group, replica)

    def _lacking(
        self, replica: Replica, state: BatchState, rank: int
    ) -> Iterator[tuple[str, str, Tokens]]:
        """Yields (name, key, tokens of the held rows) of the fields that the batch lacks."""
        wanted: dict[int, list[str]] = {}
        for name, described in state.per_token.items():
            if replica.tokens.get(name, ("",))[0] != described.key:
                wanted.setdefault(id(state.sources[described.key]), []).append(name)
        batch = replica.batch
        for names in wanted.values():
            fields = [state.per_token[name] for name in names]
            source = state.sources[fields[0].key]
            found = self.pull(source, fields, batch.lengths, batch.rows, rank)
            for name, described in zip(names, fields, strict=True):
                yield name, described.key, found[described.key]

    def changes(self, group: str, id: str, new: Iterator[str]) -> BatchState:
        """Returns what the controller does not know of a batch, and takes it as known. `new` gives
        keys to per-token fields that calls have made or replaced."""
        replica = self._replicas[group, id]
        batch = replica.batch
        state = BatchState(home=batch.home, placed=batch.placed, minibatches=batch.minibatches)
        state.removed = tuple(n for n in {**replica.samples, **replica.tokens} if n not in batch)
        samples = {name: Stamp.of(values) for name, values in batch.per_sample.items()}
        for name, stamp in samples.items():
            if replica.samples.get(name) != stamp:
                state.per_sample[name] = batch.per_sample[name]
        tokens = {}
        for name, made in batch.per_token.items():
            key, told = replica.tokens.get(name, ("", None))
            stamp = Stamp.of(made.values)
            # what has come from other workers (a placement) is new here and has the same values
            in_place = told is not None and told.id == stamp.id and told != stamp
            if told is None or in_place or name in batch.written:
                key = next(new)
                state.per_token[name] = Field(key, made.values.dtype, tuple(made.values.shape[1:]))
            tokens[name] = key, stamp
        replica.samples, replica.tokens = samples, tokens
        batch.written.clear()
        self._index(group, replica)
        return state

    def _index(self, group: str, replica: Replica) -> None:
        rows = replica.batch.rows
        for name, (key, _) in replica.tokens.items():
            self.keep(group, key, replica.batch.per_token[name], rows)

    def drop(self, group: str, name: str) -> None:
        """Forgets a batch, by its id, or tokens, by their key; does nothing where it is gone."""
        self._replicas.pop((group, name), None)
        if self._held.pop((group, name), None) is None:
            return
        for (g, _), replica in self._replicas.items():
            for field_name in [
                n for n, (k, _) in replica.tokens.items() if (g, k) == (group, name)
            ]:
                replica.tokens.pop(field_name)
                replica.batch.pop(field_name)

    def sizes(self) -> dict[str, int]:
        """Returns how many batches and keys are held, and the bytes of their values."""
        held = {id(h.tokens): h.tokens.values.nbytes for h in self._held.values()}
        return {
            "batches": len(self._replicas),
            "keys": len(self._held),
            "bytes": sum(held.values()),
        }


def shares(lengths: Tensor, size: int) -> Home:
    """Returns the home in which `size` workers hold neighbouring rows of about as many tokens
    each."""
    ends = lengths.cumsum(0)
    middles = 2 * ends - lengths
    of_row = middles * size // max(1, 2 * int(ends[-1]))
    return Home(tuple(range(size)), of_row.clamp(max=size - 1))


def _holders(source: Source, rows: Tensor, own: str, rank: int) -> Iterator[tuple[Peer, Tensor]]:
    """Yields (worker, rows) of whom to ask for what."""
    of_row = source.home.of_row[rows]
    for index in of_row.unique().tolist():
        homes = zip(source.peers, source.home.of_rank, strict=True)
        who = [peer for peer, i in homes if i == index]
        mine = [peer for peer in who if peer.name == own]
        yield (mine or who[rank % len(who) :])[0], rows[of_row == index]


def _portions(rows: Tensor, lengths: Tensor, token_bytes: int) -> list[Tensor]:
    """Returns `rows` in parts of about MESSAGE bytes."""
    part = (lengths[rows] * token_bytes).cumsum(0) // MESSAGE
    return [rows[part == number] for number in part.unique().tolist()]


def _split(
    raw: bytearray, fields: Sequence[Field], lengths: Tensor
) -> Iterator[tuple[str, Tokens]]:
    """Yields (key, tokens) of an answer that has one field after the other."""
    count, begin = int(lengths.sum()), 0
    whole = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    for f in fields:
        end = begin + count * f.token_bytes
        yield f.key, Tokens(from_bytes(whole[begin:end], f.dtype, f.inner), lengths)
        begin = end


def _none(f: Field) -> Tokens:
    return Tokens(torch.empty((0, *f.inner), dtype=f.dtype), torch.empty(0, dtype=torch.long))
