"""Configures how new weights reach the generation servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.base import arg
from megarl.config.bounds import POSITIVE, TIMEOUT
from megarl.config.transports import ALIASES, HELP, TRANSPORTS


@dataclass(kw_only=True)
class WeightSyncConfig:
    """Configures the transport of weights, its checks, and its timeouts in seconds."""

    type: str = arg(
        "distributed",
        help=HELP,
        choices=(*TRANSPORTS, *ALIASES),
        or_path=True,
    )
    options: dict[str, Any] = arg(factory=dict, help="options of a transport of your own")
    bucket_mb: int = arg(
        512, bounds=POSITIVE, help="size of one streamed bucket in MiB; two exist at a time"
    )
    flattened: bool = arg(True, help="one broadcast per bucket instead of one per tensor")
    delta: bool = arg(
        False,
        help="send only what changed since the servers' version; costs a copy of the weights in "
        "the sender's memory; embedded servers can apply it, and SGLang with sharded=on",
    )
    delta_on_host: bool = arg(True, help="that copy lies in host memory, not on the GPU")
    quantization: str = arg(
        "none",
        help="what streamed linear weights become: none, or fp8_block: e4m3 in blocks of 128x128 "
        "with scales, for servers of an FP8 checkpoint",
        choices=("none", "fp8_block"),
    )
    pause_mode: str = arg(
        "abort",
        help="what becomes of requests under way when a sync pauses the servers: abort (the client "
        "sends them again, with the tokens so far), drain (they end first), retract (they wait in "
        "the server, which computes their tokens anew) or in_place (they go on with the old "
        "weights' cache, and no cache is flushed)",
        choices=("abort", "drain", "retract", "in_place"),
    )
    senders: int | None = arg(
        1,
        bounds=POSITIVE,
        help="trainer ranks that gather and send buckets in turn, spread over pipeline stages and "
        "nodes; null is one on each stage",
    )
    sharded: str = arg(
        "auto",
        help="send each rank of a server the slices it keeps, from the trainers that hold them; "
        "auto: where all servers can take them, whole tensors otherwise, and the log says why; on: "
        "an error otherwise; off: whole tensors",
        choices=("auto", "on", "off"),
    )
    verify: str = arg(
        "sample",
        help="compare the servers' checksums with the trainer's after a sync; off: never; sample: "
        "all tensors after the first sync, later a few, others each time; full: all every time",
        choices=("off", "sample", "full"),
    )
    timeout: float = arg(
        600.0, bounds=TIMEOUT, help="seconds one sync may take before it is an error"
    )
    server_timeout: float = arg(
        30.0,
        bounds=TIMEOUT,
        help="seconds without a sign of life after which a server that keeps a sync waiting is "
        "dropped; it is taken back when it answers again",
    )
