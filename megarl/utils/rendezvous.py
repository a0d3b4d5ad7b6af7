"""Creates the stores that processes meet at, and checks that every rank knows the job's token.

torch's own store listens on every interface of the machine, even for a job at 127.0.0.1.

Anybody who reaches a store lists its keys and reads and changes its values. So no key and no value
contains the token: the prefix of the keys is an HMAC of the token. Each rank publishes a fresh
nonce, then an HMAC of its rank under the key of this meeting. The key is an HMAC by the token over
the number of ranks and the nonces of all ranks.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
from datetime import timedelta

import torch.distributed as dist

from megarl.utils.env import JOB_TOKEN, job_token
from megarl.utils.http import in_thread

_BACKLOG = 2048  # connections that may wait, for ranks that all come at once
_NO_TOKEN = "no token"  # every process that has no token knows this


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


def meet(
    host: str, port: int, *, rank: int, world_size: int, timeout: float
) -> tuple[dist.Store, bytes]:
    """Returns the store of a job, and the key that only ranks of this meeting know; every rank
    calls this. If torchrun's agent hosts the store, the agent has chosen where the store listens.

    Raises TimeoutError if rank 0 listens and does not answer (torch itself would wait without
    end), or if a rank does not come within `timeout` s: ranks with another token meet elsewhere.
    Raises PermissionError if a rank does not prove that it knows the job's token. Collective.
    """
    wait = timedelta(seconds=timeout)
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    store: dist.Store
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = listen(host, port, timeout=timeout)
    else:
        join = dist.rendezvous(f"tcp://{place}", rank, world_size, timeout=wait)
        try:
            store = in_thread(next, join).result(timeout + 5)[0]  # torch's own time-out is earlier
        except TimeoutError:
            what = f"who listens at {place} did not answer within {timeout:g} s"
            raise TimeoutError(f"rank {rank}: {what}: is rank 0 stopped, or its host?") from None
    store.set_timeout(wait)
    token = (job_token() or _NO_TOKEN).encode()
    # torchrun's store outlives the processes that torchrun restarts
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(_mac(token, f"rendezvous {attempt}").hex(), store)
    nonce, within = secrets.token_bytes(32), f"{timeout:g} s at {place}"
    nonces = _exchange(store, "nonce", nonce, rank, world_size, within)
    nonces[rank] = nonce  # what the store holds under this rank may be another's by now
    each = " ".join(hashlib.sha256(n).hexdigest() for n in nonces)
    key = _mac(token, f"meeting {world_size} {each}")
    proofs = _exchange(store, "proof", _mac(key, f"rank {rank}"), rank, world_size, within)
    wrong = [
        r for r in range(world_size) if not hmac.compare_digest(proofs[r], _mac(key, f"rank {r}"))
    ]
    if wrong:
        others = f"rank {', '.join(map(str, wrong))} at {place} did not prove its {JOB_TOKEN}"
        raise PermissionError(f"rank {rank}: {others}: a stranger is there, or changes the store")
    return store, key


def _exchange(
    store: dist.Store, what: str, value: bytes, rank: int, world_size: int, within: str
) -> list[bytes]:
    """Returns every rank's `value`, by rank. Raises TimeoutError that names the missing ranks."""
    keys = [f"{what}/{r}" for r in range(world_size)]
    store.set(keys[rank], value)  # type: ignore[arg-type]  # torch takes bytes, and says str
    try:
        return list(store.multi_get(keys))
    except dist.DistStoreError as e:
        missing = ", ".join(str(r) for r, key in enumerate(keys) if not store.check([key]))
        why = f"rank {rank} waited {within} for the {what} of rank {missing}"
        raise TimeoutError(f"{why}: it did not start, or has another {JOB_TOKEN}") from e


def _mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), "sha256").digest()


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
