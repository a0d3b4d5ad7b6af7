"""Trains the quickstart's sums by every preset of megarl/config/presets.py, and by PPO.

    python benchmarks/algos.py [--seeds 1 2 3] [--only NAME ...] [--root runs/algos]

For each seed a model is warmed up as the quickstart's is. From there every algorithm makes the same
number of steps, of as many answers each, at the same learning rate; nothing is tuned to it. Runs
take turns, one at a time; trainer and server have one thread each. Held-out sums are answered at
temperature 1, by the policy that is trained: greedy answers would all be right too soon to tell
algorithms apart. A run that has ended is not made again: remove its directory to have it made anew.
Prints a Markdown table, ordered by what was reached, and draws the curves to <root>/algos.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.chdir(ROOT)

from quickstart import in_root, launch  # noqa: E402
from tiny_model import make_model  # noqa: E402

from benchmarks.algos_plot import Panel, draw  # noqa: E402
from megarl.config.presets import PRESETS  # noqa: E402
from megarl.observability.report import Run, load_run  # noqa: E402
from megarl.observability.report.held_out import ACCURACY, gain  # noqa: E402

STEPS, EVERY = 16, 4  # of a run, and between its evaluations
PROMPTS, SAMPLES = 32, 8  # of a step; PPO takes as many answers, of more prompts
CRITIC = "ppo"  # the recipe with a critic, which is no preset
ALGORITHMS = (*PRESETS, CRITIC)
COMMON = f"""
    actor.parallel.tp=1 server.threads=1 total_train_steps={STEPS} evaluator.freq_steps={EVERY}
    saver.final=false recover.mode=disabled stats_logger.report=false eval_gconfig.greedy=false
