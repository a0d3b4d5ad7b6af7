"""Command line of the embedded server; flags are named as SGLang's where SGLang has them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any

from megarl.config.base import POSITIVE, TIMEOUT, Bounds, Choices
from megarl.config.schema import children, value_problems


@dataclass(kw_only=True)
class ServerArgs:
    """Holds the flags of the command line. Lengths are in tokens, `dist_timeout` is in seconds.
    Raises ValueError for a number out of its bounds."""

    model_path: str
    """HF model directory"""
    host: str = "127.0.0.1"
    """address to bind"""
    port: Annotated[int, Bounds(ge=0, le=65535)] = 30000
    """port to bind"""
    dtype: Annotated[str, Choices("auto", "float32", "bfloat16", "float16")] = "auto"
    """auto is the checkpoint's"""
    json_model_override_args: str = ""
    """keys of config.json that have another value, as a JSON object"""
    device: Annotated[str, Choices("cpu", "cuda")] | None = None
    """default: cuda where there is one"""
    context_length: Annotated[int, Bounds(ge=2)] | None = None
    """prompt plus response (default: the model's)"""
    max_running_requests: Annotated[int, POSITIVE] = 256
    """sequences decoded at once"""
    max_total_tokens: int | None = None
    """bound of the KV cache (default: by the memory there is)"""
    deterministic: bool = False
    """batch-invariant: a request's bits do not depend on what else runs"""
    enable_return_routed_experts: bool = False
    """answers to requests with return_routed_experts say what the routers chose"""
    enable_weights_cpu_backup: bool = False
    """weights whose memory is released rest in host memory, and come back whole"""
    threads: Annotated[int, Bounds(ge=0)] = 0
    """CPU threads; 0 leaves torch's default"""
    random_seed: int | None = None
    """seeds requests that bring no sampling_seed"""
    dist_timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds a weight-update collective may take"""
    log_level: Annotated[str, Choices("debug", "info", "warning", "error")] = "info"
    """which lines to log"""

    def __post_init__(self) -> None:
        for problem in value_problems(self):
            name, _, rest = problem.partition("=")
            raise ValueError(f"{_flag(name)}={rest.replace(', or null', '')}")
        try:
            self.override: dict[str, Any] = dict(json.loads(self.json_model_override_args or "{}"))
        except (ValueError, TypeError) as e:
            given = self.json_model_override_args
            raise ValueError(f"--json-model-override-args={given}: no JSON object") from e


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Reads a command line; a flag that is not given keeps the dataclass's default. Exits with 2
    and a message where a flag is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.server", description=__doc__, argument_default=argparse.SUPPRESS
    )
    for key in children(ServerArgs):
        if key.base_type is bool:
            parser.add_argument(_flag(key.name), action="store_true", help=key.help)
        else:
            parser.add_argument(
                _flag(key.name),
                type=key.base_type,
                choices=key.choices,
                required=key.default is MISSING,
                help=key.help,
            )
    try:
        return ServerArgs(**vars(parser.parse_args(argv)))
    except ValueError as e:
        parser.error(str(e))
