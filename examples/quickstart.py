"""`make quickstart`: a tiny Qwen3 learns sums, on CPU, in minutes.

    python examples/quickstart.py [--seed 1] [--root runs/quickstart] [--recipe grpo] [a.b=c ...]

1. makes a random model with its own tokenizer;
2. SFT on sums by a careless teacher, who forgets to carry in 60 % of them;
3. GRPO: right answers are rewarded; 2 trainer processes (tp=2), one generation server, new weights
   streamed to it after every step; greedy accuracy on 512 held-out sums before and after;
4. a report (one HTML file) and the final model as a normal HF directory.

It always starts afresh: an earlier run at --root is moved aside, not continued.
Overrides go to configs/quickstart_grpo.yaml, e.g. actor.parallel.tp=1 actor.parallel.pp=2.
`--recipe ppo` (`make quickstart-ppo`) runs configs/quickstart_ppo.yaml instead, where a critic
learns the value of every token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tiny_model import make_model

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2


def launch(config: str, *overrides: str, processes: int = PROCESSES) -> float:
    """Runs one config under the local launcher; returns its wall time in seconds."""
    command = [sys.executable, "-m", "megarl.launcher.local", "--nproc", str(processes)]
    command += ["--config", str(ROOT / "configs" / config), *overrides]
    print("$ python", " ".join(command[1:]), flush=True)
    start = time.monotonic()
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)
    return time.monotonic() - start


def in_root(root: Path, seed: int) -> list[str]:
    return [f"fileroot={root.parent}", f"experiment_name={root.name}", f"seed={seed}"]


def fresh(root: Path) -> None:
    """Moves an earlier run aside; deletes nothing."""
    if not root.exists():
        return
    n = 1
    while (old := root.with_name(f"{root.name}.{n}")).exists():
        n += 1
    root.rename(old)
    print(f"the run that was at {root} is now at {old}")


def warm_up(root: Path, seed: int, *overrides: str) -> None:
    """Writes the random model to <root>/model and the warmed-up one to <root>/sft/final."""
    make_model(root / "model", seed=seed)
    path = f"model.path={root / 'model'}"
    launch("quickstart_sft.yaml", path, *in_root(root, seed), *overrides)


def reinforce(root: Path, seed: int, *overrides: str, recipe: str = "grpo") -> float:
    """Runs `recipe` in <root>/<recipe>; returns its wall time in seconds."""
    path = f"actor.path={root / 'sft' / 'final'}"
    return launch(f"quickstart_{recipe}.yaml", path, *in_root(root, seed), *overrides)


def read_stats(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]


def evaluations(run: Path, key: str = "eval/accuracy") -> list[dict[str, Any]]:
    return [row for row in read_stats(run) if key in row]


def report(root: Path, recipe: str) -> Path:
    from megarl.observability.report import write_report

    out = root / "report.html"
    title = f"megarl quickstart: {recipe.upper()} on sums"
    write_report(out, [root / recipe, f"SFT warm-up={root / 'sft'}"], title=title)
    return out


def show(root: Path, recipe: str) -> None:
    from transformers import AutoModelForCausalLM

    run = root / recipe
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    for name, row in zip(("before", "after"), (evaluations(run)[i] for i in (0, -1))):
        low, high = (100 * row[f"eval/accuracy_{k}"] for k in ("lo", "hi"))
        print(
            f"accuracy {name:6s} {recipe.upper()}: {100 * row['eval/accuracy']:5.1f} %  "
            f"(95 % interval {low:.1f} to {high:.1f}, {row['eval/samples']:.0f} held-out sums)"
        )
    print(f"model : {run / 'final'}  ({type(model).__name__}, loads with from_pretrained)")
    print(f"report: {report(root, recipe)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--recipe", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--sft", action="append", default=[], metavar="a.b=c", help="for SFT")
    parser.add_argument("overrides", nargs="*", help="a.b=c, for configs/quickstart_<recipe>.yaml")
    args = parser.parse_args()
    start = time.monotonic()
    fresh(args.root)
    warm_up(args.root, args.seed, *args.sft)
    reinforce(args.root, args.seed, *args.overrides, recipe=args.recipe)
    show(args.root, args.recipe)
    print(f"total : {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
