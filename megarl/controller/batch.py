"""RemoteBatch is a batch on the controller: its metadata is here, its tokens lie on workers.

B rows of the batch, S positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.api.batch import Batch
from megarl.api.tokens import Home
from megarl.controller.messages import BatchState, Field, Ref, Source
from megarl.controller.shelf import Shelf, Stamp
from megarl.utils.batch import Padded

if TYPE_CHECKING:
    from megarl.controller.group import Pending, WorkerGroup


class RemoteTokens:
    """Stands for a per-token field whose values lie on workers. `held` says which rows each group's
    workers have."""

    def __init__(self, field: Field, group: WorkerGroup, home: Home) -> None:
        self.field = field
        self.held: dict[WorkerGroup, Home] = {}
        self.lies_on(group, home)

    def lies_on(self, group: WorkerGroup, home: Home) -> None:
        """Notes which rows the group's workers hold from now on."""
        if group not in self.held:
            group.own(self.field.key, self)
        self.held[group] = home

    def ref(self, group: WorkerGroup) -> Ref:
        """Returns what names the tokens to the workers of `group`. Raises ValueError where they
        do not hold them."""
        if group not in self.held:
            raise ValueError(
                f"tokens {self.field.key} lie on {', '.join(g.name for g in self.held)}, not on "
                f"{group.name}: put them into a batch, and give the batch"
            )
        return Ref("tokens", self.field.key)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"RemoteTokens have no {name!r} here: their values lie on workers. Compute there "
            "(WorkerGroup.call), or bring them here by RemoteBatch.load_data() or fetch()"
        )

    def __repr__(self) -> str:
        groups = ", ".join(group.name for group in self.held)
        return f"<tokens {self.field.key}, {self.field.dtype} {self.field.inner}, on {groups}>"


