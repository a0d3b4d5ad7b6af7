"""Sends buckets through a group with all servers, one after another, from the sender's side."""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.utils.env import address_towards, is_loopback
from megarl.utils.http import in_thread, split_address
from megarl.utils.rendezvous import listen
from megarl.weight_sync.plan import rank_offsets
from megarl.weight_sync.servers import GRACE, BucketTransfer, Deadline, Servers, failures
from megarl.wire.process_group import (
    destroy_update_group,
    init_update_group,
    set_group_timeout,
)

# How much longer than a sync may take its collectives live: ours is the readable error, and NCCL's
# watchdog ends the process.
MARGIN = 60.0
# For servers to leave the group at the end of a run.
CLOSE_TIMEOUT = 30.0


class UpdateChannel:
    """Joins a group with all servers' workers as its rank 0. It lives on senders only.

    Opening joins the group while every server is asked to. A channel that failed once is closed for
    good: its group may hold half a broadcast. Raises RuntimeError where a server does not join
    before the deadline, ServersLost where some are lost.
    """

    def __init__(
        self, servers: Servers, *, backend: str, device: torch.device, deadline: Deadline
    ) -> None:
        self.servers, self.device = servers, device
        # the store's prefix: servers are told it in a control call, and nobody else can guess it
        self.group_name = f"megarl_weights_{uuid.uuid4().hex}"
        self.info = servers.receivers(deadline)
        offsets, world_size = rank_offsets([i.tp for i in self.info.values()])
        address = address_for(servers.addresses)
        store = listen(address, timeout=deadline.left)
        group: dict[str, Any] = {
            "master_address": address,
            "master_port": store.port,
            "world_size": world_size,
            "group_name": self.group_name,
            "backend": backend,
        }
        bodies = [{**group, "rank_offset": n} for n in offsets]
        asked = servers.start("/init_weights_update_group", bodies, deadline.left)
        joined = in_thread(init_update_group, **group, rank=0, timeout=deadline.left, store=store)
        what = f"connecting to {len(offsets)} servers over {backend}"
        try:
            BucketTransfer(what, joined, asked).wait(deadline)
        except BaseException:
            joined.add_done_callback(_leave_late)  # at once, where it has joined already
            raise
        self.group: dist.ProcessGroup = joined.result()
        # Broadcasts have a stream of their own: what waits for one, or for a server that is gone,
        # is not in the way of the stream that gathers.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: cf.Future[float] | None = None  # the broadcast before

    def deliver(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        body: Mapping[str, Any],
        deadline: Deadline,
    ) -> BucketTransfer:
        """Starts sending `tensors`, in order, to every server; `what` names them in errors. They
        stay untouched until the transfer's `wait` has returned. Its `ours` gives the moment when
        they had left.

        Another transfer may be under way: a server gets this one's request when it has answered the
        other's, and its broadcast begins when the other's has left.
        """
        set_group_timeout(self.group, deadline.left + MARGIN)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        answers = self.servers.follow("/update_weights_from_distributed", body, deadline.left)
        self._last = in_thread(_broadcast, tensors, self.group, self._stream, self._last)
        return BucketTransfer(what, self._last, answers)

    def close(self, *, abort: bool = False) -> list[str]:
        """Leaves the group, servers first, and ends an open session. Returns what the servers
        objected, for the log: after a failure they may be stuck. One that has ended has left.

        `abort` does not wait for a broadcast under way: it ends, here and at servers that wait for
        it, when the servers that are not part of it leave the group.
        """
        patience = GRACE if abort else CLOSE_TIMEOUT
        name = {"group_name": self.group_name}
        rounds = [self.servers.start("/destroy_weights_update_group", name, patience)]
        rounds.append(self.servers.abandon_update(patience))
        cf.wait([f for calls in rounds for f in calls.values()], patience)
        destroy_update_group(self.group, abort=abort)
        ended = {server for server, call in rounds[0].items() if _has_ended(call)}
        left = [{s: f for s, f in calls.items() if s not in ended} for calls in rounds]
        return [said for calls in left for said in failures(calls)]


def _has_ended(call: cf.Future[Any]) -> bool:
    """Tells whether nothing listens at the server's address any more."""
    error = call.exception() if call.done() else None
    return error is not None and isinstance(error.__cause__, ConnectionRefusedError)


def _leave_late(joined: cf.Future[dist.ProcessGroup]) -> None:
    """Leaves a group that was joined when nobody waited for it any more."""
    if joined.exception() is None:
        destroy_update_group(joined.result(), abort=True)


def _broadcast(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    stream: torch.cuda.Stream | None,
    before: cf.Future[float] | None,
) -> float:
    """Sends from rank 0, after the broadcast `before`, and blocks until everything has left. Where
    that one failed, nothing is sent, and its error raised. Runs in a thread of its own: NCCL
    connects at the first broadcast, and without a receiver that call never returns. On a GPU it
    broadcasts on `stream`: a thread's current stream is the device's default one, which the main
    thread's work is queued on. The host waits for the end, not the stream: with one hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1) a stream that waits holds up what all others queue after it.
    """
    if before is not None:
        before.result()
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        works = [dist.broadcast(t, src=0, group=group, async_op=True) for t in tensors]
        for work in works:
            assert work is not None
            while stream is not None and not work.is_completed():
                time.sleep(0.001)
            work.wait()
    if stream is not None:
        stream.synchronize()
    return time.monotonic()


def address_for(servers: Iterable[str]) -> str:
    """Returns this process's address for all servers: loopback only if all of them are here."""
    hosts = [split_address(a)[0] for a in servers]
    far = [h for h in hosts if not is_loopback(h)]
    return address_towards((far or hosts)[0])
