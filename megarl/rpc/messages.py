"""Packs and signs the messages between a job's processes, and tells strangers' from their own.

A head is signed with HMAC-SHA256 by the job's token: method, path, the server's instance, a fresh
number, and the SHA-256 of the body, which therefore is signed with it. The head is checked before
a byte of the body is kept, the body before anything is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from megarl.rpc.errors import Refused
from megarl.utils.job_token import ENV, job_token

_PREFIX = "Megarl-"
_ANY = "surrogateescape"  # a stranger's header may have any bytes
_SIGNATURE = _PREFIX + "Signature"
WINDOW = 1 << 16  # requests of one client that may overtake an older one


@dataclass(frozen=True)
class Packed:
    """Holds a body that is ready to be sent, to one worker or several, and its SHA-256."""

    body: bytes | bytearray | memoryview
    digest: str


def pack(payload: Any) -> Packed:
    """Returns `payload` as a body; of a script's own functions and classes it has the code."""
    return seal(cloudpickle.dumps(payload, protocol=5))


def seal(body: bytes | bytearray | memoryview) -> Packed:
    """Returns raw bytes as a body."""
    return Packed(body, hashlib.sha256(body).hexdigest())


def unpack(body: bytes | bytearray, head: Head) -> Any:
    """Returns what was packed. Raises Refused where the body is not the one that was signed."""
    check_body(body, head)
    return pickle.loads(body)


def check_body(body: bytes | bytearray, head: Head) -> None:
    """Raises Refused where the body is not the one that was signed."""
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), head.digest):
        raise Refused("the body is not the one that was signed")


@dataclass(frozen=True, kw_only=True)
class Head:
    """Holds what is signed of a message. what: "GET /ping", or the status of the answer to it.
    instance: of the server. number: of the request, "client.n". turn: which of its client's calls
    this is, from 1; 0 where it is none."""

    what: str
    instance: str
    number: str
    digest: str
    turn: int = 0

    def headers(self, token: str) -> dict[str, str]:
        """Returns the head as HTTP headers, with its signature."""
        fields = {_PREFIX + k.capitalize(): str(v) for k, v in vars(self).items() if k != "what"}
        return {**fields, _SIGNATURE: self._signature(token)}

    @classmethod
    def read(cls, what: str, headers: Mapping[str, str], token: str) -> Self:
        """Returns the head of a message. Raises Refused where its signature does not hold."""
        try:
            given = {k: headers[_PREFIX + k.capitalize()] for k in ("instance", "number", "digest")}
            head = cls(what=what, turn=int(headers[_PREFIX + "Turn"]), **given)
            signature = headers[_SIGNATURE]
        except (KeyError, ValueError) as e:
            raise Refused(f"{what}: the message is not signed with {ENV}") from e
        if not hmac.compare_digest(signature.encode(errors=_ANY), head._signature(token).encode()):
            raise Refused(f"{what}: the signature is not of this job's token ({ENV})")
        return head

    def _signature(self, token: str) -> str:
        text = "\n".join(map(str, vars(self).values()))
        return hmac.new(token.encode(), text.encode(errors=_ANY), hashlib.sha256).hexdigest()


@dataclass
class Fresh:
    """Knows the numbers of requests that came, so that none is taken twice."""

    _top: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, set[int]] = field(default_factory=dict)

    def take(self, number: str) -> None:
        """Notes a number. Raises Refused where it came before, or WINDOW later ones did."""
        client, _, digits = number.partition(".")
        n = int(digits)
        seen, top = self._seen.setdefault(client, set()), self._top.get(client, 0)
        if n in seen or n <= top - WINDOW:
            raise Refused(f"request {number} came before")
        seen.add(n)
        self._top[client] = top = max(top, n)
        if len(seen) > 2 * WINDOW:
            self._seen[client] = {m for m in seen if m > top - WINDOW}


def own_token() -> str:
    """Returns the job's token. Raises ValueError where the environment has none."""
    if (token := job_token()) is None:
        raise ValueError(f"{ENV} is not set: who calls a worker runs code in it")
    return token
