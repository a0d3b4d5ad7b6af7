"""Trains the quickstart's sums by every preset of megarl/config/presets.py, and by PPO.

    python benchmarks/algos.py [--seeds 1 2 3] [--only NAME ...] [--root runs/algos]
                               [--page docs/bench_algos.md]

For each seed a model is warmed up as the quickstart's is. From there every algorithm makes the same
number of steps, of as many answers each, at the same learning rate; nothing is tuned to it. Runs
take turns, one at a time; trainer and server have one thread each. Held-out sums are answered at
temperature 1, by the policy that is trained: greedy answers would all be right too soon to tell
algorithms apart. A run that has ended is not made again: remove its directory to have it made anew,
as it is where a run was interrupted.
Prints a Markdown table, ordered by what was reached, and draws the curves to <root>/algos.svg; with
--page puts the table in the place of the page's, and the curves into images/ beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

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
BEGIN, END = "<!-- table: make bench-algos -->", "<!-- end of table -->"
CRITIC = "ppo"  # the recipe with a critic, which is no preset
ALGORITHMS = (*PRESETS, CRITIC)
COMMON = f"""
    actor.parallel.tp=1 server.threads=1 total_train_steps={STEPS} evaluator.freq_steps={EVERY}
    saver.final=false recover.mode=disabled stats_logger.report=false eval_gconfig.greedy=false
""".split()


@dataclass(frozen=True)
class Result:
    """Holds the runs of an algorithm, one for each seed."""

    name: str
    runs: Sequence[Run]

    @property
    def ends(self) -> list[float]:
        """Returns the last accuracy of each run, in percent."""
        return [100 * run.values(*ACCURACY.keys)[-1] for run in self.runs]

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


def tells_apart(results: Sequence[Result]) -> float:
    """Returns half the width of the 95 % interval of the difference between two algorithms' mean
    accuracies: from what is left of all ends once each algorithm and each seed has its mean (the
    error of a two-way analysis of variance). NaN of one algorithm or one seed."""
    ends = [result.ends for result in results]
    freedom = (len(ends) - 1) * (len(ends[0]) - 1)
    if not freedom:
        return math.nan
    seeds = [statistics.fmean(column) for column in zip(*ends, strict=True)]
    rest = [
        end - statistics.fmean(row) - seed + statistics.fmean(seeds)
        for row in ends
        for end, seed in zip(row, seeds, strict=True)
    ]
    variance = sum(value**2 for value in rest) / freedom
    return student(freedom) * math.sqrt(2 * variance / len(seeds))


def student(freedom: int) -> float:
    """Returns Student's t of a 95 % interval, by its expansion about the normal distribution's
    quantile (Abramowitz and Stegun 26.7.5), which is right to 1 % from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def warm_up(root: Path, seed: int) -> None:
    """Writes the model that the runs of a seed begin with."""
    if ended(root / "sft"):
        return
    shutil.rmtree(root / "sft", ignore_errors=True)
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
        shutil.rmtree(root / name, ignore_errors=True)
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
    head = ["", "`algorithm`", "accuracy, %", "of each seed", "behind the first"]
    head += ["beats the start", "answers", "entropy", "clipped, %"]
    width = tells_apart(results)
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for place, result in enumerate(results, 1):
        behind = statistics.fmean(results[0].ends) - statistics.fmean(result.ends)
        up, down = result.certain()
        worse = f", {down} worse" if down else ""
        cells = [
            str(place),
            f"`{result.name}`",
            f"{statistics.fmean(result.ends):.1f}",
            ", ".join(f"{end:.1f}" for end in result.ends),
            f"{behind:.1f}" + ("" if math.isnan(width) else f" ± {width:.1f}") if place > 1 else "",
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


def put_table(page: Path, text: str) -> None:
    """Replaces what stands between the page's marks, BEGIN and END. Raises ValueError where it has
    none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no {BEGIN!r} and {END!r} for the table to stand between")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--root", type=Path, default=Path("runs/algos"))
    parser.add_argument("--page", type=Path, help="a page of the docs, to put the results in")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    runs: dict[str, list[Run]] = {name: [] for name in args.only}
    for seed in args.seeds:  # all algorithms of a seed, then the next: what is there compares
        root = args.root.resolve() / f"seed{seed}"
        warm_up(root, seed)
        for name, found in runs.items():
            found.append(train(root, seed, name))
    results = [Result(name, found) for name, found in runs.items()]
    results.sort(key=lambda result: -statistics.fmean(result.ends))
    text = "\n".join([starts(results), "", *table(results)])
    print(text)
    plot(args.root / "algos.svg", results)
    if args.page is not None:
        put_table(args.page, text)
        plot(args.page.parent / "images" / "algos.svg", results)


if __name__ == "__main__":
    main()
