"""Names the part of a server's prefix cache in which a request finds KV, and leaves its own.

SGLang shares KV among requests of one `extra_key` alone. The key names a weight version, so what
`rollout.kv_after_sync` says of KV holds also for prefixes that were cached before an update.
"""

from __future__ import annotations

import uuid
from contextvars import ContextVar

# the version at which the episode began whose workflow runs; tasks that it starts inherit it
began: ContextVar[int | None] = ContextVar("began", default=None)


class CacheKeys:
    """Gives requests their keys. `version` is that of the weights now; `mode` is
    rollout.kv_after_sync.

    With keep, all requests of an episode name the version at which it began: they go on with its
    KV, and no KV is older than the episode that reads it. Else requests name the version of now.
    """

    def __init__(self, mode: str) -> None:
        self.mode, self.version = mode, 0
        self._run, self._returns = uuid.uuid4().hex[:8], 0

    def set_version(self, version: int) -> None:
        """Sets the version of the weights. A lower one than before begins new keys: what is cached
        under its number, and those that follow, comes from other weights."""
        if version < self.version:
            self._returns += 1
        self.version = version

    def begin(self) -> int:
        """Returns the version at which the running episode began; outside of one, that of now."""
        return self.version if (version := began.get()) is None else version

    def key(self, begun: int) -> str:
        """Returns the key of a request whose episode began at `begun`. Servers may have KV of other
        runs: no two share a key."""
        version = begun if self.mode == "keep" else self.version
        return f"megarl-{self._run}.{self._returns}-v{version}"
