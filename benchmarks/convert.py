"""The converter beside a buffered read, write and fsync of the same bytes.

    python benchmarks/convert.py [--mib 1024] [--reps 3] [--workers 2] [--max-memory-mib 1024]
                                 [--dir DIR]

Copy and conversion run in turn, on one file system, each from a page cache without the input (where
the system lets it be dropped); a ratio of 1.0 would be a conversion at the speed of copying. Peak
RSS is that of the converter's process, libraries included. Prints a Markdown table of medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

LAYERS, VOCAB, BLOCK = 8, 32_000, 8 << 20

CONVERT = """
import sys, time
from megarl.ckpt.convert import dist2hf, hf2dist
way, source, out, workers, memory = sys.argv[1:]
kw = dict(workers=int(workers), max_memory=int(memory))
start = time.monotonic()
(hf2dist if way == "hf2dist" else dist2hf)(source, out, **kw)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(time.monotonic() - start, status["VmHWM"].split()[0])
"""


def make_model(path: Path, mib: int) -> None:
    """Saves a random Qwen3 of about `mib` MiB in bf16."""
    hidden = 128
    while VOCAB * hidden * 2 + LAYERS * 15 * hidden * hidden < mib * 2**19:
        hidden += 128
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=4 * hidden, head_dim=64,
        num_hidden_layers=LAYERS, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    transformers.Qwen3ForCausalLM(config).save_pretrained(path, max_shard_size="512MB")


def forget(directory: Path) -> None:
    """Writes the files out and drops them from the page cache."""
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def copy(source: Path, out: Path) -> float:
    """Returns the seconds it takes to read, write and fsync every file of a directory."""
    start = time.monotonic()
    out.mkdir()
    for file in (f for f in source.rglob("*") if f.is_file()):
        with file.open("rb") as a, (out / file.name).open("wb") as b:
            while data := a.read(BLOCK):
                b.write(data)
            b.flush()
            os.fsync(b.fileno())
    return time.monotonic() - start


def convert(way: str, source: Path, out: Path, workers: int, memory: int) -> tuple[float, float]:
    """Returns (seconds without the import of libraries, peak RSS in MiB) of one conversion."""
    args = [sys.executable, "-c", CONVERT, way, str(source), str(out), str(workers), str(memory)]
    env = os.environ | {"MEGARL_DEVICE": "cpu"}
    ran = subprocess.run(args, env=env, capture_output=True, text=True, check=True)
    seconds, kib = ran.stdout.split()[-2:]
    return float(seconds), int(kib) / 1024


def measured(source: Path, out: Path, work: Callable[[], float]) -> float:
    forget(source)
    seconds = work()
    shutil.rmtree(out)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-memory-mib", type=int, default=1024)
    parser.add_argument("--dir", type=Path, help="where to work; default: the temporary directory")
    args = parser.parse_args()
    memory = args.max_memory_mib << 20
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        hf, dist, out = (Path(root) / n for n in ("hf", "dist", "out"))
        make_model(hf, args.mib)
        convert("hf2dist", hf, dist, args.workers, memory)
        size = sum(f.stat().st_size for f in hf.glob("*.safetensors")) / 2**20
        print(f"{size:.0f} MiB, {args.workers} workers, at most {args.max_memory_mib} MiB\n")
        print("| | copy, MiB/s | conversion, MiB/s | ratio | peak RSS, MiB |")
        print("|---|---|---|---|---|")
        for way, source in (("hf2dist", hf), ("dist2hf", dist)):
            plain, ours, peaks = [], [], []

            def conversion(way: str = way, source: Path = source, peaks: list = peaks) -> float:
                seconds, peak = convert(way, source, out, args.workers, memory)
                peaks.append(peak)
                return seconds

            for _ in range(args.reps):
                plain.append(measured(source, out, lambda s=source: copy(s, out)))  # type: ignore[misc]
                ours.append(measured(source, out, conversion))
            ratio = statistics.median(p / o for p, o in zip(plain, ours, strict=True))
            a, b = (size / statistics.median(x) for x in (plain, ours))
            print(f"| {way} | {a:.0f} | {b:.0f} | {ratio:.2f} | {max(peaks):.0f} |", flush=True)


if __name__ == "__main__":
    main()
