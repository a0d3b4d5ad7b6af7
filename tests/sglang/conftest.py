"""One pair of servers, and one of two replicas, for the whole session: it takes a minute until
the pair is up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from megarl.config.rollout import RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.local import SGLangEngine
from megarl.utils.child import TERM_TIMEOUT
from megarl.utils.http import in_thread
from tests.dist.world import World
from tests.sglang import servers
from tests.sglang.servers import RealServer, launch, save_model

ROLLOUT = RolloutConfig(request_timeout=120, setup_timeout=300, episode_timeout=240)


# files whose tests share servers
SHARING = {
    f"test_{name}.py" for name in ("gateway", "generation", "replicas", "slices", "weight_sync")
}


class OneProcessShares(LoadScopeScheduling):
    """Runs the tests that share servers in one process, and each other file in any."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "shared" if Path(file).name in SHARING else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneProcessShares:
    return OneProcessShares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests that share servers first, because together they take longest."""
    items.sort(key=lambda item: item.path.name not in SHARING)


@dataclass(frozen=True)
class Pair:
    """client: an SGLangEngine and `one`, the server (tp 1) it has started. two: a server of tp 2.
    starting: a server of dp 2, which `replicas` waits for. m0: the model they started from, m1:
    another of the same shape.
    """

    client: SGLangEngine
    one: RealServer
    two: RealServer
    starting: RealServer
    m0: Path
    m1: Path

    @property
    def both(self) -> list[RealServer]:
        return [self.one, self.two]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(s.address for s in self.both)

    def load(self, path: Path) -> None:
        for server in self.both:
            server.load(path)


@pytest.fixture(scope="session", autouse=True)
def token() -> Iterator[None]:
    """A job's token, as the launcher would make it: in the environment of all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_JOB_TOKEN", "the-tests-secret")
        yield


@pytest.fixture(scope="session", autouse=True)
def starts_are_warm(warm: None) -> None:
    """Trainers start in a tenth of the time; SGLang has an interpreter of its own."""


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("pair")
    m0, m1 = (save_model(home / f"m{seed}", "qwen3", seed) for seed in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in servers.ENV.items():
            patch.setenv(name, value)
        started = [launch(m0, home / "two.log", tp=2)]
        client = SGLangEngine(
            ROLLOUT, servers.config(), model_path=str(m0), dtype="float32", log_dir=home
        )
        try:
            client.initialize()
            started[0].process.wait_healthy(servers.START_TIMEOUT)
            # its start goes on during the tests that do not need it
            options = {"skip_server_warmup": True}
            started.append(launch(m0, home / "replicas.log", dp=2, options=options))
            yield Pair(client, RealServer(client.processes[0]), *started, m0, m1)
        finally:
            for end in [in_thread(server.process.stop) for server in started]:
                end.result(2 * TERM_TIMEOUT)
            client.destroy()


@pytest.fixture(scope="session")
def replicas(pair: Pair) -> RealServer:
    """The server of two replicas, healthy."""
    pair.starting.process.wait_healthy(servers.START_TIMEOUT)
    return pair.starting


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two trainer processes."""
    with World(2, timeout=240) as w:
        yield w


@pytest.fixture
def client_of_two(pair: Pair) -> Iterator[RemoteSGLangEngine]:
    """A client of the server with tp 2."""
    config = RolloutConfig(addresses=[pair.two.address], request_timeout=120, setup_timeout=300)
    engine = RemoteSGLangEngine(config)
    engine.initialize()
    yield engine
    engine.destroy()
