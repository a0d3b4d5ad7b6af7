"""Configures how new weights reach the servers, and lists the ways: names, and what each needs.

The registry is the one place that knows megarl's own transports by name. A user's own is a subclass
of `megarl.weight_sync.transports.Transport`, named by `weight_sync.type: pkg.module:name`, that
declares its `requirements` itself. No torch is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megarl.config.base import POSITIVE, TIMEOUT, Choices
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
    requirements: Requirements


_PACKAGE = "megarl.weight_sync.transports"
TRANSPORTS: Mapping[str, BuiltIn] = {
    "distributed": BuiltIn(
        target=f"{_PACKAGE}.distributed:DistributedTransport",
        requirements=Requirements(process_group=True, less=True),
    ),
    "disk": BuiltIn(
        target=f"{_PACKAGE}.disk:DiskTransport",
        requirements=Requirements(directory=True),
    ),
    "colocated": BuiltIn(
        target=f"{_PACKAGE}.colocated:ColocatedTransport",
        requirements=Requirements(shares_devices=True),
    ),
    "adapter": BuiltIn(
        target=f"{_PACKAGE}.adapter:AdapterTransport",
        requirements=Requirements(directory=True, adapters=True),
    ),
}
ALIASES: Mapping[str, str] = {"nccl": "distributed"}  # the design documents' word


@dataclass(kw_only=True)
class WeightSyncConfig:
    """Configures the transport of weights, its checks, and its timeouts in seconds."""

    type: Annotated[str, Choices(*TRANSPORTS, *ALIASES, or_path=True)] = "distributed"
    """distributed: buckets over NCCL or gloo; disk: a shared HF directory; colocated: servers on
    the trainers' GPUs read the trainers' memory; adapter: with actor.lora, adapters alone through a
    shared PEFT directory"""
    options: dict[str, Any] = field(default_factory=dict)
    """options of a transport of your own"""
    bucket_mb: Annotated[int, POSITIVE] = 512
    """size of one streamed bucket in MiB; two exist at a time"""
    flattened: bool = True
    """one broadcast per bucket instead of one per tensor"""
    delta: bool = False
    """send only numbers that changed; needs host memory for a copy of the weights on the senders,
    and embedded servers or SGLang with sharded=on"""
    quantization: Annotated[str, Choices("none", "fp8_block")] = "none"
    """dtype of streamed linear weights: none, or fp8_block (e4m3 in blocks of 128x128 with scales)
    for servers of an FP8 checkpoint"""
    pause_mode: Annotated[str, Choices("abort", "drain", "retract", "in_place")] = "abort"
    """running requests at a sync: abort: the client sends them again with the tokens so far; drain:
    they end first; retract: they wait in the server, which recomputes their KV; in_place: they
    continue on the old weights' KV, and no cache is flushed"""
    senders: Annotated[int, POSITIVE] | None = 1
    """trainer ranks that gather and send buckets in turn, spread over pipeline stages and nodes;
    null is one on each stage"""
    sharded: Annotated[str, Choices("auto", "on", "off")] = "auto"
    """send each rank of a server only the slices that it stores; auto: if all servers can receive
    slices, else whole tensors (the log says why); on: anything else is an error; off: whole
    tensors"""
    verify: Annotated[str, Choices("off", "sample", "full")] = "sample"
    """compare the servers' checksums with the trainer's after a sync: sample: all tensors after the
    first sync, a few after later ones; full: all after each; off: never"""
    timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds one sync may take before it is an error"""
    server_timeout: Annotated[float, TIMEOUT] = 30.0
    """seconds without an answer after which a server that delays a sync is dropped, until it
    answers again"""


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
