"""Lists the ways to send weights to the servers: their names, and what each needs of a job.

This registry is the one place that knows megarl's own ways by name. A user's own is a subclass of
`megarl.weight_sync.transports.Transport`, named by `weight_sync.type: pkg.module:name`, that
declares its `requirements` itself. No torch is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.utils.importing import load_object


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Declares what a transport needs. Checks of configurations, the launcher and records read it.

    directory: WeightUpdateMeta.path, a directory that trainers and servers share.
    process_group: trainers and servers meet in one process group, so each process needs a GPU of
        its own and both sides the same NCCL.
    shares_devices: servers are on the trainers' machines and GPUs.
    adapters: LoRA adapters are sent without their base; requests name the adapter.
    less: it can send changes alone (`delta`) and FP8 (`quantization`).
    """

    directory: bool = False
    process_group: bool = False
    shares_devices: bool = False
    adapters: bool = False
    less: bool = False


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """Describes one of megarl's own transports. target: pkg.module:name of its class."""

    target: str
    help: str
    requirements: Requirements


_PACKAGE = "megarl.weight_sync.transports"
TRANSPORTS: Mapping[str, BuiltIn] = {
    "distributed": BuiltIn(
        target=f"{_PACKAGE}.distributed:DistributedTransport",
        help="stream buckets over NCCL/gloo",
        requirements=Requirements(process_group=True, less=True),
    ),
    "disk": BuiltIn(
        target=f"{_PACKAGE}.disk:DiskTransport",
        help="through a shared HF directory",
        requirements=Requirements(directory=True),
    ),
    "colocated": BuiltIn(
        target=f"{_PACKAGE}.colocated:ColocatedTransport",
        help="servers on the trainers' machines and GPUs read the trainers' memory",
        requirements=Requirements(shares_devices=True),
    ),
    "adapter": BuiltIn(
        target=f"{_PACKAGE}.adapter:AdapterTransport",
        help="with actor.lora, the adapters alone, through a shared PEFT directory",
        requirements=Requirements(directory=True, adapters=True),
    ),
}
ALIASES: Mapping[str, str] = {"nccl": "distributed"}  # the design documents' word
HELP = "; ".join(f"{name}: {way.help}" for name, way in TRANSPORTS.items())


def transport_name(type_: str) -> str:
    """Returns the name without aliases. Raises ValueError for a name that is neither known nor an
    import path."""
    name = ALIASES.get(type_, type_)
    if name not in TRANSPORTS and ":" not in name:
        known = ", ".join((*TRANSPORTS, *ALIASES))
        raise ValueError(f"{type_!r}: not one of {known}, and no pkg.module:name")
    return name


def built_in_transport(type_: str) -> BuiltIn | None:
    """Returns megarl's own transport of this name or alias, None for any other text."""
    return TRANSPORTS.get(ALIASES.get(type_, type_))


def transport_class(type_: str) -> Any:
    """Imports the transport's class. Raises ValueError where that fails, or it is no Transport."""
    name = transport_name(type_)
    built_in = built_in_transport(name)
    found = load_object(built_in.target if built_in else name, what="transport")
    declared = getattr(found, "requirements", None)
    if not inspect.isclass(found) or not isinstance(declared, Requirements):
        raise ValueError(
            f"transport {name!r}: a {type(found).__name__} without `requirements`; expected a "
            "subclass of megarl.weight_sync.transports.Transport"
        )
    return found


def requirements_of(type_: str) -> Requirements:
    """Returns what a transport needs; a user's own is imported to read it. Raises ValueError where
    there is no such transport."""
    built_in = built_in_transport(type_)
    if built_in is not None:
        return built_in.requirements
    found: Requirements = transport_class(type_).requirements
    return found
