"""Keeps the books of one step's keys: which exist, who still reads them, when they can go."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megarl.dataflow.call import Call


class KeyBuffer:
    """Knows the keys of a step's batch, and the calls that have yet to read each of them.

    keep: keys that stay although no call reads them any more, because the end of the step does.
    """

    def __init__(self, calls: Sequence[Call], keep: Collection[str] = ()) -> None:
        self._readers: dict[str, set[str]] = {k: set() for c in calls for k in c.outputs}
        for call in calls:
            for key in call.inputs:
                self._readers.setdefault(key, set()).add(call.name)
        self._keep = set(keep)
        self.there: set[str] = set()

    def put(self, keys: Collection[str]) -> list[str]:
        """Notes that the keys exist, and returns those of them that nobody will read."""
        self.there |= set(keys)
        return self._gone()

    def need(self, call: Call) -> None:
        """Raises ValueError where a key that the call reads does not exist."""
        if missing := [key for key in call.inputs if key not in self.there]:
            raise ValueError(
                f"it reads {missing[0]!r}, which the step's batch does not have, only "
                f"{', '.join(sorted(self.there))}"
            )

    def read_by(self, call: Call) -> list[str]:
        """Notes that a call has read its inputs, and returns the keys that can go with that."""
        for key in call.inputs:
            self._readers[key].discard(call.name)
        return self._gone()

    def _gone(self) -> list[str]:
        read = {key for key in self.there if key in self._readers and not self._readers[key]}
        self.there -= read - self._keep
        return sorted(read - self._keep)
