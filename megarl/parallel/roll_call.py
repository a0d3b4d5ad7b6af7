"""Notes in the world's store which call each rank is in, so that those that wait can say for whom.

It decides nothing: a call that meets no trouble only writes. What is read is for a warning or an
error, in a thread of its own, since a store may stand still with the process that serves it.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.observability.logging import get_logger

log = get_logger(__name__)

PATIENCE = 30.0  # seconds of a wait before a line says for whom
READING = 5.0  # seconds that an error waits for the store


class RollCall:
    """Notes the calls that the ranks of `group` make together, in one order, each under a name.
    Making one is collective over `group`."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        box = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(box, group=group, group_src=0)
        self._store = dist.PrefixStore("megarl_calls", c10d._get_default_store())
        self._name, self._rank = box[0], rank
        self._number = 0

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Notes that this rank is in its next call, and where it ends without an error, after
        it."""
        self._number += 1
        self._note(f"in {name}")
        yield
        self._note(f"after {name}")

    @contextmanager
    def wait(self, name: str, ranks: Collection[int]) -> Iterator[None]:
        """Logs, where what is inside takes longer than PATIENCE, which of `ranks` have not come to
        the call that this rank is in."""
        timer = threading.Timer(PATIENCE, self._warn, [name, ranks])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def absent(self, ranks: Collection[int]) -> str:
        """Returns which of `ranks` have not come to this rank's call, in words, with where they
        were last; empty where all have. What the store does not say in time is left out."""
        words: list[str] = []
        reader = threading.Thread(target=lambda: words.append(self._absent(ranks)), daemon=True)
        reader.start()
        reader.join(READING)
        return words[0] if words else ""

    def _note(self, where: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended with its process
            self._store.set(str(self._rank), f"{self._name} {self._number} {where}")

    def _warn(self, name: str, ranks: Collection[int]) -> None:
        if missing := self._absent(ranks):
            log.warning(
                "rank %d waits in %s for %s: every rank makes this call", self._rank, name, missing
            )

    def _absent(self, ranks: Collection[int]) -> str:
        number, words = self._number, []
        try:
            for rank in ranks:
                where = self._where(rank, number)
                words += [f"rank {rank} ({where})"] if where else []
        except RuntimeError:  # the store has ended with its process
            return ""
        return ", ".join(words)

    def _where(self, rank: int, number: int) -> str:
        """Returns where a rank was last, empty for in call `number`."""
        if not self._store.check([str(rank)]):
            return "in no such call before"
        name, at, where = self._store.get(str(rank)).decode().split(" ", 2)
        return "" if name == self._name and int(at) >= number else where
