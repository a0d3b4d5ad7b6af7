"""Configures the gateway through which agents reach the policy."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import arg
from megarl.config.bounds import POSITIVE, Bounds

# those of rollout.tools.calls
CALL_FORMATS = ("hermes", "qwen", "qwen3_coder", "llama3", "deepseek", "glm")
MATCHES = ("whitespace", "thinking", "tool_arguments", "tool_ids")


@dataclass(kw_only=True)
class GatewayConfig:
    """Configures the gateway: where it listens, and when a chat goes on from recorded tokens."""

    host: str = arg("127.0.0.1", help="address that the gateway listens on")
    port: int = arg(0, bounds=Bounds(ge=0, le=65535), help="its port; 0 takes a free one")
    advertise: str = arg(
        "",
        help="host name in the URLs that agents get; empty is `host`, or this machine's name where "
        "the gateway listens on every address",
    )
    reuse: bool = arg(
        True, help="a chat that goes on after an answer of the policy keeps the policy's own tokens"
    )
    match: list[str] = arg(
        factory=lambda: list(MATCHES),
        help="differences between a message and the one that was recorded which do not count: "
        + ", ".join(MATCHES),
    )
    max_n: int = arg(
        8, bounds=Bounds(ge=1, le=128), help="most answers that one request may ask for (`n`)"
    )
    max_answers: int = arg(
        1024,
        bounds=POSITIVE,
        help="most answers of one session; a request beyond them is refused",
    )
    rewards: str = arg(
        "auto",
        help="whether agents may send rewards to the gateway; auto: where their workflow has no "
        "reward function",
        choices=("auto", "always", "never"),
    )
    context_length: int | None = arg(
        None,
        bounds=POSITIVE,
        help="prompt plus answer in tokens, beyond which a request is refused; null is the "
        "servers' own",
    )
    call_format: str = arg(
        "hermes",
        help="how the policy writes calls of tools; a path names a function, see docs/agents.md",
        choices=CALL_FORMATS,
        or_path=True,
    )
