"""Shares values through a store that everybody can reach, among those that know the job's token.

Trainers and servers both use it. A value lies under a name made from the token, and begins with a
code of name and value made from it: who does not know the token neither finds a value nor puts one
where it would be believed. Each connection has a session of its own, so that nothing can be played
again.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TOKEN = "MEGARL_JOB_TOKEN"  # the environment variable
_STOP = "stop"
_CODE = hashlib.sha256().digest_size


class Mailbox:
    """Puts and takes values of one session. token: the job's, "" where it has none."""

    def __init__(self, store: dist.Store, session: str, token: str) -> None:
        self._store, self._session, self._key = store, session, token.encode() or b"no token"

    def name(self, what: str) -> str:
        """Returns the name in the store of what this session calls `what`."""
        return hmac.new(self._key, f"{self._session}/{what}".encode(), "sha256").hexdigest()

    def put(self, what: str, value: bytes) -> None:
        """Puts a value."""
        self._store.set(self.name(what), self._seal(what, value))

    def take(self, what: str) -> bytes:
        """Waits for a value, as long as the store's timeout says, and returns it. Raises
        PermissionError for one put by somebody with another token."""
        return self._open(what, bytes(self._store.get(self.name(what))))

    def has(self, what: str) -> bool:
        """Returns whether there is a value."""
        return bool(self._store.check([self.name(what)]))

    def stop(self, why: str) -> str:
        """Tells everybody to give up. Returns the word of whoever failed first, which stays. The
        store has answered, so it has the word: those whose connections are closed next look for
        it."""
        word = self._seal(_STOP, why.encode())
        first = self._store.compare_set(self.name(_STOP), "", word)  # sets it where there is none
        return self._open(_STOP, bytes(first)).decode()

    def stopped(self) -> str:
        """Returns why everybody is to give up, "" where nobody has said so."""
        return self.take(_STOP).decode() if self.has(_STOP) else ""

    def within(self, what: str, timeout: float) -> dist.Store:
        """Returns the part of the store that a group can meet at, waiting `timeout` s."""
        self._store.set_timeout(timedelta(seconds=timeout))
        return dist.PrefixStore(self.name(what), self._store)

    def _seal(self, what: str, value: bytes) -> Any:
        return self._code(what, value) + value  # torch takes bytes, and says str

    def _open(self, what: str, raw: bytes) -> bytes:
        if not hmac.compare_digest(raw[:_CODE], self._code(what, raw[_CODE:])):
            raise PermissionError(f"{what}: not put by a process with this job's {TOKEN}")
        return raw[_CODE:]

    def _code(self, what: str, value: bytes) -> bytes:
        return hmac.new(self._key, self.name(what).encode() + value, "sha256").digest()
