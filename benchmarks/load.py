"""Times the engine's load of a model directory beside transformers' from_pretrained.

    python benchmarks/load.py [MODEL_DIR ...] [--dtype float32] [--gib 3] [--reps 5] [--dir DIR]

Every load is in a process of its own, libraries imported and torch.distributed started before the
clock; the two take turns, the files in the page cache. Ours is MegatronEngine.initialize without an
optimizer: modules, process groups, weights. A load has ended when every page of the weights is in
memory. In the dtype of the files from_pretrained maps them and copies nothing; an engine has memory
of its own, which it trains in. Without MODEL_DIR a random Qwen3 of about --gib GiB in bf16 is made.
Prints a Markdown table of medians; a ratio above 1 is faster than transformers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from convert import make_model

TOUCH = """
def touch(params):  # a number of every page of memory
    for p in params:
        p.detach().flatten()[:: 4096 // p.itemsize].float().sum()
"""
OURS = """
import sys, time
from megarl.config.engine import TrainEngineConfig
from megarl.engine import MegatronEngine
from megarl.parallel.groups import init_distributed, shutdown_distributed
engine = MegatronEngine(TrainEngineConfig(path=sys.argv[1], dtype=sys.argv[2], optimizer=None))
init_distributed()
start = time.monotonic()
engine.initialize()
touch(engine.built.params.values())
seconds = time.monotonic() - start
"""
THEIRS = """
import sys, time
import torch
from transformers import AutoModelForCausalLM
import transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3
start = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
touch(model.parameters())
seconds = time.monotonic() - start
"""
FIGURES = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("figures", seconds, int(status["VmHWM"].split()[0]) / 1024)
"""


def run(code: str, path: Path, dtype: str) -> tuple[float, float]:
    """Loads once in a new process; returns (seconds, peak RSS in MiB)."""
    env = os.environ | {"MEGARL_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", TOUCH + code + FIGURES, str(path), dtype],
        env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    line = next(x for x in done.stdout.splitlines() if x.startswith("figures"))
    seconds, peak = map(float, line.split()[1:])
    return seconds, peak


def measure(path: Path, dtype: str, reps: int) -> str:
    run(OURS, path, dtype)  # the page cache
    pairs = [(run(OURS, path, dtype), run(THEIRS, path, dtype)) for _ in range(reps)]
    ratio = statistics.median(theirs[0] / ours[0] for ours, theirs in pairs)
    ours, theirs = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    peaks = [max(pair[i][1] for pair in pairs) for i in (0, 1)]
    size = sum(f.stat().st_size for f in path.glob("*.safetensors")) / 2**20
    return (
        f"| {path.name} | {size:.0f} | {ours:.2f} | {theirs:.2f} | {ratio:.2f} | "
        f"{peaks[0]:.0f} | {peaks[1]:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to work; default: the temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        models = args.models
        if not models:
            models = [Path(root) / f"random-{args.gib:g}GiB"]
            make_model(models[0], int(args.gib * 1024))
        print("| | MiB | engine, s | from_pretrained, s | ratio | peak RSS, MiB | theirs, MiB |")
        print("|---|---|---|---|---|---|---|")
        for path in models:
            print(measure(path, args.dtype, args.reps), flush=True)


if __name__ == "__main__":
    main()
