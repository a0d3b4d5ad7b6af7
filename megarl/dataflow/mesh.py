"""Names a cluster's devices and the meshes of them that calls run on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.config.engine import ParallelConfig
from megarl.parallel.layout import Layout


@dataclass(frozen=True)
class Devices:
    """Counts a cluster's devices: `nodes` with `per_node` each. Device g is rank g of the job, and
    node n has the `per_node` devices from n * per_node on."""

    nodes: int
    per_node: int

    @classmethod
    def parse(cls, text: str) -> Devices:
        """Returns the devices that a text like "2x8" counts. Raises ValueError for any other."""
        parts = text.split("x")
        if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
            raise ValueError(f"{text!r}: give nodes and devices of a node, such as 2x8")
        return cls(int(parts[0]), int(parts[1]))

    @property
    def all(self) -> Mesh:
        """Returns the mesh of all devices."""
        return Mesh(0, self.nodes * self.per_node)

    def check(self, mesh: Mesh) -> None:
        """Raises ValueError for a mesh that these devices do not have. A mesh is whole nodes, or
        one of the equal parts that a node is cut into: its size divides the node's, and its first
        device is a multiple of its size."""
        unit = self.per_node if mesh.count >= self.per_node else mesh.count
        inside = mesh.count > 0 and 0 <= mesh.first <= self.all.count - mesh.count
        if not inside:
            why = f"{self.nodes}x{self.per_node} devices are {self.all}; name some of them"
            raise ValueError(f"mesh {mesh}: {why}")
        if mesh.count % unit or self.per_node % unit or mesh.first % unit:
            why = f"a mesh is whole nodes of {self.per_node} devices, or one of the equal parts"
            examples = f"{Mesh(0, 1)} or {self._part()}"
            raise ValueError(f"mesh {mesh}: {why} of a node, such as {examples}")

    def _part(self) -> Mesh:
        """Returns the second half of the first node, or all of it where it has no halves."""
        half = self.per_node // 2
        return Mesh(half, half) if half and self.per_node % 2 == 0 else Mesh(0, self.per_node)


@dataclass(frozen=True, order=True)
class Mesh:
    """Says which devices a call runs on: `count` of them, from device `first` on. Those devices are
    the ranks of the mesh's own world, in their order."""

    first: int
    count: int

    @property
    def devices(self) -> range:
        """Returns the devices, which are ranks of the job."""
        return range(self.first, self.first + self.count)

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"g{self.first}" if self.count == 1 else f"g{self.first}-g{last}"


@dataclass(frozen=True)
class Allocation:
    """Says where and how a call runs: its mesh and its parallel strategy. Raises ConfigError for
    degrees that do not fit the mesh."""

    mesh: Mesh
    parallel: ParallelConfig

    def __post_init__(self) -> None:
        self.layout  # noqa: B018

    @classmethod
    def parse(cls, text: str) -> Allocation:
        """Returns what `str` has written, such as "g0-g7 dp4 pp2"; sequence parallelism is on where
        tp is. Raises ValueError for another text, or degrees whose product is not the mesh's."""
        mesh, *words = text.split() or [""]
        found = re.fullmatch(r"g(\d+)(?:-g(\d+))?", mesh)
        pairs = [re.fullmatch(r"(dp|tp|pp|vpp|cp|ep|etp)(\d+)", word) for word in words]
        if found is None or None in pairs:
            raise ValueError(f"{text!r}: give a mesh and degrees, such as 'g0-g7 dp4 pp2'")
        first, last = int(found[1]), int(found[2] or found[1])
        degrees: dict[str, Any] = {pair[1]: int(pair[2]) for pair in pairs if pair is not None}
        dp = degrees.pop("dp", None)
        parallel = ParallelConfig(**degrees, sequence_parallel=degrees.get("tp", 1) > 1)
        made = cls(Mesh(first, last - first + 1), parallel)
        if dp not in (None, made.layout.dp):
            raise ValueError(f"{text!r}: dp{dp} does not fit: dp is {made.layout.dp} on this mesh")
        return made

    def __hash__(self) -> int:
        return hash((self.mesh, self.layout))

    @cached_property
    def layout(self) -> Layout:
        """Returns the degrees, with dp derived from the mesh."""
        return Layout.from_config(self.parallel, self.mesh.count)

    def __str__(self) -> str:
        layout = self.layout
        named = {n: getattr(layout, n) for n in ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")}
        degrees = " ".join(f"{name}{n}" for name, n in named.items() if n > 1)
        return f"{self.mesh} {degrees}".rstrip()
