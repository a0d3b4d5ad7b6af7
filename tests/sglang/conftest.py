"""One pair of servers for the whole session: it takes a minute until they are up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.config.rollout import RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.local import SGLangEngine
from tests.dist.world import World
from tests.sglang import servers
from tests.sglang.servers import RealServer, launch, save_model, serving

ROLLOUT = RolloutConfig(request_timeout=120, setup_timeout=60, episode_timeout=240)


@dataclass(frozen=True)
class Pair:
    """client: an SGLangEngine and `one`, the server (tp 1) it has started. two: a server of tp 2.
    m0: the model they started from, m1: another of the same shape.
    """

    client: SGLangEngine
    one: RealServer
    two: RealServer
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


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("pair")
    m0, m1 = (save_model(home / f"m{seed}", "qwen3", seed) for seed in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in servers.ENV.items():
            patch.setenv(name, value)
        two = launch(m0, home / "two.log", tp=2)
        client = SGLangEngine(
            ROLLOUT, servers.config(), model_path=str(m0), dtype="float32", log_dir=home
        )
        try:
            client.initialize()
            with serving(two):
                yield Pair(client, RealServer(client._processes[0]), two, m0, m1)
        finally:
            two.process.stop()
            client.destroy()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two trainer processes."""
    with World(2, timeout=240) as w:
        yield w


@pytest.fixture
def client_of_two(pair: Pair) -> Iterator[RemoteSGLangEngine]:
    """A client of the server with tp 2."""
    config = RolloutConfig(addresses=[pair.two.address], request_timeout=120, setup_timeout=60)
    engine = RemoteSGLangEngine(config)
    engine.initialize()
    yield engine
    engine.destroy()
