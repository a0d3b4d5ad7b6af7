"""Reads `allocation_mode`, the text that gives a job's processes their GPUs.

    sglang.d4t2p1+megatron.d2t2p2c1e1    4 servers of 2 GPUs each, beside 8 trainer processes
    sglang:d4t2|megatron:d2t2p2          the same with servers on the trainers' GPUs
    megatron.d2t2                        trainers alone
    sglang.d12p1t1+d4p1t1                trainers without a backend are megatron's

A part is a backend and its degrees, in any order: d (data), t (tensor), p (pipeline), c (context)
and e (expert). A degree that is left out is 1, but for e, which is then the configuration's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.errors import ConfigError

SERVERS = ("sglang", "embedded")
TRAINERS = ("megatron",)
_DEGREES = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_OF_SERVERS = ("d", "t", "p")  # data is their number
_DEGREE = re.compile(r"([a-zA-Z])([0-9]+)")
_BACKEND = re.compile(r"[a-zA-Z_]*")
_DEGREES_ALONE = re.compile(rf"[{''.join(_DEGREES)}][0-9]")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Gives one side of an allocation: `degrees` holds those that the text names."""

    backend: str
    degrees: Mapping[str, int]

    def degree(self, letter: str) -> int:
        """Returns the degree of a letter, 1 where the text leaves it out."""
        return self.degrees.get(letter, 1)

    @property
    def gpus(self) -> int:
        """Returns how many GPUs (on a CPU: processes) the part takes."""
        d, t, p, c = (self.degree(letter) for letter in "dtpc")
        return d * t * p * c


@dataclass(frozen=True, kw_only=True)
class AllocationMode:
    """Says which GPUs servers and trainers take; `from_str` reads it. colocated: the servers are on
    the trainers' GPUs."""

    trainers: Part
    servers: Part | None = None
    colocated: bool = False

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Returns what `allocation_mode` says. Raises ConfigError that counts to the first
        character that is wrong."""
        reader = _Reader(text)
        first = reader.part()
        if first.backend in TRAINERS:
            reader.end(
                "nothing follows the trainers; servers stand in front, as in sglang.d1+megatron"
            )
            return cls(trainers=first)
        separator = reader.separator()
        second_at = reader.at
        second = reader.part()
        if second.backend not in TRAINERS:
            raise reader.error(
                f"the second part is the trainers': {' or '.join(TRAINERS)}", second_at
            )
        reader.end("an allocation has two parts, servers and trainers")
        return cls(trainers=second, servers=first, colocated=separator == "|")

    def keys(self, role: str) -> dict[str, int | str]:
        """Returns the configuration keys that it decides, with their values; `role` is the section
        of the trained model."""
        t, prefix = self.trainers, f"{role}.parallel"
        keys: dict[str, int | str] = {
            f"{prefix}.tp": t.degree("t"),
            f"{prefix}.pp": t.degree("p"),
            f"{prefix}.cp": t.degree("c"),
        }
        if "e" in t.degrees:
            keys[f"{prefix}.ep"] = t.degree("e")
        if self.servers is not None:
            keys["server.type"] = self.servers.backend
            keys["server.count"] = self.servers.degree("d")
            keys["server.tp"] = self.servers.degree("t")
        return keys


class _Reader:
    """Reads the text from left to right; `at` is the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def error(self, problem: str, at: int | None = None) -> ConfigError:
        """Returns the error at character `at`, from 0 (None: the next)."""
        n = 1 + (self.at if at is None else at)
        return ConfigError([f"allocation_mode={self.text}: at character {n}: {problem}"])

    def part(self) -> Part:
        known, start = (*SERVERS, *TRAINERS), self.at
        if _DEGREES_ALONE.match(self.text, start):
            return Part(backend=TRAINERS[0], degrees=self._degrees(TRAINERS[0]))
        match = _BACKEND.match(self.text, start)
        backend = match[0] if match else ""
        if backend not in known:
            named = f"{backend!r} is no backend" if backend else "a backend is missing"
            raise self.error(f"{named}; there are {', '.join(known)}")
        self.at += len(backend)
        if self.text[self.at : self.at + 1] not in (".", ":"):
            raise self.error(f"write . or : behind {backend}, then its degrees, as in {backend}.d2")
        self.at += 1
        return Part(backend=backend, degrees=self._degrees(backend))

    def _degrees(self, backend: str) -> dict[str, int]:
        allowed = _OF_SERVERS if backend in SERVERS else tuple(_DEGREES)
        degrees: dict[str, int] = {}
        while self.at < len(self.text) and self.text[self.at] not in "+|":
            match = _DEGREE.match(self.text, self.at)
            letter = self.text[self.at]
            if letter not in allowed:
                words = ", ".join(f"{n} ({_DEGREES[n]})" for n in allowed)
                raise self.error(f"{letter!r} is no degree of {backend}; there are {words}")
            if letter in degrees:
                raise self.error(f"{letter} is given twice")
            if match is None or int(match[2]) < 1:
                raise self.error(f"{letter} needs a number from 1", self.at + 1)
            if letter == "p" and backend in SERVERS and int(match[2]) != 1:
                raise self.error("a server has no pipeline stages; use t instead", self.at + 1)
            degrees[letter] = int(match[2])
            self.at = match.end()
        if not degrees:
            raise self.error(f"{backend} has no degrees; write at least d1")
        return degrees

    def separator(self) -> str:
        found = self.text[self.at : self.at + 1]
        if not found:
            raise self.error(
                "the trainers are missing: + for GPUs of their own, | for those of the servers, "
                "then megatron and its degrees"
            )
        self.at += 1
        return found

    def end(self, problem: str) -> None:
        if self.at < len(self.text):
            raise self.error(problem)
