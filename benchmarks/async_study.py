"""Trains the quickstart's sums, with long-tailed answers, synchronously and asynchronously.

    python benchmarks/async_study.py [--seeds 1 2] [--root runs/async] [--plot FILE.svg]

The model is warmed up once, as the quickstart's is. Then, for each seed and each staleness bound, a
synchronous run and asynchronous ones without and with the decoupled loss take turns. The speed-up
is the seconds per step of the synchronous run beside over those of the asynchronous one; of the
synchronous runs of a seed, the first is a whole one and the others make fewer steps. Trainer and
server have one thread each. Runs that have ended are not made again. Prints Markdown tables, and
draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.chdir(ROOT)

from quickstart import evaluations, in_root, launch, read_stats  # noqa: E402
from tiny_model import make_model  # noqa: E402

from benchmarks.async_plot import Panel, Series, draw  # noqa: E402

BOUNDS = (1, 2, 4, 8)
STEPS, TURN = 28, 8  # of a whole run, and of a synchronous one in between
WARM = 2  # the first steps, which are not measured
LONGEST = 124  # tokens of an answer
TASK, REWARD = "benchmarks.long_tail:sums", "benchmarks.long_tail:result_is_right"
COMMON = [
    f"train_dataset.type={TASK}", f"valid_dataset.type={TASK}", "recover.mode=disabled",
    "stats_logger.report=false",
]  # fmt: skip
GRPO = [
    f"train_dataset.reward={REWARD}", f"valid_dataset.reward={REWARD}", "actor.parallel.tp=1",
    "train_dataset.batch_size=16", f"gconfig.max_new_tokens={LONGEST}", "saver.final=false",
    f"eval_gconfig.max_new_tokens={LONGEST}", "eval_gconfig.greedy=false", "server.threads=1",
    "server.context_length=140", "actor.loss_agg=sequence-mean", "actor.optimizer.lr=2e-4",
    "rollout.order=completion", "ref=null",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Describes a run, and what came of it. seconds: of a step; waiting: the part of it in which
    the trainer waits for samples; before, after: accuracy on held-out sums; length, longest: mean
    tokens of an answer, and of the longest one of a step; others: cores that other programs used
    meanwhile."""

    bound: int
    decoupled: bool
    steps: int
    seconds: float
    waiting: float
    before: float
    after: float
    staleness: float
    length: float
    longest: float
    others: float


def run(root: Path, seed: int, name: str, bound: int, decoupled: bool, steps: int) -> Turn:
    """Makes a run, or reads what came of it where it has been made."""
    out = root / f"seed{seed}" / name
    result = out / "turn.json"
    if result.exists():
        return Turn(**json.loads(result.read_text()))
    start, busy, own = time.monotonic(), _busy(), _own()
    launch(
        "quickstart_grpo.yaml",
        f"actor.path={root / 'model' / 'sft' / 'final'}",
        *in_root(out.parent, seed),
        f"trial_name={name}",
        f"total_train_steps={steps}",
        f"rollout.max_head_offpolicyness={bound}",
        f"actor.use_decoupled_loss={json.dumps(decoupled)}",
        "evaluator.freq_steps=1000",
        *COMMON,
        *GRPO,
        processes=1,
    )
    wall = time.monotonic() - start
    others = (_busy() - busy - (_own() - own)) / wall
    stats = [row for row in read_stats(out) if row["step"] > WARM]

    def mean(key: str) -> float:
        return statistics.fmean(row.get(key, 0.0) for row in stats)

    accuracy = [row["eval/accuracy"] for row in evaluations(out)]
    turn = Turn(
        bound=bound,
        decoupled=decoupled,
        steps=steps,
        seconds=mean("timing/step_s"),
        waiting=mean("timing/rollout_s") / mean("timing/step_s"),
        before=accuracy[0],
        after=accuracy[-1],
        staleness=mean("staleness/mean"),
        length=mean("response_len/mean"),
        longest=mean("response_len/max"),
        others=others,
    )
    result.write_text(json.dumps(asdict(turn)))
    return turn


