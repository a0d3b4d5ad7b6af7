"""Lets the nodes of a job find each other: a store of names and values on shared storage.

One directory is one attempt of a job, <run>/names/<job id>.<attempt>, so that none reads what an
earlier one wrote. A value is a file that is renamed into place, signed with the job's token: a
value that others wrote is refused. The file <run>/names/newest names the newest attempt; processes
of an older one that still run, on a node that its scheduler had lost, end when they see it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import socket
import struct
import time
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.rpc.group import LOOPBACK
from megarl.utils.env import address_towards, is_loopback
from megarl.utils.files import write_whole

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
LOOK_INTERVAL = 1.0  # seconds between looks at the shared directory
NEWEST = "newest"
_BEFORE = "before"  # the attempt that this one followed
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Superseded(RuntimeError):
    """Says that a newer attempt of the job runs."""


class ForgedName(RuntimeError):
    """Says that a value was not written with this job's token, or for another attempt."""


class Names:
    """Stores texts by name, for all nodes of a job: here those of one machine, in memory."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def put(self, name: str, value: str) -> None:
        """Publishes a value, in place of an earlier one."""
        self._known[name] = value

    def peek(self, name: str) -> str | None:
        """Returns the value, None where nobody has published one."""
        return self._known.get(name)

    def check(self) -> None:
        """Raises Superseded where a newer attempt has begun."""


class FileNames(Names):
    """Holds the names of one attempt in <directory>/<attempt>. attempt: <job id>.<n>[.<n>], whose
    numbers grow from one attempt to the next."""

    def __init__(self, directory: Path, attempt: str, *, token: str) -> None:
        if not _NAME.fullmatch(attempt):
            raise ValueError(f"attempt {attempt!r}: letters, digits, dots and dashes")
        self._root, self.attempt, self._token = directory, attempt, token.encode()
        self._directory = directory / attempt
        self._directory.mkdir(parents=True, exist_ok=True)
        super().__init__()
        self._looked = -LOOK_INTERVAL
        self._there: frozenset[str] = frozenset()

    def begin(self, nodes: int, *, timeout: float) -> None:
        """Makes this attempt the newest one, then waits until all `nodes` of the one before have
        ended, at most `timeout` seconds. Raises Superseded where a newer one has begun."""
        before = self._newest()
        if before is not None and _numbers(before) > _numbers(self.attempt):
            raise Superseded(_superseded(self.attempt, before))
        if before not in (None, self.attempt):
            self.put(_BEFORE, before)
        write_whole(self._root / NEWEST, self.attempt)
        if (before := self.peek(_BEFORE)) is None:
            return
        deadline, earlier = time.monotonic() + timeout, self._root / before
        while sum(name.startswith("end.") for name in os.listdir(earlier)) < nodes:
            if time.monotonic() > deadline:
                return  # they are gone without a word, or end when they see the newer attempt
            time.sleep(LOOK_INTERVAL / 4)

    def put(self, name: str, value: str) -> None:
        """Publishes a value, in place of an earlier one."""
        assert _NAME.fullmatch(name), name
        if self._known.get(name) == value:
            return
        signed = {"value": value, "mac": self._mac(name, value)}
        write_whole(self._directory / name, json.dumps(signed))
        self._known[name] = value

    def peek(self, name: str) -> str | None:
        """Returns the value, None where nobody has published one. Raises ForgedName for one that
        was not written by this attempt. Another node's value is at most LOOK_INTERVAL old."""
        if name in self._known and not name.startswith("end."):
            return self._known[name]
        self._look()
        if name not in self._there:
            return None
        path = self._directory / name
        try:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""  # a pipe would hang
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            text = ""
        self._known[name] = self._verified(name, text)
        return self._known[name]

    def published(self, name: str) -> bool:
        """Returns whether there is a value now."""
        return (self._directory / name).exists()

    def check(self) -> None:
        """Raises Superseded where a newer attempt has begun."""
        if self._look() and (newest := self._newest()) not in (None, self.attempt):
            raise Superseded(_superseded(self.attempt, str(newest)))

    def _look(self) -> bool:
        """Lists the directory if the last time is long enough ago; returns whether it did. Listing
        is what makes a network file system ask its server which names there are."""
        if time.monotonic() - self._looked < LOOK_INTERVAL:
            return False
        self._looked = time.monotonic()
        os.listdir(self._root)
        self._there = frozenset(os.listdir(self._directory))
        return True

    def _newest(self) -> str | None:
        try:
            return (self._root / NEWEST).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _verified(self, name: str, text: str) -> str:
        try:
            read = json.loads(text)
            value, mac = str(read["value"]), str(read["mac"])
        except (ValueError, KeyError, TypeError, RecursionError):
            value, mac = "", ""
        if not hmac.compare_digest(mac.encode(), self._mac(name, value).encode()):
            why = f"not written by attempt {self.attempt} of this job; who else can write there?"
            raise ForgedName(f"{self._directory / name}: {why}")
        return value

    def _mac(self, name: str, value: str) -> str:
        text = "\0".join((self.attempt, name, value))
        return hmac.new(self._token, text.encode(), hashlib.sha256).hexdigest()


def new_attempt() -> str:
    """Returns the name of an attempt that begins now."""
    return f"{time.time_ns()}.0"


def _numbers(attempt: str) -> tuple[int, ...]:
    """Returns the numbers in an attempt's name; a later attempt has greater ones."""
    return tuple(int(n) for n in re.findall(r"\d+", attempt))


def _superseded(attempt: str, newest: str) -> str:
    why = "ending at once, because the two attempts would write to the same files"
    return f"attempt {attempt} is not the newest of this run, {newest} is: {why}"


def node_address(interface: str = "") -> str:
    """Returns the IPv4 address at which other nodes reach this one: that of the interface, else of
    the host's name, else of the route to elsewhere. Raises ConfigError where there is none."""
    if interface:
        return _interface_address(interface)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = LOOPBACK
    if not is_loopback(address):
        return address
    try:  # as /etc/hosts often has it
        return address_towards("192.0.2.1")
    except OSError as e:
        raise ConfigError("cluster.interface: no address that others reach; name one") from e


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(s.fileno(), _GET_ADDRESS, request)
        except OSError as e:
            interfaces = ", ".join(name for _, name in socket.if_nameindex())
            why = f"no IPv4 address here; there are {interfaces}"
            raise ConfigError(f"cluster.interface={interface}: {why}") from e
    return socket.inet_ntoa(answer[20:24])