""".split()
# Student's t for a 95 % interval of a mean, by the number of values
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306}


@dataclass(frozen=True)
class Result:
    """Holds the runs of an algorithm, one for each seed."""

    name: str
    runs: Sequence[Run]

    @property
    def ends(self) -> list[float]:
        """Returns the last accuracy of each run, in percent."""
        return [100 * run.values(*ACCURACY.keys)[-1] for run in self.runs]

    @property
    def gains(self) -> list[float]:
        """Returns by how many points each run rose."""
        return [
            end - 100 * run.values(*ACCURACY.keys)[0]
            for end, run in zip(self.ends, self.runs, strict=True)
        ]

    def certain(self) -> tuple[int, int]:
        """Returns in how many runs the 95 % interval of the gain is above 0, and below."""
        found = [change for run in self.runs if (change := gain(run, ACCURACY))]
        return sum(change.up for change in found), sum(change.down for change in found)

    def mean(self, key: str) -> float:
        """Returns the mean of a metric over the steps of all runs."""
        return statistics.fmean(value for run in self.runs for value in run.values(key))

    def written(self) -> float:
        """Returns the answers that were sampled, as a multiple of those trained."""
        prompts = [run.values("rollout/accepted")[-1] for run in self.runs]
        rejected = [run.values("rollout/rejected")[-1] for run in self.runs]
        return 1 + sum(rejected) / sum(prompts)


def interval(values: Sequence[float]) -> float:
    """Returns half the width of the 95 % interval of a mean (Student); NaN of a single value."""
    if len(values) < 2:
        return math.nan
    return STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def warm_up(root: Path, seed: int) -> None:
    """Writes the model that the runs of a seed begin with."""
    if ended(root / "sft"):
        return
    make_model(root / "model", seed=seed)
    launch(
        "quickstart_sft.yaml",
        f"model.path={root / 'model'}",
        *in_root(root, seed),
        "recover.mode=disabled",
        processes=1,
    )


def ended(run: Path) -> bool:
    """Tells whether a run came to its end."""
    summary = run / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "finished"


def train(root: Path, seed: int, name: str) -> Run:
    """Makes the run of an algorithm, or reads it where it has been made."""
    if not ended(root / name):
        config = overrides(name)
        start = f"actor.path={root / 'sft' / 'final'}"
        launch(*config, *in_root(root, seed), start, f"trial_name={name}", processes=1)
    return load_run(root / name)


def overrides(name: str) -> list[str]:
    """Returns the config file of an algorithm and what is set beside it."""
    if name == CRITIC:
        size = [f"train_dataset.batch_size={PROMPTS * 2}", f"gconfig.n_samples={SAMPLES // 2}"]
        critic = ["critic.parallel.tp=1", "critic.parallel.sequence_parallel=false"]
        return ["quickstart_ppo.yaml", *COMMON, *size, *critic]
    size = [f"train_dataset.batch_size={PROMPTS}", f"gconfig.n_samples={SAMPLES}"]
    reference = [] if "ref" in PRESETS[name] else ["ref=null"]
    return ["quickstart_grpo.yaml", f"algorithm={name}", *COMMON, *size, *reference]


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yields the lines of a table, the best algorithm first."""
    head = ["", "`algorithm`", "accuracy, %", "gain of each seed", "behind the first"]
    head += ["beats the start", "answers", "entropy", "clipped, %"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for place, result in enumerate(results, 1):
        behind = [a - b for a, b in zip(results[0].ends, result.ends, strict=True)]
        up, down = result.certain()
        worse = f", {down} worse" if down else ""
        cells = [
            str(place),
            f"`{result.name}`",
            spread(result.ends),
            ", ".join(f"{points:+.1f}" for points in result.gains),
            spread(behind) if place > 1 else "",
            f"{up} of {len(result.runs)}{worse}",
            f"{result.written():.2f}",
            f"{statistics.fmean(run.values('entropy')[-1] for run in result.runs):.3f}",
            f"{100 * result.mean('clip_frac'):.1f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def starts(results: Sequence[Result]) -> str:
    """Says where each seed starts, by the mean and the standard deviation of the runs that begin
    there, and how much a run trains."""
    first = ([100 * run.values(*ACCURACY.keys)[0] for run in result.runs] for result in results)
    means = ", ".join(
        f"{statistics.fmean(seed):.1f} (sd {statistics.pstdev(seed):.1f})"
        for seed in zip(*first, strict=True)
    )
    trained = [sum(run.values("tokens/trained")) for result in results for run in result.runs]
    return (
        f"The starts are at {means} %. A run trains {min(trained):,.0f} to {max(trained):,.0f} "
        "tokens."
    )


def spread(values: Sequence[float]) -> str:
    """Writes the mean with its interval."""
    half = interval(values)
    mean = f"{statistics.fmean(values):.1f}"
    return mean if math.isnan(half) else f"{mean} ± {half:.1f}"


def plot(path: Path, results: Sequence[Result]) -> None:
    """Draws the curves of every algorithm, by answers trained."""
    panels = []
    for place, result in enumerate(results, 1):
        curves = []
        for run in result.runs:
            points = run.points(*ACCURACY.keys)
            curves.append([(step * PROMPTS * SAMPLES, 100 * value) for step, value in points])
        title = f"{place}  {result.name}  {statistics.fmean(result.ends):.1f}"
        panels.append(Panel(title=title, curves=curves))
    draw(path, panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--root", type=Path, default=Path("runs/algos"))
    args = parser.parse_args()
    if len(args.seeds) > max(STUDENT):
        parser.error(f"--seeds: at most {max(STUDENT)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    runs: dict[str, list[Run]] = {name: [] for name in args.only}
    for seed in args.seeds:  # all algorithms of a seed, then the next: what is there compares
        root = args.root.resolve() / f"seed{seed}"
        warm_up(root, seed)
        for name, found in runs.items():
            found.append(train(root, seed, name))
    results = [Result(name, found) for name, found in runs.items()]
    results.sort(key=lambda result: -statistics.fmean(result.ends))
    print(f"{starts(results)}\n")
    print("\n".join(table(results)))
    plot(args.root / "algos.svg", results)


if __name__ == "__main__":
    main()
