"""Configures the gateway through which agents reach the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megarl.config.base import POSITIVE, Bounds, Choices

# those of rollout.tools.calls
CALL_FORMATS = ("hermes", "qwen", "qwen3_coder", "llama3", "deepseek", "glm")


@dataclass(kw_only=True)
class GatewayConfig:
    """Configures the gateway: where it listens, and when a chat goes on from recorded tokens."""

    host: str = "127.0.0.1"
    """address that the gateway listens on"""
    port: Annotated[int, Bounds(ge=0, le=65535)] = 0
    """its port; 0 takes a free one"""
    advertise: str = ""
    """host name in the URLs that agents get; empty is `host`, or this machine's name where the
    gateway listens on every address"""
    reuse: bool = True
    """a chat that goes on after an answer of the policy keeps the policy's own tokens"""
    max_n: Annotated[int, Bounds(ge=1, le=128)] = 8
    """most answers that one request may ask for (`n`)"""
    max_answers: Annotated[int, POSITIVE] = 1024
    """most answers of one session; a request beyond them is refused"""
    rewards: Annotated[str, Choices("auto", "always", "never")] = "auto"
    """whether agents may send rewards to the gateway; auto: where their workflow has no reward
    function"""
    context_length: Annotated[int, POSITIVE] | None = None
    """prompt plus answer in tokens, beyond which a request is refused; null is the servers' own"""
    call_format: Annotated[str, Choices(*CALL_FORMATS, or_path=True)] = "hermes"
    """how the policy writes calls of tools; a path names a function, see docs/agents.md"""
