"""Lets ranks act together: what fails on one is an error on all, and whoever waits says for whom.

A `Ranks` is of one process group. It sends what ranks tell each other through host memory (gloo),
over a group of its own. Every call carries its number and its name: ranks that are in different
calls all get an error that names both. Each rank also notes in the world's store which call it is
in, for the others' warnings and errors alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megarl.api.batch import register_comm
from megarl.api.failures import Failure, OtherRankFailed, gather, merged, on_every_rank
from megarl.observability.logging import get_logger
from megarl.parallel.worlds import device, init_distributed, meeting_store, proved, ranks_of
from megarl.utils.env import collective_timeout
from megarl.wire.process_group import join_group, set_group_timeout

log = get_logger(__name__)

T = TypeVar("T")

# how much longer than an act's own timeout ranks wait for each other, and how long a rank that
# failed waits for the others, which may be stuck in a collective that waits for this very rank
SLACK, FAIL_GRACE = 30.0, 10.0
PATIENCE = 30.0  # seconds of a wait before a line says for whom
READING = 5.0  # seconds that an error waits for the store
# bytes of a rank's row in the table that goes around, of the value in it, and of the call's name
_ROW, _SMALL, _NAME = 2048, 1280, 150

Bound = tuple[float, str]  # seconds, and the configuration keys they come from


class Ranks:
    """Has the ranks of a process group act, fail and tell each other things together.

    Making one and every call are collective; without torch.distributed this rank is the only one.
    Calls come from one thread at a time, in one order on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        what: str = "",
        timeout: Bound | None = None,
        work_timeout: Bound | None = None,
        grace: float | None = None,
    ) -> None:
        """group: None is the world in scope. what: begins errors. timeout: how long ranks wait for
        each other, collective_timeout by default; work_timeout: how long rank 0 may take in
        `from_zero`, by default as long. grace: seconds that a rank which failed in `together`
        waits for the others."""
        self.what, self._grace = what, grace
        self._timeout = timeout or (collective_timeout(), "collective_timeout")
        self._work_timeout = work_timeout or self._timeout
        self.rank, self.size = 0, 1
        self.ranks: tuple[int, ...] = (0,)  # of all
        self.group: Any = None
        self._number, self._closed = 0, False
        self._leader: int | None = None  # the thread in which rank 0 is in `from_zero`
        self._turn, self._within = threading.Lock(), ""
        if not dist.is_initialized():
            return
        group = group or dist.group.WORLD
        assert group is not None
        self.rank, self.size, self.ranks = group.rank(), group.size(), ranks_of(group)
        if self.size > 1:
            self.group = proved(_host_group(group, self._timeout[0]))
            self.group.barrier().wait()  # a rank may close it at once, while others still connect
            self._store = dist.PrefixStore("megarl_calls", meeting_store())
            # by a connection of its own, where this torch can make one: a read that hangs must
            # not hold up the next note
            self._places = getattr(self._store, "clone", lambda: self._store)()

    @staticmethod
    def of(group: dist.ProcessGroup | None = None) -> Ranks:
        """Returns the one of `group` (None: of the world in scope); the first call for a group is
        collective, as it makes it."""
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        with _lock:
            if group not in _by_group:
                for other in [g for g in _by_group if g not in c10d._world.pg_map]:
                    _by_group.pop(other).close()
                _by_group[group] = Ranks(group)
            return _by_group[group]

    @property
    def is_zero(self) -> bool:
        """Returns whether this rank is rank 0."""
        return self.rank == 0

    def set_timeout(self, seconds: float, key: str) -> None:
        """Sets the seconds that ranks wait for each other, and the key of that limit."""
        self._timeout = seconds, key

    def together(self, fn: Callable[..., T], *args: Any, what: str = "") -> T:
        """Returns fn(*args), called on every rank; if it fails on one, all raise the error that
        `merged` returns. what: the act's name in errors, the same on every rank. Collective.

        Collectives inside `fn` come before anything that can fail on one rank alone.
        """
        timeout = self._timeout

        def act() -> T:
            try:
                return fn(*args)
            except Exception:
                if self._grace is not None:
                    self._timeout = self._grace, f"{self._grace:g} s after an error"
                raise

        try:
            return on_every_rank(what or self.what or _name_of(fn), act, self)
        finally:
            self._timeout = timeout

    def from_zero(self, fn: Callable[..., T], *args: Any, **kw: Any) -> T:
        """Returns `fn(*args, **kw)` of rank 0 on every rank. Collective.

        The result is a small picklable object; tensors of a batch travel by `Batch` instead. Where
        `fn` raises, rank 0 raises its error and the others what `merged` returns. A call from
        within `fn` runs on rank 0 alone, since no other rank is there to join it.
        """
        name = _name_of(fn)
        if self._alone(name):
            return fn(*args, **kw)
        with self._call(name):
            self._table(name)
            if self.is_zero:
                return self._lead(name, partial(fn, *args, **kw))
            with self._waiting(name, [0], self._work_timeout):
                failure, packed = pickle.loads(self._broadcast(b"", 0))
            if error := merged(name, {0: failure} if failure else {}):
                raise error
            return cast(T, pickle.loads(packed))

    def gather(self, value: T, name: str = "gather") -> list[T]:
        """Returns every rank's picklable `value`, by rank. Collective. Raises OtherRankFailed where
        a rank does not come. name: of the call, for errors, the same on every rank."""
        return gather(value, self, name)

    def gather_from(self, ranks: Collection[int], value: T) -> list[T]:
        """Returns the `value` of these ranks alone, which may be large: `gather` takes as much room
        for each rank as for the one that has most. Collective."""
        if self._alone("gather_from"):
            return [value]
        with self._call("gather_from"):
            self._table("gather_from")
            with self._waiting("gather_from", ranks, self._timeout):
                own = pickle.dumps(value) if self.rank in ranks else b""
                return [pickle.loads(self._broadcast(own, rank)) for rank in ranks]

    def add_up(self, values: Tensor) -> Tensor:
        """Returns the sum of every rank's `values`, a tensor in host memory of one shape and dtype
        everywhere. Collective."""
        total = values.clone()
        if not self._alone("add_up"):
            with self._call("add_up"):
                self._table("add_up")
                with self._waiting("add_up", range(self.size), self._timeout):
                    self.group.allreduce([total]).wait()
        return total

    def all_gather(self, data: Tensor, name: str = "all_gather") -> list[Tensor]:
        """Returns every rank's bytes [n], in host memory. Collective; see `gather`.

        What is small goes to rank 0 and from there to all at once: gloo's all_gather passes it from
        rank to rank.
        """
        if self._alone(name):
            return [data]
        with self._call(name):
            lengths, small = zip(*self._table(name, data))
            if max(lengths) <= _SMALL:
                return [torch.tensor(list(x), dtype=torch.uint8) for x in small]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(data)] = data
            out = [torch.empty_like(padded) for _ in range(self.size)]
            with self._waiting(name, range(self.size), self._timeout):
                self.group.allgather([out], [padded]).wait()
            return [raw[:n] for raw, n in zip(out, lengths)]

    def close(self) -> None:
        """Leaves the group; waits for no other rank. May be called twice."""
        group, self.group, self._closed = self.group, None, True
        if group is not None and group in c10d._world.pg_map:
            dist.destroy_process_group(group)

    # ---- a call

    def _alone(self, name: str) -> bool:
        """Returns whether no other rank takes part. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(f"{name}: these ranks are closed: what belongs to them is destroyed")
        return self.group is None or self._leader == threading.get_ident()

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        """Numbers this rank's next call, and notes it in the store."""
        thread = threading.current_thread().name
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                f"{name} in thread {thread}, while {self._within}: ranks make one call at a time; "
                "make it in the thread of the other, or after it"
            )
        self._within = f"{name} runs in thread {thread}"
        try:
            self._number += 1
            self._note(f"in {name}")
            yield
            self._note(f"after {name}")
        finally:
            self._turn.release()

    def _table(self, name: str, data: Tensor | None = None) -> list[tuple[int, bytes]]:
        """Returns (bytes, the bytes themselves where they are few) of every rank's `data`. Raises
        RuntimeError where the ranks are in different calls."""
        value = b"" if data is None or len(data) > _SMALL else data.numpy().tobytes()
        length = 0 if data is None else len(data)
        row = _packed(pickle.dumps((self._number, name[:_NAME], length, value)))
        table = row.new_empty(self.size, _ROW)
        rows = [list(table.unbind(0))] if self.is_zero else []
        with self._waiting(name, range(self.size), self._timeout):
            self.group.gather(rows, [row], _rooted(c10d.GatherOptions(), 0)).wait()
            self.group.broadcast([table], _rooted(c10d.BroadcastOptions(), 0)).wait()
        calls, names, lengths, values = zip(*(pickle.loads(r.numpy().tobytes()) for r in table))
        # a method's class may be another on rank 0
        if len({(n, name.rpartition(".")[2]) for n, name in zip(calls, names)}) > 1:
            each = ", ".join(f"rank {r} in {n}" for r, n in enumerate(names))
            raise RuntimeError(f"the ranks are in different calls: {each}; every rank makes each")
        return list(zip(lengths, values))

    def _lead(self, name: str, fn: Callable[[], T]) -> T:
        self._leader, everyone = threading.get_ident(), range(self.size)
        try:
            result = fn()
            packed = pickle.dumps(result)  # here, for what cannot be is an error of every rank
        except BaseException as e:
            gone = contextlib.suppress(RuntimeError)  # a rank that is gone need not hear of it
            with gone, self._waiting(name, everyone, self._timeout):
                self._broadcast(pickle.dumps((Failure.of(e), b"")), 0)
            raise
        finally:
            self._leader = None
        with self._waiting(name, everyone, self._timeout):
            self._broadcast(pickle.dumps((None, packed)), 0)
        return result

    def _broadcast(self, data: bytes, root: int) -> bytes:
        """Returns the root's `data`."""
        options = _rooted(c10d.BroadcastOptions(), root)
        row = _packed(pickle.dumps((len(data), data if len(data) <= _SMALL else b"")))
        self.group.broadcast([row], options).wait()
        length, value = pickle.loads(row.numpy().tobytes())
        if length <= _SMALL:
            return cast(bytes, value)
        whole = torch.empty(length, dtype=torch.uint8)
        if self.rank == root:
            whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.group.broadcast([whole], options).wait()
        return whole.numpy().tobytes()

    # ---- who waits for whom

    @contextmanager
    def _waiting(self, name: str, ranks: Collection[int], timeout: Bound) -> Iterator[None]:
        """Bounds the wait inside. Logs after PATIENCE, and raises OtherRankFailed at the end, which
        of `ranks` have not come to this rank's call, and where they are."""
        seconds, key = timeout
        set_group_timeout(self.group, seconds)
        timer = threading.Timer(PATIENCE, self._warn, [name, ranks])
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as e:
            missing = self._missing_in_time(ranks) or "another rank, which ended or hangs"
            begin = f"{self.what}: " if self.what else ""
            raise OtherRankFailed(
                f"{begin}rank {self.rank} waited in {name} for {missing}: every rank makes this "
                f"call, within {key} = {seconds:g} s of the others. Cause: {e}"
            ) from e
        finally:
            timer.cancel()

    def _warn(self, name: str, ranks: Collection[int]) -> None:
        if missing := self._missing(ranks):
            log.warning(
                "rank %d waits in %s for %s: every rank makes this call", self.rank, name, missing
            )

    def _missing_in_time(self, ranks: Collection[int]) -> str:
        """Returns what `_missing` does, empty where the store, which may stand still with the
        process that serves it, does not answer."""
        words: list[str] = []
        reader = threading.Thread(target=lambda: words.append(self._missing(ranks)), daemon=True)
        reader.start()
        reader.join(READING)
        return words[0] if words else ""

    def _missing(self, ranks: Collection[int]) -> str:
        number = self._number
        try:
            places = {rank: self._place(rank, number) for rank in ranks}
        except RuntimeError:  # the store has ended with its process
            return ""
        return ", ".join(f"rank {rank} ({place})" for rank, place in places.items() if place)

    def _note(self, place: str) -> None:
        key = str(self.ranks[self.rank])
        with contextlib.suppress(RuntimeError):  # the store has ended with its process
            self._store.set(key, f"{self.group.group_name} {self._number} {place}")

    def _place(self, rank: int, number: int) -> str:
        """Returns where a rank was last, in a call of any group; empty for in call `number` of this
        one."""
        key = str(self.ranks[rank])
        if not self._places.check([key]):
            return "in no call before"
        group, at, place = self._places.get(key).decode().split(" ", 2)
        return "" if group == self.group.group_name and int(at) >= number else place


