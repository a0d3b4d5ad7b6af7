"""Reads `allocation_mode`, the text that gives a job's processes their GPUs.

    sglang.d4t2p1+megatron.d2t2p2c1e1    4 servers of 2 GPUs each, beside 8 trainer processes
    sglang:d4t2|megatron:d2t2p2          the same with servers on the trainers' GPUs
    megatron.d2t2                        trainers alone
    sglang.d12p1t1+d4p1t1                trainers without a backend are megatron's

A part is a backend and its degrees, in any order: d (data), t (tensor), p (pipeline), c (context)
and e (expert). A degree that is left out is 1, but for e, which is then the configuration's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.errors import ConfigError

# servers have no stages, so that their p is 1; their d is their number
_TEXT = re.compile(
    r"(?:(?P<backend>sglang|embedded)[.:](?P<servers>(?:[dt][1-9]\d*|p1(?!\d))+)(?P<sign>[+|]))?"
    r"(?:megatron[.:])?(?P<trainers>(?:[dtpce][1-9]\d*)+)"
)
_FORM = (
    "write it as sglang.d4t2+megatron.d2t2p2, with | where both share GPUs, or megatron.d2: "
    "servers (sglang, embedded) have the degrees d and t, trainers d, t, p, c and e, each from 1 "
    "and once"
)


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
        return math.prod(self.degree(letter) for letter in "dtpc")


@dataclass(frozen=True, kw_only=True)
class AllocationMode:
    """Says which GPUs servers and trainers take; `from_str` reads it. colocated: the servers are on
    the trainers' GPUs."""

    trainers: Part
    servers: Part | None = None
    colocated: bool = False

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Returns what `allocation_mode` says. Raises ConfigError that shows its form."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError([f"allocation_mode={text}: {_FORM}"])
        backend = match["backend"]
        return cls(
            trainers=_part("megatron", match["trainers"], text),
            servers=_part(backend, match["servers"], text) if backend else None,
            colocated=match["sign"] == "|",
        )

    def keys(self, role: str) -> dict[str, int | str]:
        """Returns the configuration keys that it decides, with their values; `role` is the section
        of the trained model."""
        letters = {"t": "tp", "p": "pp", "c": "cp"}
        if "e" in self.trainers.degrees:
            letters["e"] = "ep"
        keys: dict[str, int | str] = {
            f"{role}.parallel.{name}": self.trainers.degree(letter)
            for letter, name in letters.items()
        }
        if self.servers is not None:
            keys["server.type"] = self.servers.backend
            keys["server.count"] = self.servers.degree("d")
            keys["server.tp"] = self.servers.degree("t")
        return keys


def _part(backend: str, degrees: str, text: str) -> Part:
    numbers = re.findall(r"([a-z])(\d+)", degrees)
    if len(dict(numbers)) < len(numbers):
        raise ConfigError([f"allocation_mode={text}: {degrees} gives a degree twice; {_FORM}"])
    return Part(backend=backend, degrees={letter: int(number) for letter, number in numbers})
