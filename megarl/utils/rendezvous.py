"""Makes the stores that processes meet at: they listen where the job is, and nowhere else.

torch's own listens on every interface of the machine, also for a job at 127.0.0.1.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from megarl.utils.env import job_token
from megarl.utils.http import in_thread

_BACKLOG = 2048  # connections that may wait, for ranks that all come at once


def listen(host: str, port: int = 0, *, timeout: float) -> dist.TCPStore:
    """Returns the store that rank 0 of a group to come waits at; port 0 takes a free one (`.port`).

    It listens at the address `host`. Where that is a name, or no address of this machine (a
    service's, whose packets come under ours), it listens on every interface, as torch does.
    Raises OSError or torch's DistNetworkError where the port is taken.
    """
    host = "127.0.0.1" if host == "localhost" else host
    bound = _bind(host, port)
    return dist.TCPStore(
        host,
        bound.getsockname()[1] if bound else port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=bound.detach() if bound else None,
    )


def meet(host: str, port: int, *, rank: int, world_size: int, timeout: float) -> dist.Store:
    """Returns the store of a job whose ranks all call this. A process with another job token finds
    nobody there. Where torchrun's agent has the store, it has chosen where it listens. Raises
    TimeoutError where rank 0 listens and does not answer (it is stopped), which torch waits for
    without end."""
    wait = timedelta(seconds=timeout)
    store: dist.Store
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = listen(host, port, timeout=timeout)
    else:
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        join = dist.rendezvous(f"tcp://{place}", rank, world_size, timeout=wait)
        try:
            store = in_thread(next, join).result(timeout + 5)[0]  # torch's own time-out is earlier
        except TimeoutError:
            what = f"who listens at {place} did not answer within {timeout:g} s"
            raise TimeoutError(f"rank {rank}: {what}: is rank 0 stopped, or its host?") from None
    store.set_timeout(wait)
    return dist.PrefixStore(f"megarl_{job_token() or 'job'}", store)


def _bind(host: str, port: int) -> socket.socket | None:
    """Returns a socket that listens there, None where `host` is no address of this machine."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:  # a name: what it is here may not be what it is on other machines
        return None
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as e:
        if e.errno == errno.EADDRNOTAVAIL:
            return None
        raise OSError(e.errno, f"cannot listen at {host}:{port}: {e.strerror}") from e
