"""Where stores listen, and who meets at them."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest
import torch.distributed as dist

from megarl.utils.env import JOB_TOKEN, ensure_job_token, job_token
from megarl.utils.rendezvous import listen, meet
from tests.dist.world import free_port


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except ConnectionRefusedError:
        return False


@pytest.mark.parametrize("host", ("127.0.0.1", "localhost"))
def test_a_job_on_this_host_listens_here_alone(host: str) -> None:
    """127.0.0.2 is another address of this machine, as those of its network interfaces are."""
    for store in (listen(host, timeout=5), listen(host, free_port(), timeout=5)):
        assert listens("127.0.0.1", store.port) and not listens("127.0.0.2", store.port)
        store.set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ("node-1.example", "192.0.2.1"))
def test_what_is_no_address_of_this_machine_is_left_to_torch(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may be 127.0.1.1 here, and a service's address is nobody's own."""
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **given: (args, given))
    args, given = cast(Any, listen(host, 29500, timeout=5))
    assert args == (host, 29500) and given["master_listen_fd"] is None


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: .*in use"):
            listen("127.0.0.1", port, timeout=5)


def test_the_jobs_token_is_what_its_processes_meet_under(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv(JOB_TOKEN, "ours")
    port = free_port()
    first = meet("127.0.0.1", port, rank=0, world_size=2, timeout=5)
    first.set("address", "here")
    assert meet("127.0.0.1", port, rank=1, world_size=2, timeout=5).get("address") == b"here"
    for other in ("theirs", None):
        monkeypatch.setenv(JOB_TOKEN, other) if other else monkeypatch.delenv(JOB_TOKEN)
        stranger = meet("127.0.0.1", port, rank=1, world_size=2, timeout=5)
        assert not stranger.check(["address"])
        stranger.set("address", "elsewhere")
    assert first.get("address") == b"here"


def test_a_first_rank_that_is_stopped_is_not_waited_for_without_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel connects for it
        port = silent.getsockname()[1]
        with pytest.raises(TimeoutError, match=f"rank 1: .*127.0.0.1:{port}.*rank 0"):
            meet("127.0.0.1", port, rank=1, world_size=2, timeout=0.5)


def test_a_token_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_TOKEN, "")
    assert job_token() is None
    made = ensure_job_token()
    assert len(made) == 32 and job_token() == ensure_job_token() == made
    monkeypatch.setenv(JOB_TOKEN, "the user's")
    assert ensure_job_token() == "the user's"
