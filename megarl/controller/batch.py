"""RemoteBatch is a batch on the controller: its metadata is here, its tokens lie on workers.

A field is a key, and those who hold its values, which never change: fields are set, not edited.

B rows of the batch, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.api.batch import Batch
from megarl.api.tokens import Home, Padded
from megarl.controller.messages import BatchChange, BatchState, Field, Ref, Source
from megarl.controller.store import pull

if TYPE_CHECKING:
    from megarl.controller.group import Pending, WorkerGroup

numbers = count(1)  # of the calls and settings of this process, in their order


class RemoteTokens:
    """Stands for a per-token field whose values lie on workers. `homes` says which rows each
    group's workers hold."""

    def __init__(self, field: Field, group: WorkerGroup, home: Home) -> None:
        self.field, self.key = field, field.key
        self.homes: dict[WorkerGroup, Home] = {group: home}
        group.own(self.key, self)

    def ref(self, group: WorkerGroup) -> Ref:
        """Returns what names the tokens to the workers of `group`. Raises ValueError where they
        do not hold them."""
        if group not in self.homes:
            places = ", ".join(g.name for g in self.homes)
            fix = "put them into a batch, and give the batch"
            raise ValueError(f"tokens {self.key} lie on {places}, not on {group.name}: {fix}")
        return Ref("tokens", self.key)

    def __getattr__(self, name: str) -> Any:
        fix = "compute there (WorkerGroup.call), or bring them here by RemoteBatch.load_data()"
        raise AttributeError(f"RemoteTokens have no {name!r} here: they lie on workers; {fix}")

    def __repr__(self) -> str:
        groups = ", ".join(group.name for group in self.homes)
        return f"<tokens {self.key}, {self.field.dtype} {self.field.inner}, on {groups}>"


class Sample:
    """Names the values [B] of a per-sample field to the workers of the groups in `homes`, which
    have them."""

    def __init__(self, values: Tensor, key: str) -> None:
        self.values, self.key = values, key
        self.version = values._version
        self.homes: dict[WorkerGroup, Home] = {}