class RemoteBatch(Batch):
    """Holds a batch's metadata: `batch[name]` is the Tensor [B] of a per-sample field, which is
    here, or the RemoteTokens of a per-token field. Edits of per-sample fields, in place too, travel
    with the next call that has the batch among its arguments, and what the call changes comes back
    with its answer. `group` is the one that worked on it last.
    """

    per_token: dict[str, Any]

    def __init__(self, group: WorkerGroup, id: str, state: BatchState) -> None:
        """Takes the group that made the batch, its id there, and what the group told of it."""
        assert state.lengths is not None
        nobody = Home((0,), torch.full_like(state.lengths, -1))
        super().__init__(state.lengths, {}, {}, home=nobody)
        self.id, self.group = id, group
        self._lock = threading.RLock()
        # by group: what its workers know (stamps of samples, keys of tokens), and calls under way
        self._known: dict[WorkerGroup, dict[str, Stamp | str]] = {group: {}}
        self._sent: dict[tuple[WorkerGroup, str], int] = {}  # the last call that an edit went with
        self._placed_on: set[WorkerGroup] = set()
        self._pending: dict[WorkerGroup, Pending] = {}
        group.own(id, self)
        self.learn(group, state)

    # -- fields

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a field. Raises ValueError unless it is a Tensor [B] or RemoteTokens."""
        if isinstance(value, RemoteTokens):
            rows = {len(home.of_row) for home in value.held.values()}
            if rows != {len(self)}:
                raise ValueError(f"batch[{name!r}]: tokens of {rows} rows, not of {len(self)}")
            self.per_sample.pop(name, None)
            self.per_token[name] = value
        else:
            super().__setitem__(name, value)

    def ref(self, group: WorkerGroup) -> Ref:
        """Returns what names the batch to the workers of a group."""
        return Ref("batch", self.id)

    # -- what travels with a call

    def settle_sources(self, group: WorkerGroup, fields: Sequence[str] | None) -> None:
        """Waits for calls under way, where `group` would get fields from workers that may yet move
        them, and for those that get fields from workers of `group`, which may move them."""
        for other, pending in list(self._pending.items()):
            if other is not group and not self._is_still(other, group, fields):
                pending.result()

    def _is_still(
        self, other: WorkerGroup, group: WorkerGroup, fields: Sequence[str] | None
    ) -> bool:
        """Returns whether a call under way on `other` and one on `group` leave each other's rows
        where they are: a batch that was placed stays there."""
        gets_from = any(other in self._sources(t) for t in self._lacking(group, fields).values())
        return (other in self._placed_on or not gets_from) and (
            group in self._placed_on or group not in self._known
        )

    def _lacking(self, group: WorkerGroup, fields: Sequence[str] | None) -> dict[str, RemoteTokens]:
        known = self._known.get(group, {})
        some = self.per_token.items()
        return {
            name: tokens
            for name, tokens in some
            if (fields is None or name in fields) and known.get(name) != tokens.field.key
        }

    def _sources(self, tokens: RemoteTokens) -> list[WorkerGroup]:
        """Returns the groups that have the tokens, those first whose rows do not move."""
        return sorted(tokens.held, key=lambda g: g in self._pending and g not in self._placed_on)

    def state_for(
        self, group: WorkerGroup, fields: Sequence[str] | None, number: int
    ) -> BatchState:
        """Returns what the group's workers do not know of the batch, for the call of this number,
        and takes it as known."""
        with self._lock:
            first = group not in self._known
            if first:
                group.own(self.id, self)
            known = self._known.setdefault(group, {})
            before = self._pending.get(group)
            if failed := before is not None and before.failed():  # who knows what has arrived
                known |= dict.fromkeys(known, "")
            state = BatchState(lengths=self.lengths if first or failed else None)
            state.minibatches = self.minibatches
            state.removed = tuple(name for name in known if name not in self)
            for name in state.removed:
                del known[name]
            for name, values in self.per_sample.items():
                if known.get(name) != (stamp := Stamp.of(values)):
                    state.per_sample[name], known[name] = values, stamp
            made: dict[tuple[WorkerGroup, int], Source] = {}
            for name, tokens in self._lacking(group, fields).items():
                holder = group if group in tokens.held else self._sources(tokens)[0]
                home = tokens.held[holder]
                new = Source(holder.name, holder.peers, home)
                source = made.setdefault((holder, id(home)), new)
                state.sources[tokens.field.key] = source
                state.per_token[name], known[name] = tokens.field, tokens.field.key
            for name in (*state.removed, *state.per_sample, *state.per_token):
                self._sent[group, name] = number
            return state

    def called(self, group: WorkerGroup, pending: Pending) -> None:
        """Notes a call under way with the batch among its arguments."""
        if (before := self._pending.get(group)) is not None:
            pending.follows(before)
        self._pending[group], self.group = pending, group

    def learn(self, group: WorkerGroup, state: BatchState, number: int = 0) -> None:
        """Takes over what the call of this number on `group` has changed, but for fields that were
        edited here since, and went with a later call."""
        assert state.home is not None
        with self._lock:
            known = self._known[group]

            def is_new(name: str) -> bool:
                return self._sent.get((group, name), 0) <= number

            for name in filter(is_new, state.removed):
                known.pop(name, None)
                if name in self:
                    self.pop(name)
            for name in filter(is_new, state.per_sample):
                self[name] = values = state.per_sample[name]
                known[name] = Stamp.of(values)
            for name, field in state.per_token.items():
                tokens = RemoteTokens(field, group, state.home)  # freed, where nobody takes it
                if is_new(name):
                    self[name], known[name] = tokens, field.key
            for name, tokens in self.per_token.items():
                if known.get(name) == tokens.field.key:
                    tokens.lies_on(group, state.home)
            self.minibatches = state.minibatches
            if state.placed:
                self._placed_on.add(group)
            if (pending := self._pending.get(group)) is not None and pending.taken:
                del self._pending[group]

    # -- what workers compute

    def select(self, rows: Sequence[int] | Tensor, names: Sequence[str] | None = None) -> Batch:
        """Returns a RemoteBatch of some rows and fields (Batch.select), made on the workers."""
        part: Batch = self.group.call(Batch.select, self, rows, names)
        return part

    def keep(self, mask: Tensor) -> Batch:
        """Returns a RemoteBatch without the rows where `mask` [B] is False (Batch.keep)."""
        kept: Batch = self.group.call(Batch.keep, self, mask)
        return kept

    def row_sums(
        self,
        fn: Callable[[Padded], Any],
        names: Sequence[str] | None = None,
        *,
        width: int = 0,
        what: str = "row_sums",
    ) -> Tensor:
        """Returns the numbers of `fn` for every row, [B] float64 (or [B, width]), which workers
        compute (Batch.row_sums)."""
        sums: Tensor = self.group.call(Batch.row_sums, self, fn, names, width=width, what=what)
        return sums

    def fetch(self, rows: Sequence[int] | Tensor, names: Sequence[str] | None = None) -> Padded:
        """Returns `padded` of a few rows, which workers send here."""
        return self.load_data(rows, names)

    def padded(
        self, rows: Sequence[int] | Tensor | None = None, names: Sequence[str] | None = None
    ) -> Padded:
        """Raises RuntimeError: this process holds no rows."""
        raise RuntimeError("the controller holds no rows: load_data() brings them here")

    def gather(self, values: Tensor) -> Tensor:
        """Raises RuntimeError: this process holds no rows."""
        raise RuntimeError("the controller holds no rows: call what gathers on the workers")

    def load_data(
        self,
        rows: Sequence[int] | Tensor | None = None,
        names: Sequence[str] | None = None,
    ) -> Padded:
        """Returns padded [b, S] tensors and attention_mask of the rows (None takes all) and fields
        `names` (None takes all): their tokens come here from the workers that hold them."""
        index = self._index(range(len(self)) if rows is None else rows)
        by_source: dict[tuple[WorkerGroup, int], list[str]] = {}
        wanted = [n for n in self.per_token if names is None or n in names]
        for name in wanted:
            group = self._sources(self.per_token[name])[0]
            home = self.per_token[name].held[group]
            by_source.setdefault((group, id(home)), []).append(name)
        found: dict[str, Any] = {}
        for (group, _), some in by_source.items():
            fields = [self.per_token[name].field for name in some]
            home = self.per_token[some[0]].held[group]
            shelf = Shelf("", group.read)
            source = Source(group.name, group.peers, home)
            got = shelf.pull(source, fields, self.lengths, index)
            found |= {name: got[f.key] for name, f in zip(some, fields, strict=True)}
        return self._pad(index, {name: found[name] for name in wanted}, names)