_by_group: dict[Any, Ranks] = {}
_lock = threading.RLock()


def world_comm() -> Ranks | None:
    """Returns the Comm of all processes of the world in scope, None where there is one process."""
    ranks = Ranks.of()
    return ranks if ranks.size > 1 else None


register_comm(world_comm)


def together(what: str, fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Returns `fn()`, called on every rank of `group` (None: of the world in scope), see
    `Ranks.together`. Collective."""
    return Ranks.of(group).together(fn, what=what)


def on_rank_zero(fn: Callable[..., T], *args: Any, **kw: Any) -> T:
    """Returns `fn(*args, **kw)` of rank 0 on every rank, or raises its error; see Ranks.from_zero.

    Collective over the ranks of torchrun (in a world's scope over its ranks), and a plain call
    where there is one process. Starts torch.distributed where nothing has yet.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    return Ranks.of().from_zero(fn, *args, **kw)


def _host_group(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """Makes a gloo group of the ranks of `group`. Collective over those alone. That of a world ends
    with it."""
    if group is dist.group.WORLD:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    # dist.new_group() would take the ranks of the world in scope, which may be another
    where = device() if dist.get_backend(group) == "nccl" else "cpu"
    name = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=where)
    group.broadcast([name], _rooted(c10d.BroadcastOptions(), 0)).wait()
    return join_group(
        meeting_store(),
        rank=group.rank(),
        world_size=group.size(),
        group_name=f"megarl_ranks_{bytes(name.tolist()).hex()}",
        backend="gloo",
        timeout=timeout,
    )


def _rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def _packed(data: bytes) -> Tensor:
    """Returns a row of _ROW bytes with `data` at its start: a pickle, which knows its end."""
    return torch.frombuffer(bytearray(data.ljust(_ROW, b"\0")), dtype=torch.uint8)


def _name_of(fn: Callable[..., Any]) -> str:
    """Returns how messages name a call, alike on every rank."""
    while isinstance(fn, partial):
        fn = fn.func
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.removesuffix(".<locals>.<lambda>")