class RemoteBatch(Batch):
    """Holds a batch's metadata: `batch[name]` is the Tensor [B] of a per-sample field, which is
    here, or the RemoteTokens of a per-token field. Fields that are set travel with the next call
    that has the batch among its arguments, and those that the call sets come back with its answer.
    `group` is the one that worked on it last.
    """

    per_token: dict[str, Any]

    def __init__(self, group: WorkerGroup, id: str, change: BatchChange) -> None:
        """Takes the group that made the batch, its id there, and what the group told of it."""
        assert change.lengths is not None
        nobody = Home((0,), torch.full_like(change.lengths, -1))
        super().__init__(change.lengths, {}, {}, home=nobody)
        self.id, self.group = id, group
        self._samples: dict[str, Sample] = {}
        self._set: dict[str, int] = {}  # when a field was set or removed, see `numbers`
        self._homes: dict[WorkerGroup, Home] = {}  # of those that have the batch
        self._placed_on: set[WorkerGroup] = set()
        self._pending: dict[WorkerGroup, Pending] = {}
        group.own(id, self)
        self._take(group, change, next(numbers))

    # -- fields

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a field. Raises ValueError unless it is a Tensor [B] or RemoteTokens."""
        if isinstance(value, RemoteTokens):
            rows = {len(home.of_row) for home in value.homes.values()}
            if rows != {len(self)}:
                raise ValueError(f"batch[{name!r}]: tokens of {rows} rows, not of {len(self)}")
            self.per_sample.pop(name, None)
            self.per_token[name] = value
        else:
            super().__setitem__(name, value)
        self._set[name] = next(numbers)

    def pop(self, name: str) -> Any:
        """Removes the field and returns it."""
        self._set[name] = next(numbers)
        self._samples.pop(name, None)
        return super().pop(name)

    def ref(self, group: WorkerGroup) -> Ref:
        """Returns what names the batch to the workers of a group."""
        return Ref("batch", self.id)

    def _sample(self, name: str, values: Tensor) -> Sample:
        """Returns what names a field's values. Raises ValueError where they were edited in place:
        workers have them as they were."""
        sample = self._samples.get(name)
        if sample is None or sample.values is not values:
            sample = self._samples[name] = Sample(values, f"set.{next(numbers)}")
        if values._version != sample.version:
            fix = f"set the field, batch[{name!r}] = values"
            raise ValueError(f"batch[{name!r}] was edited in place, unseen by workers: {fix}")
        return sample

    # -- what travels with a call

    def wait_for(self, group: WorkerGroup, fields: Sequence[str] | None) -> None:
        """Waits for calls under way on the batch before a call of `group`: on the same workers, and
        where rows that one of the two reads from the other may yet be placed elsewhere."""
        lacking = [t for t in self._fields(fields) if group not in t.homes]
        for other, pending in list(self._pending.items()):
            sources = {self._source(tokens) for tokens in lacking}
            moves = other in sources and other not in self._placed_on
            is_read = group in self._homes and group not in self._placed_on
            if moves or is_read or not set(other.peers).isdisjoint(group.peers):
                pending.wait()

    def _fields(self, names: Sequence[str] | None) -> Iterator[RemoteTokens]:
        return (t for name, t in self.per_token.items() if names is None or name in names)

    def _source(self, tokens: RemoteTokens) -> WorkerGroup:
        """Returns a group that has the tokens, if there is one, a group whose rows do not move."""
        return min(tokens.homes, key=lambda g: g in self._pending and g not in self._placed_on)

    def state_for(
        self, group: WorkerGroup, fields: Sequence[str] | None
    ) -> tuple[BatchState, list[Sample | RemoteTokens]]:
        """Returns what the batch is for a call of the group that reads these per-token fields
        (None for all), and all fields that its workers will have."""
        known = group in self._homes
        state = BatchState(lengths=None if known else self.lengths, minibatches=self.minibatches)
        sent: list[Sample | RemoteTokens] = []
        group.own(self.id, self)
        for name, values in self.per_sample.items():
            sample = self._sample(name, values)
            state.samples[name] = sample.key
            if group not in sample.homes:
                state.values[sample.key] = values
            sent.append(sample)
        for name, tokens in self.per_token.items():
            if not (fields is None or name in fields or group in tokens.homes):
                continue
            state.tokens[name] = tokens.field
            if not known or tokens.homes.get(group) is not self._homes[group]:
                holder = group if group in tokens.homes else self._source(tokens)
                state.sources[tokens.key] = Source(holder.name, holder.peers, tokens.homes[holder])
            sent.append(tokens)
        for handle in sent:
            group.own(handle.key, handle)
        return state, sent

    def called(self, group: WorkerGroup, pending: Pending) -> None:
        """Notes a call under way with the batch among its arguments."""
        self._pending[group], self.group = pending, group

    def learn(
        self,
        group: WorkerGroup,
        change: BatchChange,
        number: int,
        sent: Sequence[Sample | RemoteTokens],
    ) -> None:
        """Takes over what the call of this number on `group` has made of the batch as it was sent,
        but for fields that were set here since."""
        self._pending.pop(group, None)
        home = self._take(group, change, number)
        for handle in sent:
            handle.homes[group] = home

    def _take(self, group: WorkerGroup, change: BatchChange, number: int) -> Home:
        def is_new(name: str) -> bool:
            return self._set.get(name, 0) < number

        home = change.home or self._homes[group]
        self._homes[group], self.minibatches = home, change.minibatches
        if change.placed:
            self._placed_on.add(group)
        for name in change.removed:
            if is_new(name) and name in self:
                self.pop(name)
                self._set[name] = number
        for name, (key, values) in change.samples.items():
            sample = Sample(values, key)
            group.own(key, sample)  # freed, where nobody takes it
            sample.homes[group] = home
            if is_new(name):
                super().__setitem__(name, values)
                self._samples[name], self._set[name] = sample, number
        for name, field in change.tokens.items():
            tokens = RemoteTokens(field, group, home)
            if is_new(name):
                self[name], self._set[name] = tokens, number
        return home

    # -- what workers compute

    def select(self, rows: Sequence[int] | Tensor, names: Sequence[str] | None = None) -> Batch:
        """Returns a RemoteBatch of some rows and fields (Batch.select), made on the workers."""
        return self.group.call(Batch.select, self, rows, names)

    def keep(self, mask: Tensor) -> Batch:
        """Returns a RemoteBatch without the rows where `mask` [B] is False (Batch.keep)."""
        return self.group.call(Batch.keep, self, mask)

    def row_sums(
        self,
        fn: Callable[[Padded], Any],
        names: Sequence[str] | None = None,
        *,
        what: str = "row_sums",
    ) -> Tensor:
        """Returns the number of `fn` for every row, [B] float64, which workers compute
        (Batch.row_sums)."""
        return self.group.call(Batch.row_sums, self, fn, names, what=what)

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
        self, rows: Sequence[int] | Tensor | None = None, names: Sequence[str] | None = None
    ) -> Padded:
        """Returns padded [b, S] tensors and attention_mask of the rows (None takes all) and fields
        `names` (None takes all): their tokens come here from the workers that hold them."""
        index = self._index(range(len(self)) if rows is None else rows)
        loaded: dict[str, Any] = {}
        for name, tokens in self.per_token.items():
            if names is None or name in names:
                group = self._source(tokens)
                source = Source(group.name, group.peers, tokens.homes[group])
                pulled = pull(source, [tokens.field], self.lengths, index, group.read)
                loaded[name] = pulled[tokens.key]
        return self._pad(index, loaded, names)
