"""Makes a process group of its own between the trainer's sender and the generation servers.

It is wire-compatible with SGLang's `init_custom_process_group`: the same rendezvous and the same
store prefixes, so either side may be ours or SGLang's. It stands beside torch.distributed's default
group and does not need one.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.utils.env import is_loopback
from megarl.utils.rendezvous import listen

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_NEVER_SENT = 0x6E65  # tag of a message nobody sends


def init_update_group(
    *,
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: float,
    store: dist.Store | None = None,
) -> dist.ProcessGroup:
    """Joins the group `group_name` of `world_size` ranks; returns when all of them have joined.

    Rank 0 listens at master_address:master_port, or already does at `store` (see `listen`). The
    name is no secret, and no rank has proved anything on return. Raises torch's DistStoreError or
    RuntimeError when the others do not come within `timeout` s.
    """
    wait = timedelta(seconds=timeout)
    if store is None and rank == 0:
        store = listen(master_address, master_port, timeout=timeout)
    elif store is None:
        host = f"[{master_address}]" if ":" in master_address else master_address
        url = f"tcp://{host}:{master_port}"
        store, rank, world_size = next(dist.rendezvous(url, rank, world_size, timeout=wait))
        store.set_timeout(wait)
    with _loopback_gloo(master_address):
        return join_group(
            store,
            rank=rank,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            timeout=timeout,
        )


def join_group(
    store: dist.Store, *, rank: int, world_size: int, group_name: str, backend: str, timeout: float
) -> dist.ProcessGroup:
    """Joins a group whose ranks meet at `store`, where no group may have had this name before."""
    with _independent_of_default_group(backend):
        pg, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(group_name, store),
            group_name=group_name,  # type: ignore[arg-type]
            timeout=timedelta(seconds=timeout),
        )
    # what dist.broadcast(src=...) reads; new_group() would do it for subgroups of the default
    c10d._world.pg_group_ranks[pg] = {i: i for i in range(world_size)}
    return pg


def prove(pg: dist.ProcessGroup, key: bytes) -> None:
    """Checks, over the connections of `pg`, that each of its ranks knows `key`, that of a meeting.

    It is the first exchange of a group: nothing that a peer sends is unpickled or believed before.
    A proof is an HMAC over the group's name, its size, the sender and (over gloo, where two ranks
    share a connection) the receiver. Raises PermissionError if a rank's proof is wrong. Collective.
    """
    size, own = pg.size(), pg.rank()
    in_pairs = dist.get_backend(pg) == dist.Backend.GLOO

    def proof(sender: int, receiver: int) -> bytes:
        about = f"{pg.group_name} {size} {sender} {receiver if in_pairs else 'all'}"
        return hmac.new(key, about.encode(), "sha256").digest()

    proofs = b"".join(proof(own, r) for r in (range(size) if in_pairs else [own]))
    device = "cpu" if in_pairs else "cuda"
    sent = torch.frombuffer(bytearray(proofs), dtype=torch.uint8).to(device)
    got = torch.empty(32 * size, dtype=torch.uint8, device=device)
    exchange = dist.all_to_all_single if in_pairs else dist.all_gather_into_tensor
    exchange(got, sent, group=pg)
    rows = got.view(size, 32).cpu().numpy()
    wrong = [r for r in range(size) if not hmac.compare_digest(rows[r].tobytes(), proof(r, own))]
    if wrong:
        raise PermissionError(
            f"rank {own} of {size} in group {pg.group_name}: rank {', '.join(map(str, wrong))} did "
            "not prove that it met with this job's token: a stranger takes its place"
        )


def destroy_update_group(pg: dist.ProcessGroup, *, abort: bool = False) -> None:
    """Leaves the group. `abort` also ends collectives in flight, ours and (by the closed
    connections) the other members', instead of waiting for them.
    """
    if abort:
        abort_collectives(pg)
    dist.destroy_process_group(pg)


def abort_collectives(pg: dist.ProcessGroup) -> None:
    """Ends collectives under way in other threads with an error there. The group is of no more use.

    NCCL can. Gloo's abort does nothing, but an operation that times out closes all connections of
    its group, and what waits for one ends.
    """
    pg.abort()
    if dist.get_backend(pg) != dist.Backend.GLOO:
        return
    for peer in set(range(pg.size())) - {pg.rank()}:
        with contextlib.suppress(RuntimeError):  # it times out, or the connection is closed already
            pg.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def set_group_timeout(pg: dist.ProcessGroup, timeout: float) -> None:
    """Bounds every later collective of `pg` to `timeout` s."""
    c10d._set_pg_timeout(timedelta(seconds=timeout), pg)


@contextlib.contextmanager
def bounded(pg: dist.ProcessGroup | None, timeout: float) -> Iterator[None]:
    """Has collectives of `pg` (None: the default group, if there is one) take `timeout` s at most
    inside, however long they may take otherwise."""
    if pg is None and not dist.is_initialized():
        yield
        return
    pg = pg or c10d._get_default_group()
    before = pg._get_backend(pg._device_types[0]).options._timeout
    set_group_timeout(pg, timeout)
    try:
        yield
    finally:
        c10d._set_pg_timeout(before, pg)


@contextlib.contextmanager
def _loopback_gloo(master_address: str) -> Iterator[None]:
    """Has gloo use the loopback interface for a group on one machine. Gloo would resolve the host
    name, which laptops and containers often cannot."""
    if not is_loopback(master_address) or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


@contextlib.contextmanager
def _independent_of_default_group(backend: str) -> Iterator[None]:
    """Hides the default group's device inside. torch makes a new NCCL group by splitting the
    default one when that is bound to a device, and a split waits for every rank of the default
    group; ours has other members."""
    default = dist.group.WORLD if dist.is_initialized() and backend == "nccl" else None
    bound = default.bound_device_id if default is not None else None
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
