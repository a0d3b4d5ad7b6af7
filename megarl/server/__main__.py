"""python -m megarl.server --model-path DIR --port P"""

from __future__ import annotations

import logging
import os
import sys

from megarl.server.args import parse_args
from megarl.utils.env import prefer_flash_attention, set_nccl_default
from megarl.utils.stacks import dump_on_signal


def main() -> int:
    """Reads the command line and serves until SIGTERM or SIGINT; returns the exit status."""
    args = parse_args()
    dump_on_signal()
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s server: %(levelname)s %(message)s"
    )
    set_nccl_default(os.environ)  # as SGLang does
    prefer_flash_attention(os.environ)
    # torch and transformers take seconds to import: --help and a wrong flag need not wait for them
    from megarl.server.app import serve

    return serve(args)


if __name__ == "__main__":
    sys.exit(main())
