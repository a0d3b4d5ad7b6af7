"""Describes one model function call of an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.dataflow.mesh import Allocation

GENERATE, INFERENCE, TRAIN_STEP, COMPUTE = "generate", "inference", "train_step", "compute"
KINDS = (GENERATE, INFERENCE, TRAIN_STEP, COMPUTE)


@dataclass(frozen=True)
class Call:
    """Describes one call of a model as data: what it reads, what it makes, where it runs.

    name: unique in its graph. model: the role whose verb it is. kind: "generate", "inference" or
    "train_step"; a "compute" works on the batch's numbers and runs no model. inputs, outputs: keys
    of the batch.

    verb: the method of the role that is called with the batch and `args`; into: the key under which
    its result is put, empty where the verb adds its keys to the batch itself.

    where: the mesh and the strategy, None for where the model is already. offload: the model leaves
    the devices' memory after the call, and returns before the next.
    """

    name: str
    model: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    verb: str = field(default="", kw_only=True)
    into: str = field(default="", kw_only=True)
    args: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    where: Allocation | None = field(default=None, kw_only=True)
    offload: bool = field(default=False, kw_only=True)
