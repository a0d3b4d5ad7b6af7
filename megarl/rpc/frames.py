"""Proves that both ends of a connection have the job's token, and carries frames between them.

    listener -> dialer   MAGIC, instance [16], nonce [32]
    dialer -> listener   nonce [32], proof [32]
    listener -> dialer   proof [32], then frames both ways

A proof is an HMAC-SHA256 by the job's token over the role of the one who gives it, the instance (a
listener's own number) and both nonces. A key for each direction is made in the same way.

A frame is a head (number, kind, count and sizes of its parts, tag) and its parts. The tag is a
BLAKE2b under the direction's key, over a counter, the head and the first SIGNED parts: these are
unpickled, or choose what is done. Further parts are raw buffers, which are never unpickled; to sign
them would double the time of a large one (docs/security.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from io import BufferedReader, FileIO

from megarl.rpc.errors import Refused
from megarl.utils.env import JOB_TOKEN, collective_timeout, job_token

Part = bytes | bytearray | memoryview

GREET_TIMEOUT = 5.0  # seconds that a newcomer has for its proof
ANSWER_TIMEOUT = 120.0  # seconds in which a listener that others crowd must answer a newcomer
LARGEST = 1 << 33  # bytes of a frame
SIGNED = 2  # parts of a frame that its tag covers
_MOST_PARTS = 1 << 16
_JOINED = 1 << 16  # bytes up to which the parts of a frame are sent at once
_MAGIC, _NONCE = b"megarl-1", 32
_TAG = 16
_HEAD = struct.Struct(f"<QBIQQ{_TAG}s")  # number, kind, parts, sizes of the signed ones, tag
# seconds of silence until the system asks the other machine, and between its questions
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}


def new_instance() -> bytes:
    """Returns the number of a listener, by which its proofs are told from those of others."""
    return secrets.token_bytes(16)


def greet(sock: socket.socket, instance: bytes, token: str) -> Wire:
    """Returns the wire to whoever has dialed. Raises Refused where it does not prove within
    GREET_TIMEOUT seconds that it is of this job, OSError where it goes."""
    deadline = time.monotonic() + GREET_TIMEOUT
    nonce = os.urandom(_NONCE)
    sock.settimeout(GREET_TIMEOUT)
    sock.sendall(_MAGIC + instance + nonce)
    answer = _exactly(sock, 2 * _NONCE, deadline)
    about = instance + nonce + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _proof(token, b"dialer", about)):
        raise Refused(f"the dialer does not prove this job's {JOB_TOKEN}")
    sock.sendall(_proof(token, b"listener", about))
    return Wire(
        sock, _proof(token, b"to the dialer", about), _proof(token, b"to the listener", about)
    )


def introduce(sock: socket.socket, token: str) -> Wire:
    """Returns the wire to the listener that was dialed. Raises Refused where one of the two does
    not prove that it is of the other's job."""
    deadline = time.monotonic() + ANSWER_TIMEOUT
    hello = _exactly(sock, len(_MAGIC) + 16 + _NONCE, deadline)
    if not hello.startswith(_MAGIC):
        raise Refused("what listens there is no process of megarl's")
    nonce = os.urandom(_NONCE)
    about = hello[len(_MAGIC) :] + nonce
    sock.sendall(nonce + _proof(token, b"dialer", about))
    try:
        proof = _exactly(sock, _NONCE, deadline)
    except (EOFError, ConnectionError):
        raise Refused(f"the peer rejected the handshake: its {JOB_TOKEN} differs") from None
    if not hmac.compare_digest(proof, _proof(token, b"listener", about)):
        raise Refused(f"the listener does not prove this job's {JOB_TOKEN}")
    return Wire(
        sock, _proof(token, b"to the listener", about), _proof(token, b"to the dialer", about)
    )


def own_token() -> str:
    """Returns the job's token. Raises ValueError where the environment has none."""
    if (token := job_token()) is None:
        raise ValueError(f"{JOB_TOKEN} is not set: who calls a worker runs code in it")
    return token


