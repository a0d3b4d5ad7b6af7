"""Configures how new weights reach the generation servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megarl.config.base import POSITIVE, TIMEOUT, Choices
from megarl.config.transports import ALIASES, TRANSPORTS


@dataclass(kw_only=True)
class WeightSyncConfig:
    """Configures the transport of weights, its checks, and its timeouts in seconds."""

    type: Annotated[str, Choices(*TRANSPORTS, *ALIASES, or_path=True)] = "distributed"
    """distributed: stream buckets over NCCL/gloo; disk: through a shared HF directory;
    colocated: servers on the trainers' machines and GPUs read the trainers' memory; adapter:
    with actor.lora, the adapters alone, through a shared PEFT directory"""
    options: dict[str, Any] = field(default_factory=dict)
    """options of a transport of your own"""
    bucket_mb: Annotated[int, POSITIVE] = 512
    """size of one streamed bucket in MiB; two exist at a time"""
    flattened: bool = True
    """one broadcast per bucket instead of one per tensor"""
    delta: bool = False
    """send only what changed since the servers' version; costs a copy of the weights in the
    sender's host memory; embedded servers can apply it, and SGLang with sharded=on"""
    quantization: Annotated[str, Choices("none", "fp8_block")] = "none"
    """what streamed linear weights become: none, or fp8_block: e4m3 in blocks of 128x128 with
    scales, for servers of an FP8 checkpoint"""
    pause_mode: Annotated[str, Choices("abort", "drain", "retract", "in_place")] = "abort"
    """what becomes of requests under way when a sync pauses the servers: abort (the client sends
    them again, with the tokens so far), drain (they end first), retract (they wait in the
    server, which computes their tokens anew) or in_place (they go on with the old weights'
    cache, and no cache is flushed)"""
    senders: Annotated[int, POSITIVE] | None = 1
    """trainer ranks that gather and send buckets in turn, spread over pipeline stages and nodes;
    null is one on each stage"""
    sharded: Annotated[str, Choices("auto", "on", "off")] = "auto"
    """send each rank of a server the slices it keeps, from the trainers that hold them; auto:
    where all servers can take them, whole tensors otherwise, and the log says why; on: an error
    otherwise; off: whole tensors"""
    verify: Annotated[str, Choices("off", "sample", "full")] = "sample"
    """compare the servers' checksums with the trainer's after a sync; off: never; sample: all
    tensors after the first sync, later a few, others each time; full: all every time"""
    timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds one sync may take before it is an error"""
    server_timeout: Annotated[float, TIMEOUT] = 30.0
    """seconds without a sign of life after which a server that keeps a sync waiting is dropped;
    it is taken back when it answers again"""
