"""Command line of the embedded server; flags are named as SGLang's where SGLang has them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from megarl.config.base import arg
from megarl.config.bounds import POSITIVE, TIMEOUT, Bounds, number_problems
from megarl.config.schema import children


@dataclass(kw_only=True)
class ServerArgs:
    """Holds the flags of the command line. Lengths are in tokens, `dist_timeout` is in seconds.
    Raises ValueError for a number out of its bounds."""

    model_path: str = arg(help="HF model directory")
    host: str = arg("127.0.0.1", help="address to bind")
    port: int = arg(30000, help="port to bind")
    dtype: str = arg(
        "auto", help="auto is the checkpoint's", choices=("auto", "float32", "bfloat16", "float16")
    )
    json_model_override_args: str = arg(
        "", help="keys of config.json that have another value, as a JSON object"
    )
    device: str | None = arg(None, help="default: cuda where there is one", choices=("cpu", "cuda"))
    context_length: int | None = arg(
        None, bounds=Bounds(ge=2), help="prompt plus response (default: the model's)"
    )
    max_running_requests: int = arg(256, bounds=POSITIVE, help="sequences decoded at once")
    max_total_tokens: int | None = arg(
        None, help="bound of the KV cache (default: by the memory there is)"
    )
    deterministic: bool = arg(
        False, help="batch-invariant: a request's bits do not depend on what else runs"
    )
    enable_return_routed_experts: bool = arg(
        False, help="answers to requests with return_routed_experts say what the routers chose"
    )
    enable_weights_cpu_backup: bool = arg(
        False, help="weights whose memory is released rest in host memory, and come back whole"
    )
    threads: int = arg(0, help="CPU threads; 0 leaves torch's default")
    random_seed: int | None = arg(None, help="seeds requests that bring no sampling_seed")
    dist_timeout: float = arg(
        600.0, bounds=TIMEOUT, help="seconds a weight-update collective may take"
    )
    log_level: str = arg(
        "info", help="which lines to log", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for problem in number_problems(self):
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
