"""Is what a worker process of the controller serves: calls on its main thread, bytes from its
shelf. `serve` is named to megarl.rpc, which makes the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.controller.messages import Peer
from megarl.controller.registry import Registry
from megarl.parallel import exchange  # noqa: F401  a Batch of several ranks travels by it
from megarl.rpc.client import RpcClient
from megarl.rpc.main_thread import MAIN_THREAD
from megarl.rpc.messages import pack
from megarl.utils import stopping

SERVE = "megarl.controller.worker:serve"
PULL_TIMEOUT = 600.0  # seconds in which another worker sends the rows of one request


class Peers:
    """Reads from the shelves of other workers; a connection stays open for the next time."""

    def __init__(self) -> None:
        self._clients: dict[Peer, RpcClient] = {}

    def fetch(self, peer: Peer, path: str) -> bytearray:
        """Returns the bytes that a worker serves at `path`. Raises RemoteError with its error,
        RpcError where it is gone, TimeoutError after PULL_TIMEOUT."""
        if peer not in self._clients:
            self._clients[peer] = RpcClient(peer.address, peer.name)
        return self._clients[peer].read(path, PULL_TIMEOUT)

    def close(self) -> None:
        """Closes the connections."""
        for client in self._clients.values():
            client.close()


class ControlledWorker:
    """Serves a Registry: its calls run on the process's main thread, in the order in which they
    came, and `read` answers meanwhile."""

    def __init__(self, name: str) -> None:
        self._peers = Peers()
        self._registry = Registry(name, self._peers.fetch)

    async def handle(self, verb: str, payload: Any) -> Any:
        """Returns what the registry answers. "stop" notes at once that the signal of this number
        asks the run to stop: a call that runs may be waiting for answers."""
        if verb == "stop":
            return stopping.note(payload)
        return await MAIN_THREAD.call(lambda: pack(self._registry.handle(verb, payload)))

    def read(self, key: str) -> bytes:
        """Returns the bytes of rows of tokens, see `messages.rows_path`."""
        return self._registry.shelf.read(key)

    def close(self) -> None:
        """Closes the connections to other workers."""
        self._peers.close()


def serve(index: int, count: int, options: Mapping[str, Any]) -> ControlledWorker:
    """Returns what worker `index` serves. options: {"group": the group's name}."""
    return ControlledWorker(f"{options['group']}/{index}")