def _busy() -> float:
    """Returns the seconds that all cores have worked since the machine began."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system = map(int, fields[:3])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Returns the seconds that ended runs have worked."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def warm_up(root: Path) -> None:
    """Writes the model that all runs begin with."""
    out = root / "model"
    if (out / "sft" / "final").exists():
        return
    make_model(out / "model")
    launch("quickstart_sft.yaml", f"model.path={out / 'model'}", *in_root(out, 1), *COMMON)


def study(root: Path, seed: int) -> Iterator[tuple[Turn, Turn]]:
    """Yields the runs of a seed, each with the synchronous one beside it."""
    whole = run(root, seed, "bound0", 0, False, STEPS)
    yield whole, whole
    for bound in BOUNDS:
        sync = whole if bound == BOUNDS[0] else run(root, seed, f"beside{bound}", 0, False, TURN)
        for decoupled in (False, True):
            name = f"bound{bound}{'_decoupled' * decoupled}"
            yield run(root, seed, name, bound, decoupled, STEPS), sync


def table(pairs: list[tuple[Turn, Turn]]) -> Iterator[str]:
    """Yields the lines of a table, of one for each bound and loss: means over the seeds, and in
    brackets their range."""
    head = ["staleness bound", "loss", "mean staleness", "s/step", "synchronous", "speed-up"]
    head += ["waiting", "accuracy before", "after", "mean length", "longest", "cores of others"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for key in sorted({(t.bound, t.decoupled) for t, _ in pairs}):
        found = [(t, sync) for t, sync in pairs if (t.bound, t.decoupled) == key]
        cells = [str(key[0]), "decoupled" if key[1] else "plain"]
        cells += [
            f"{statistics.fmean(t.staleness for t, _ in found):.1f}",
            f"{statistics.fmean(t.seconds for t, _ in found):.2f}",
            f"{statistics.fmean(sync.seconds for _, sync in found):.2f}",
            _cell([sync.seconds / t.seconds for t, sync in found], "{:.2f}"),
            f"{100 * statistics.fmean(t.waiting for t, _ in found):.0f} %",
            _cell([100 * t.before for t, _ in found], "{:.1f}"),
            _cell([100 * t.after for t, _ in found], "{:.1f}"),
            f"{statistics.fmean(t.length for t, _ in found):.1f}",
            f"{statistics.fmean(t.longest for t, _ in found):.0f}",
            _cell([t.others for t, _ in found], "{:.1f}"),
        ]
        yield "| " + " | ".join(cells) + " |"


def _cell(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    mean = form.format(statistics.fmean(values))
    return mean if low == high else f"{mean} ({low} to {high})"


def plot(path: Path, pairs: list[tuple[Turn, Turn]]) -> None:
    """Draws accuracy and speed-up by bound."""

    def lines(value: Callable[[Turn, Turn], float]) -> list[Series]:
        out = []
        for decoupled, label in ((False, "plain loss"), (True, "decoupled loss")):
            points: dict[int, Any] = {}
            for t, sync in pairs:
                if t.decoupled == decoupled or t.bound == 0:
                    points.setdefault(t.bound, []).append(value(t, sync))
            out.append(Series(label=label, points=points))
        return out

    after = lines(lambda t, _: 100 * t.after)
    speed = lines(lambda t, sync: sync.seconds / t.seconds)
    bound = "rollout.max_head_offpolicyness"
    panels = [
        Panel(title="held-out accuracy at the end, %", x_label=bound, series=after),
        Panel(title="steps per second over synchronous", x_label=bound, series=speed, y_from=0.0),
    ]
    draw(path, panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--root", type=Path, default=Path("runs/async"))
    parser.add_argument("--plot", type=Path, default=Path("runs/async/async.svg"))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    warm_up(args.root)
    pairs = [pair for seed in args.seeds for pair in study(args.root, seed)]
    print("\n".join(table(pairs)))
    plot(args.plot, pairs)


if __name__ == "__main__":
    main()
