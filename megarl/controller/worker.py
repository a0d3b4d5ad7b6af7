"""Is what a worker process of the controller serves: calls on its main thread, rows of tokens from
its shelf. `serve` is named to megarl.rpc, which makes the process."""

from __future__ import annotations

from collections.abc import Mapping
from pickle import PickleBuffer
from typing import Any

from megarl.controller.messages import READ, STOP, Peer
from megarl.controller.registry import Registry
from megarl.parallel import exchange  # noqa: F401  a Batch of several ranks travels by it
from megarl.rpc.link import Link, connect
from megarl.rpc.worker import on_main_thread
from megarl.utils import stopping

SERVE = "megarl.controller.worker:serve"
PULL_TIMEOUT = 600.0  # seconds in which another worker sends the rows of one request


class Peers:
    """Reads from the shelves of other workers; a link stays open for the next time."""

    def __init__(self) -> None:
        self._links: dict[Peer, Link] = {}

    def fetch(self, peer: Peer, path: str) -> bytearray:
        """Returns the bytes that a worker serves at `path`. Raises RemoteError with its error,
        RpcError where it is gone, TimeoutError after PULL_TIMEOUT."""
        if peer not in self._links:
            self._links[peer] = connect(peer.address, peer.name)
        rows: bytearray = self._links[peer].call(READ, path, PULL_TIMEOUT)
        return rows

    def close(self) -> None:
        """Closes the links."""
        for link in self._links.values():
            link.close()


class ControlledWorker:
    """Serves a Registry: its calls run on the process's main thread, in the order in which they
    came, and rows are read meanwhile."""

    def __init__(self, name: str) -> None:
        self._peers = Peers()
        self._registry = Registry(name, self._peers.fetch)

    def handle(self, verb: str, payload: Any) -> Any:
        """Returns what the registry answers. READ is answered at once, with the bytes of rows of
        tokens (`messages.rows_path`). STOP notes at once that the signal of this number asks the
        run to stop: a call that runs may be waiting for answers."""
        if verb == READ:
            return PickleBuffer(self._registry.shelf.read(payload))
        if verb == STOP:
            return stopping.note(payload)
        return on_main_thread(self._registry.handle, verb, payload)

    def close(self) -> None:
        """Closes the links to other workers."""
        self._peers.close()


def serve(index: int, count: int, options: Mapping[str, Any]) -> ControlledWorker:
    """Returns what worker `index` serves. options: {"group": the group's name}."""
    return ControlledWorker(f"{options['group']}/{index}")
