"""Meets a Ray cluster: connects, says what it has, and keeps processes on its nodes by actors."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import ray
from ray.job_config import JobConfig

from megarl.config.errors import ConfigError
from megarl.rpc.nodes import PACKAGE, Resources, described
from megarl.utils.child import Child, wait_until

KINDS = ("GPU", "CPU")
CONNECT = 10.0  # seconds to reach the head
LONGEST = 400  # characters of what Ray says


class NoRoom(RuntimeError):
    """Says that the cluster had no room for the job in time."""


class Keeper:
    """Starts one node's agent as a child of the worker that this runs in. The agent ends with the
    worker: with its actor, its launcher, and its node."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: str) -> None:
        """Starts the command. env: variables besides those of the worker."""
        self._agent = Child("agent", command, env={**os.environ, **env}, log_path=log_path)

    def wait(self, seconds: float) -> int | None:
        """Returns the agent's exit status, None where it still runs after so many seconds."""
        wait_until(lambda: self._agent.poll() is not None, timeout=seconds)
        return self._agent.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to the agent."""
        self._agent.signal(number)


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connects to the cluster, until the block ends. Raises ConfigError where there is none."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        _check_listens(address)
    try:
        ray.init(
            address or "auto",
            job_config=JobConfig(code_search_path=[str(PACKAGE.parent)]),
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise _no_cluster(address, e) from e
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raises ConfigError where nothing listens at an address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ConfigError(
            [
                f"RAY_ADDRESS={address}: must be host:port of the cluster's head; start the "
                "launcher on a machine of the cluster, or with `ray job submit`"
            ]
        )
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT).close()
    except OSError as e:
        raise _no_cluster(address, e) from e


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        [
            f"RAY_ADDRESS={address}: no Ray cluster: {one_line(error)}; start one with `ray start "
            "--head`, or set RAY_ADDRESS to host:port of its head"
        ]
    )


def import_path() -> dict[str, str]:
    """Returns the variable by which a process on a node imports this package."""
    path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def cluster_has() -> str:
    """Says what nodes the cluster has."""
    alive = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    found = counted([{k: r[k] for k in KINDS if k in r} for r in alive if {*KINDS} & {*r}])
    return f"the cluster has {found or 'no GPUs or CPUs'}, and `ray status` says what is in use"


def counted(nodes: Sequence[Resources]) -> str:
    """Returns how many nodes of each kind there are, as text."""
    kinds = Counter(map(described, nodes))
    return "; ".join(f"{count} node(s) of {kind}" for kind, count in kinds.items())


def one_line(error: BaseException) -> str:
    """Returns what Ray says of an error, without the fields of the actor that stand before it."""
    text = " ".join(str(error).split())
    _, because, why = text.partition("The actor died because ")
    text = why if because else text or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
