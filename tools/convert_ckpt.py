"""Converts checkpoints between Hugging Face directories and megatron-core's dist format, on CPU.

    python tools/convert_ckpt.py hf2dist --hf MODEL --out CKPT [--dtype bfloat16]
    python tools/convert_ckpt.py dist2hf --dist CKPT --out MODEL [--max-shard-size 5GiB]
    python tools/convert_ckpt.py inspect DIR
    python tools/convert_ckpt.py verify A B

It needs one process, bounded memory and no GPU. docs/recovery.md has more.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

os.environ["MEGARL_DEVICE"] = "cpu"  # before torch and megatron-core are imported

UNITS = ("", "K", "M", "G", "T")  # powers of 1024
DTYPES = ("float32", "bfloat16", "float16")


def size(text: str) -> int:
    """Returns the bytes of "4GiB", "500M" or "123"; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 4GiB or 500M")
    return int(float(match[1]) * 1024 ** UNITS.index(match[2].upper()))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the commands."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    hf2dist = commands.add_parser("hf2dist", help="Hugging Face directory -> dist checkpoint")
    hf2dist.add_argument("--hf", required=True, type=Path, metavar="DIR")
    dist2hf = commands.add_parser("dist2hf", help="dist checkpoint -> Hugging Face directory")
    dist2hf.add_argument("--dist", required=True, type=Path, metavar="DIR")
    dist2hf.add_argument("--base", type=Path, metavar="DIR", help="has the tokenizer and config")
    dist2hf.add_argument("--max-shard-size", type=size, default="5GiB", metavar="SIZE")
    inspect = commands.add_parser("inspect", help="what a directory is, and whether it is whole")
    inspect.add_argument("dir", type=Path)
    verify = commands.add_parser("verify", help="compare any two, bit by bit")
    verify.add_argument("a", type=Path)
    verify.add_argument("b", type=Path)
    for convert in (hf2dist, dist2hf):
        convert.add_argument("--out", required=True, type=Path, metavar="DIR")
        convert.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they are")
        convert.add_argument("--workers", type=int, default=2, metavar="N", help="threads")
        convert.add_argument("--check-logits", nargs="?", action=_Gone, help=argparse.SUPPRESS)
    for limited in (hf2dist, dist2hf, verify):
        limited.add_argument("--max-memory", type=size, default="4GiB", metavar="SIZE")
    return top


class _Gone(argparse.Action):
    """Refuses the proof by logits, which there is no more."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error("--check-logits: logits are no longer compared; compare all bits by verify")


def convert(args: argparse.Namespace) -> int:
    """Converts in the direction that the command names; returns the exit status."""
    import torch

    from megarl.ckpt.convert import dist2hf, hf2dist

    dtype = args.dtype and getattr(torch, args.dtype)
    common = dict(dtype=dtype, workers=args.workers, max_memory=args.max_memory)
    if args.command == "hf2dist":
        hf2dist(args.hf, args.out, **common)
    else:
        dist2hf(args.dist, args.out, base=args.base, max_shard_bytes=args.max_shard_size, **common)
    print(args.out)
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Prints what a directory holds; returns 0 where it is whole, else 1."""
    from megarl.ckpt.convert import inspect

    found = inspect(args.dir)
    for name, value in found.items():
        print(f"{name:16} {value}")
    return 0 if found["complete"] == "yes" else 1


def verify(args: argparse.Namespace) -> int:
    """Prints the tensors that differ, the worst first; returns 0 where none does, else 1."""
    from megarl.ckpt.convert import verify

    differences = verify(args.a, args.b, max_memory=args.max_memory)
    for difference in differences[:20]:
        print(difference)
    print(f"{len(differences)} tensors differ" if differences else "the same, bit by bit")
    return 1 if differences else 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 2, with one line, for what cannot be converted."""
    args = parser().parse_args(argv)
    run = {"inspect": inspect, "verify": verify}.get(args.command, convert)
    try:
        return run(args)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