def _proof(token: str, role: bytes, about: bytes) -> bytes:
    return hmac.new(token.encode(), role + b"\n" + about, hashlib.sha256).digest()


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Returns the next bytes. Raises TimeoutError at the deadline, EOFError at the end."""
    got = b""
    while len(got) < count:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = sock.recv(count - len(got))
        if not more:
            raise EOFError("the connection ended")
        got += more
    return got


class Wire:
    """Sends and receives frames. One thread receives; those that send take turns by themselves."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        """Takes a connection both ends of which are proved. One whose other machine is gone ends,
        that of a process that stands still not before the collective timeout."""
        self._sock = sock
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        patience = int(1000 * collective_timeout())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
        self._in = BufferedReader(FileIO(sock.fileno(), closefd=False), _JOINED)
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0

    def send(self, number: int, kind: int, parts: Sequence[Part]) -> None:
        """Sends a frame of at least SIGNED parts. Raises ValueError for one that is too large,
        OSError where the other end is gone."""
        views = [memoryview(part).cast("B") for part in parts]
        sizes = [len(view) for view in views]
        total = sum(sizes)
        if total > LARGEST or len(sizes) > _MOST_PARTS:
            why = f"the limit is {LARGEST:,} bytes and {_MOST_PARTS:,} parts"
            raise ValueError(f"a message of {total:,} bytes in {len(sizes):,} parts: {why}")
        table = struct.pack(f"<{len(sizes) - SIGNED}Q", *sizes[SIGNED:])
        about = number, kind, len(sizes), *sizes[:SIGNED]
        tag = _tag(self._send_key, self._sent, about, table, views[:SIGNED])
        self._sent += 1
        begin = _HEAD.pack(*about, tag) + table
        if total <= _JOINED:
            self._sock.sendall(b"".join((begin, *views)))
            return
        self._sock.sendall(begin)
        for view in views:
            self._sock.sendall(view)

    def receive(self) -> tuple[int, int, list[Part]]:
        """Returns (number, kind, parts) of the next frame; raw parts are bytearrays of their own.
        Raises EOFError at the end, Refused for a frame that was changed, left out or repeated."""
        number, kind, count, first, second, tag = _HEAD.unpack(self._read(_HEAD.size))
        if not SIGNED <= count <= _MOST_PARTS or first + second > LARGEST:
            raise Refused(f"a frame of {count:,} parts, {first + second:,} bytes")
        table = self._read(8 * (count - SIGNED))
        sizes = struct.unpack(f"<{count - SIGNED}Q", table)
        if sum(sizes) > LARGEST:
            raise Refused(f"a frame of {sum(sizes):,} bytes, of at most {LARGEST:,}")
        both = memoryview(self._read(first + second))
        signed = both[:first], both[first:]
        about = number, kind, count, first, second
        own_tag = _tag(self._receive_key, self._received, about, table, signed)
        if not hmac.compare_digest(tag, own_tag):
            raise Refused("a frame was changed, left out or repeated on its way")
        self._received += 1
        return number, kind, [*signed, *map(self._fill, sizes)]

    def close(self) -> None:
        """Ends the connection: whoever sends or receives gets an error."""
        with contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_RDWR)

    def free(self) -> None:
        """Frees the socket, when nobody sends or receives any more."""
        self._in.close()
        self._sock.close()

    def _read(self, count: int) -> bytes:
        if not count:
            return b""
        got = self._in.read(count)
        if len(got) < count:
            raise EOFError("the connection ended")
        return got

    def _fill(self, count: int) -> bytearray:
        buffer = bytearray(count)
        if self._in.readinto(buffer) < count:
            raise EOFError("the connection ended")
        return buffer


def _tag(
    key: bytes, counter: int, about: Sequence[int], table: bytes, signed: Sequence[Part]
) -> bytes:
    digest = hashlib.blake2b(counter.to_bytes(8, "little"), key=key, digest_size=_TAG)
    digest.update(_HEAD.pack(*about, b""))
    for part in (table, *signed):
        digest.update(part)
    return digest.digest()
