"""Command line of the embedded server; flags are named as SGLang's where SGLang has them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.bounds import TIMEOUT


@dataclass(kw_only=True)
class ServerArgs:
    """Holds the flags of the command line. Lengths are in tokens, `dist_timeout` is in seconds.
    Raises ValueError for a number out of its bounds."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "auto"
    device: str | None = None
    context_length: int | None = None
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    deterministic: bool = False
    threads: int = 0
    random_seed: int | None = None
    dist_timeout: float = 600.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.max_running_requests < 1:
            raise ValueError(f"--max-running-requests={self.max_running_requests}: at least 1")
        if not TIMEOUT.allow(self.dist_timeout):
            raise ValueError(
                f"--dist-timeout={self.dist_timeout}: must be {TIMEOUT} ({TIMEOUT.note})"
            )
        if self.context_length is not None and self.context_length < 2:
            raise ValueError(f"--context-length={self.context_length}: at least 2")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m megarl.server", description=__doc__)
    add = p.add_argument
    add("--model-path", required=True, help="HF model directory")
    add("--host", help="address to bind")
    add("--port", type=int)
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto is the checkpoint's",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--context-length", type=int, help="prompt plus response (default: the model's)")
    add("--max-running-requests", type=int, help="sequences decoded at once")
    add(
        "--max-total-tokens",
        type=int,
        help="bound of the KV cache (default: by the memory there is)",
    )
    add(
        "--deterministic",
        "--enable-deterministic-inference",
        action="store_true",
        help="batch-invariant: a request's bits do not depend on what else runs",
    )
    add("--threads", type=int, help="CPU threads; 0 leaves torch's default")
    add("--random-seed", type=int, help="seeds requests that bring no sampling_seed")
    add("--dist-timeout", type=float, help="seconds a weight-update collective may take")
    add("--log-level", choices=("debug", "info", "warning", "error"))
    return p


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Reads a command line; a flag that is not given keeps the dataclass's default. Exits with 2
    and a message where a flag is wrong."""
    parser = _parser()
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    try:
        return ServerArgs(**given)
    except ValueError as e:
        parser.error(str(e))
