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
_DEGREES = {TRAINERS: "dtpce", SERVERS: "dtp"}  # d of servers is their number
_PART = re.compile(r"(?:(\w+)[.:])?((?:[a-z]\d+)+)")
_EXAMPLE = "write it as sglang.d4t2+megatron.d2t2p2, with | where both share GPUs, or megatron.d2"


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
        """Returns what `allocation_mode` says. Raises ConfigError that names the part that is
        wrong."""
        first, *rest = re.split(r"([+|])", text)
        parts = [_part(text, piece) for piece in (first, *rest[1::2])]
        if len(parts) == 1 and parts[0].backend in TRAINERS:
            return cls(trainers=parts[0])
        if [p.backend in TRAINERS for p in parts] != [False, True]:
            raise _error(text, "it has servers, then trainers, or trainers alone")
        return cls(trainers=parts[1], servers=parts[0], colocated=rest[0] == "|")

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


def _part(text: str, piece: str) -> Part:
    """Returns one side of the allocation `text`."""
    if (match := _PART.fullmatch(piece)) is None:
        raise _error(text, f"{piece!r} is no backend with its degrees")
    backend, degrees = match[1] or TRAINERS[0], re.findall(r"([a-z])(\d+)", match[2])
    allowed = next((letters for names, letters in _DEGREES.items() if backend in names), None)
    if allowed is None:
        raise _error(text, f"{backend} is none of {', '.join((*SERVERS, *TRAINERS))}")
    for letter, number in degrees:
        if letter not in allowed or int(number) < 1:
            known = ", ".join(allowed)
            raise _error(text, f"{letter}{number} of {backend}: degrees are {known}, from 1")
    if len(dict(degrees)) < len(degrees):
        raise _error(text, f"{piece!r} gives a degree twice")
    if backend in SERVERS and dict(degrees).get("p", "1") != "1":
        raise _error(text, f"{piece!r}: a server has no pipeline stages; use t instead")
    return Part(backend=backend, degrees={letter: int(number) for letter, number in degrees})


def _error(text: str, problem: str) -> ConfigError:
    return ConfigError([f"allocation_mode={text}: {problem}; {_EXAMPLE}"])
