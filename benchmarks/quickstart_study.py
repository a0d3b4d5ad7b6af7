"""Runs the quickstart over several seeds, beside controls that spend GRPO's wall time on more SFT.

    python benchmarks/quickstart_study.py [--seeds 1 2 3] [--root runs/study]

Prints the table of docs/quickstart.md. "more SFT" goes on with the same careless demonstrations,
"clean SFT" with faultless ones (which GRPO never sees).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from quickstart import evaluations, fresh, in_root, launch, reinforce, warm_up  # noqa: E402

from megarl.observability.intervals import wilson  # noqa: E402
from megarl.observability.report import write_report  # noqa: E402

HELD_OUT = 512


def control(root: Path, seed: int, name: str, seconds: float, careless: float) -> float:
    """Returns the accuracy after `seconds` more of SFT from where GRPO started."""
    launch(
        "quickstart_sft.yaml",
        f"model.path={root / 'sft' / 'final'}",
        *in_root(root, seed),
        f"trial_name={name}",
        f"max_train_seconds={seconds}",
        "total_train_steps=100000",
        "evaluator.at_start=true",
        f"train_dataset.options.careless={careless}",
    )
    return evaluations(root / name, "eval/exact_match")[-1]["eval/exact_match"]


def cell(accuracy: float) -> str:
    low, high = wilson(accuracy, HELD_OUT)
    return f"{100 * accuracy:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def study(root: Path, seed: int) -> list[str]:
    fresh(root)  # a run that continues would say nothing of its wall time
    warm_up(root, seed)
    wall = reinforce(root, seed)
    rows = evaluations(root / "grpo")
    before, after = rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"]
    more = control(root, seed, "control", wall, careless=0.6)
    clean = control(root, seed, "control_clean", wall, careless=0.0)
    runs = [root / "grpo", f"more SFT={root / 'control'}", f"clean SFT={root / 'control_clean'}"]
    write_report(root / "report.html", runs, title="megarl quickstart: GRPO on sums")
    start, end, *controls = (cell(x) for x in (before, after, more, clean))
    return [str(seed), start, end, f"{100 * (after - before):+.1f}", f"{wall:.0f}", *controls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--root", type=Path, default=Path("runs/study"))
    args = parser.parse_args()
    table = [study(args.root / f"seed{s}", s) for s in args.seeds]
    head = ["seed", "SFT start %", "GRPO end %", "points", "GRPO s", "more SFT %", "clean SFT %"]
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for row in table:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
