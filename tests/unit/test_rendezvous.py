"""Where stores listen, and who meets at them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist

from megarl.utils.env import JOB_TOKEN, ensure_job_token, job_token
from megarl.utils.rendezvous import listen, meet
from tests.dist.world import free_port


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=60):
            return True
    except ConnectionRefusedError:
        return False


@pytest.mark.parametrize("host", ("127.0.0.1", "localhost"))
def test_a_job_on_this_host_listens_here_alone(host: str) -> None:
    """127.0.0.2 is another address of this machine, as those of its network interfaces are."""
    for store in (listen(host, timeout=60), listen(host, free_port(), timeout=5)):
        assert listens("127.0.0.1", store.port) and not listens("127.0.0.2", store.port)
        store.set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ("node-1.example", "192.0.2.1"))
def test_what_is_no_address_of_this_machine_is_left_to_torch(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may be 127.0.1.1 here, and a service's address is nobody's own."""
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **given: (args, given))
    args, given = cast(Any, listen(host, 29500, timeout=60))
    assert args == (host, 29500) and given["master_listen_fd"] is None


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: .*in use"):
            listen("127.0.0.1", port, timeout=60)


class Agent:
    """A store that outlives its meetings, as torchrun's agent has it."""

    def __init__(self) -> None:
        self.store = listen("127.0.0.1", timeout=20)
        self.port = self.store.port

    def meet(self, rank: int, size: int = 2, timeout: float = 30) -> tuple[dist.Store, bytes]:
        return meet("127.0.0.1", self.port, rank=rank, world_size=size, timeout=timeout)

    def meet_all(self, size: int = 2) -> list[tuple[dist.Store, bytes]]:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: self.meet(rank, size), range(size)))

    def key(self, end: str) -> str:
        (found,) = (key for key in self.store.list_keys() if key.endswith(end))
        return found


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(JOB_TOKEN, "ours")
    return Agent()


@pytest.mark.parametrize("hosted_by", ("agent", "rank 0"))
@pytest.mark.parametrize("token", ("ours", ""))
def test_each_meeting_of_all_ranks_has_a_key(
    token: str, hosted_by: str, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_TOKEN, token)
    keys = set()
    for attempt in range(2):
        if hosted_by == "agent":
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        else:
            monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
            agent.port = free_port()
        met = agent.meet_all(3)
        met[0][0].set("address", "here")
        assert met[2][0].get("address") == b"here"
        assert len({key for _, key in met}) == 1
        keys.add(met[0][1])
    assert len(keys) == 2


def test_who_does_not_come_is_named(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"3 s at 127.0.0.1:{agent.store.port}"
    with pytest.raises(TimeoutError, match=f"rank 0 waited {where} for the nonce of rank 1, 2:"):
        agent.meet(0, size=3, timeout=3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    agent.meet_all()
    monkeypatch.setenv(JOB_TOKEN, "theirs")
    with pytest.raises(TimeoutError, match=f"rank 1 waited {where} for the nonce of rank 0:") as e:
        agent.meet(1, timeout=3)
    assert JOB_TOKEN in str(e.value) and "theirs" not in str(e.value)


def test_what_was_said_at_another_meeting_proves_nothing(agent: Agent) -> None:
    """What ranks said at an earlier meeting of this job is still there."""
    agent.meet_all()
    with pytest.raises(PermissionError, match="rank 0: rank 1 at"):
        agent.meet(0)
    agent.store.delete_key(agent.key("/proof/1"))
    with pytest.raises(TimeoutError, match=r"rank 0 waited 3 s at .* for the proof of rank 1:"):
        agent.meet(0, timeout=3)


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
