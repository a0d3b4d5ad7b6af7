"""The report: one well-formed file, no network, figures equal to the run's."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean as mean

import pytest

from megarl.cli import main as cli
from megarl.config.errors import EXIT_CODE
from megarl.observability.intervals import bootstrap_ci, proportion_ci, wilson
from megarl.observability.report import Run, load_run, write_report
from megarl.observability.report.charts import (
    Chart,
    Line,
    Scale,
    line_chart,
    log_ticks,
    nice_ticks,
    percent,
    plain,
    smooth,
    thin,
)
from megarl.observability.report.curves import PHASES, smoothing_window, step_phases, step_time
from megarl.observability.report.runs import ACCURACY, gain, pair_samples
from megarl.observability.report.summary import summarize, summary_lines

GAP = "train_rollout_logprob_abs_diff"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags nest; collects headings, hover data, outside references and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.headings: list[str] = []
        self.hover: list[dict] = []
        self.refs: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.stack.append(tag)
        self.refs += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1] == tag, (tag, self.stack)
        self.stack.pop()

    def handle_data(self, data):
        if self.stack and self.stack[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        if self.stack and self.stack[-1] == "script" and data.startswith('{"x"'):
            self.hover.append(json.loads(data))
        elif self.stack and self.stack[-1] not in ("script", "style"):
            self.text.append(data)


def charts(page: Page) -> dict[str, dict]:
    """What the hover boxes of a page without samples show, by title; of several charts of one title
    the first."""
    titles = [h for h in page.headings if h not in ("Runs", "Curves")][1:]
    found: dict[str, dict] = {}
    for title, hover in zip(titles, page.hover, strict=True):
        found.setdefault(title, hover)
    return found


def rl_rows(n: int = 6) -> list[dict]:
    rows: list[dict] = [
        {
            "step": 0,
            "eval/accuracy": 0.25,
            "eval/accuracy_lo": 0.2,
            "eval/accuracy_hi": 0.3,
            "elapsed_s": 1.0,
            "time": 1.79e9,
        }
    ]
    for s in range(1, n + 1):
        rows.append(
            {
                "step": s,
                "reward/mean": 0.1 * s,
                "response_len/mean": 10.0 + s,
                "approx_kl": 1e-4 * s,
                "kl_ref": 1e-3 * s,
                "entropy": 2.0 - 0.1 * s,
                "loss": 0.1,
                "train_rollout_logprob_abs_diff/max": 10.0**-s,
                "train_rollout_logprob_abs_diff/mean": 10.0 ** -(s + 1),
                "timing/rollout_s": 1.0,
                "timing/train_s": 0.5,
                "timing/logp_s": 0.25,
                "timing/update_weights_s": 0.125,
                "timing/step_s": 2.0,
                "timing/eval_s": 9.0,
                "timing/update_weights/gather_s": 0.1,
                "perf/tokens_per_s": 500.0,
                "elapsed_s": 1.0 + 2 * s,
                "time": 1.79e9 + 2 * s,
            }
        )
    rows[-1] |= {"eval/accuracy": 0.5, "eval/accuracy_lo": 0.45, "eval/accuracy_hi": 0.55}
    return rows


def write_run(path: Path, rows: list[dict], samples: Sequence[dict] = (), config: str = "") -> Path:
    path.mkdir(parents=True)
    (path / "stats.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if samples:
        (path / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    if config:
        (path / "config.yaml").write_text(config)
    return path


SAMPLES = [
    {"when": "before", "prompt": "1+1=", "completion": "<b>3</b>", "answer": "2", "reward": 0.0},
    {"when": "after", "prompt": "1+1=", "completion": "two & 2", "answer": "2", "reward": 1.0},
]


def test_report_of_one_run(tmp_path):
    run = write_run(tmp_path / "exp" / "t0", rl_rows(), SAMPLES, "actor:\n  path: a<b\n")
    path = write_report(tmp_path / "out" / "report.html", [run])
    text = path.read_text()
    page = Page(text)
    assert page.headings[0] == "exp/t0"
    for title in (
        "Held-out accuracy",
        "Reward",
        "Response length",
        "KL to the behaviour policy",
        "KL to the reference",
        "Entropy",
        "Trainer / server gap",
        "Step time",
        "Samples",
        "Configuration",
    ):
        assert title in page.headings, title
    words = " ".join(page.text)
    assert "+25.0 points , 95% CI 17.9 to 32.1" in words
    assert "<b>3</b>" in words and "two & 2" in words and "path: a<b" in words
    assert "500 tokens/s" in words
    # samples come first, and what never changed is a number, no chart
    assert page.headings.index("Samples") < page.headings.index("Curves")
    assert "Loss" not in page.headings and re.search(r"loss\s+0.1\s", words)


def test_report_needs_no_network(tmp_path):
    run = write_run(tmp_path / "run", rl_rows(), SAMPLES)
    text = write_report(tmp_path / "r.html", [run]).read_text()
    assert Page(text).refs == []
    assert not re.search(
        r"@import|url\(|<link|<iframe|fetch\(|https?://(?!www\.w3\.org/2000/svg)", text
    )


def test_hover_shows_the_values_of_the_run(tmp_path):
    text = write_report(tmp_path / "r.html", [write_run(tmp_path / "run", rl_rows())]).read_text()
    page = Page(text)
    by_title = charts(page)
    accuracy = by_title["Held-out accuracy"]
    assert accuracy["l"] == ["step 0", "step 6"]
    assert accuracy["s"][0]["v"] == ["25.0% [20.0%, 30.0%]", "50.0% [45.0%, 55.0%]"]
    reward = by_title["Reward"]
    assert reward["s"][0]["v"] == ["0.1", "0.2", "0.3", "0.4", "0.5", "0.6"]
    heights = reward["s"][0]["y"]
    assert heights == sorted(heights, reverse=True)  # up on the page is a smaller y
    steps = {s["n"]: s["v"][0] for s in by_title["Step time"]["s"]}
    assert steps["rollout 50%"] == "1 s" and steps["total"] == "2 s" and "other 6%" in steps


def test_runs_beside_each_other(tmp_path):
    one = write_run(tmp_path / "a" / "grpo", rl_rows())
    control = [
        {
            "step": s,
            "loss": 2.0 / (s + 1),
            "eval/accuracy": 0.2 + 0.001 * s,
            "elapsed_s": 0.1 * s,
        }
        for s in range(100)
    ]
    two = write_run(tmp_path / "a" / "sft", control)
    page = Page(
        write_report(
            tmp_path / "r.html", [f"GRPO={one}", f"more SFT={two}"], title="Both"
        ).read_text()
    )
    assert page.headings[:3] == ["Both", "Runs", "Curves"]
    words = " ".join(page.text)
    assert "more SFT" in words and "+9.9 points" in words
    names = [[s["n"] for s in chart["s"]] for chart in page.hover]
    # steps of RL and SFT are not comparable: no chart mixes them
    assert not any("more SFT" in n for n in names)
    # of a group's metrics, each has a chart with a line per run, in one place
    runs = [f"GRPO={one}", f"again={one}"]
    text = write_report(tmp_path / "r.html", runs).read_text()
    assert [s["n"] for s in charts(Page(text))["Reward"]["s"]] == ["GRPO", "again"]
    place = text[text.index('<div class="choice"><figure class="chart" data-choice="gap/') :]
    assert re.findall(r'data-choice="(gap/\w+)"', place) == ["gap/mean", "gap/max"]


def test_a_run_may_lack_nearly_everything(tmp_path):
    for i, rows in enumerate(
        [
            [],
            [{"step": 1}],
            [{"step": 1, "reward/mean": 1.0}],
            [{"step": 1, "loss": None, "timing/step_s": 1.0}],
        ]
    ):
        run = write_run(tmp_path / f"run{i}", rows)
        Page(write_report(tmp_path / f"{i}.html", [run]).read_text())


def test_later_lines_and_later_samples_count(tmp_path):
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    run = load_run(write_run(tmp_path / "run", rows))
    assert run.points("loss") == [(1.0, 1.0), (2.0, 3.0)]
    pairs = pair_samples([*SAMPLES, {**SAMPLES[1], "completion": "2"}])
    assert len(pairs) == 1 and pairs[0]["after"]["completion"] == "2"
    chat = {**SAMPLES[0], "prompt": [{"role": "user", "content": "hi"}]}
    assert pair_samples([chat])[0]["prompt"] == "user: hi"


def test_a_line_cut_short_is_left_out_but_garbage_is_an_error(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    with (run / "stats.jsonl").open("a") as f:
        f.write('{"step": 2, "lo\n{"step": 2, "loss": 2.0}\n{"step": 3')
    assert [r["step"] for r in load_run(run).rows] == [1, 2]
    (run / "stats.jsonl").write_text("{'step': 1}\n")
    with pytest.raises(ValueError, match=r"stats.jsonl:1: not a JSON object"):
        load_run(run)


def test_step_phases_are_those_inside_the_step():
    steps, phases = step_phases(Run(label="x", rows=rl_rows(2)))
    assert steps == [1.0, 2.0]
    assert phases == [
        ("rollout", [1.0] * 2),
        ("logp", [0.25] * 2),
        ("train", [0.5] * 2),
        ("update_weights", [0.125] * 2),
        ("other", [0.125] * 2),
    ]


def test_command_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", rl_rows())
    out = tmp_path / "r.html"
    command = [sys.executable, "-c", "from megarl.cli import main; main()", "report"]
    done = subprocess.run(
        [*command, f"mine={run}", "--out", str(out), "--title", "T"],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(out) and Page(out.read_text()).headings[0] == "T"
    assert cli(["report", str(tmp_path)]) == EXIT_CODE
    assert "a run directory?" in capsys.readouterr().err


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        write_report(tmp_path / "r.html", [])


@pytest.mark.parametrize(
    ("lo", "hi", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 0.61, [0, 0.2, 0.4, 0.6, 0.8]),
        (3, 3, None),
        (-0.05, 0.04, [-0.05, -0.025, 0, 0.025, 0.05]),
    ],
)
def test_ticks_are_round_and_enclose(lo, hi, ticks):
    got = nice_ticks(lo, hi)
    assert got[0] <= lo and got[-1] >= hi and 2 <= len(got) <= 7
    if ticks is not None:
        assert got == pytest.approx(ticks)


def test_log_axis():
    assert log_ticks(2e-6, 4e-4) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3])
    assert len(log_ticks(1e-12, 1.0)) <= 7
    scale = Scale(1e-4, 1.0, 0.0, 100.0, log=True)
    assert scale(1e-2) == pytest.approx(50.0)
    # zeros cannot stand on a logarithmic axis: they are left out, the rest is drawn
    line = Line(label="a", points=[(0, 0.0), (1, 1e-3), (2, 1.0)], color=0)
    (hover,) = Page(line_chart(Chart(title="t"), [line], log=True)).hover
    assert len(hover["x"]) == 2


def test_thin_and_smooth_keep_the_mean():
    points = [(float(i), float(i % 7)) for i in range(1000)]
    few = thin(points, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert smooth([(0, 0.0), (1, 3.0), (2, 6.0)], 3) == [(0, 1.5), (1, 3.0), (2, 4.5)]


def test_number_formats():
    assert [plain(v) for v in (0, 1e-4, 4.99e-5, 0.61111, 12345, 3.1e7)] == [
        "0",
        "1e-4",
        "4.99e-5",
        "0.611",
        "12,345",
        "3.1e7",
    ]
    assert percent(0.6094) == "60.9%"


def evaluations(*figures: dict, rewards: Sequence[Sequence[float]] = ()) -> Run:
    """A run with evaluations at steps 0, 1, ..., one sample a prompt, and a training step each."""
    rows = [{"step": i, "reward/mean": 0.5, **f} for i, f in enumerate(figures)]
    by_step = {i: {f"p{k}": [r] for k, r in enumerate(side)} for i, side in enumerate(rewards)}
    return Run(label="x", rows=rows, eval_rewards=by_step)


def evaluated(rewards: Sequence[float]) -> dict:
    """What the evaluator logs of one sample a prompt."""
    right = [r >= 1 for r in rewards]
    figures: dict = {"eval/accuracy": sum(right) / len(right), "eval/reward": mean(rewards)}
    for name, bounds in (("accuracy", proportion_ci(right)), ("reward", bootstrap_ci(rewards))):
        figures |= {f"eval/{name}_{end}": v for end, v in zip(("lo", "hi"), bounds, strict=True)}
    return figures


def tiles(run: Run, tmp_path: Path) -> str:
    text = write_report(tmp_path / "r.html", [run]).read_text()
    return text[text.index('class="tiles"') : text.index("<h2>Curves")]


def test_a_graded_reward_stands_in_for_an_accuracy_of_nothing(tmp_path):
    sides = [0.1, 0.3] * 20, [0.4, 0.6] * 20
    run = evaluations(*map(evaluated, sides), rewards=sides)
    html = tiles(run, tmp_path)
    assert "Held-out accuracy" not in html and "Held-out reward" in html
    assert "0.2 <small>→</small> 0.5" in html and '<span class="up">+0.3</span>, 95% CI 0.' in html
    text = (tmp_path / "r.html").read_text()
    assert "<h3>Held-out reward</h3>" in text and "<h3>Held-out accuracy</h3>" not in text
    lines = dict(summary_lines(summarize(run, seconds=1.0)))
    assert lines["eval reward"].startswith("0.2 → 0.5 (+0.3, 95% CI") and "accuracy" not in lines
    # where samples are worth a whole point, both are told
    right = evaluations(*map(evaluated, ([0.1, 1.0] * 20, [0.4, 1.0] * 20)))
    assert [n in tiles(right, tmp_path) for n in ("Held-out accuracy", "Held-out reward")] == [
        True,
        True,
    ]
    # and of rewards of 0 and 1 the accuracy alone, also where it stays 0
    nothing = evaluations(*map(evaluated, ([0.0] * 40, [0.0] * 40)))
    html = tiles(nothing, tmp_path)
    assert "Held-out accuracy" in html and "Held-out reward" not in html


def test_only_more_than_chance_is_green_or_red(tmp_path):
    few, many = [0.0] * 20 + [1.0] * 20, [0.0] * 18 + [1.0] * 22
    none, all_ = [0.0] * 40, [1.0] * 40
    for before, after, css in (
        (none, none, None), (few, many, None), (few, all_, "up"), (all_, few, "down"),
    ):  # fmt: skip
        html = tiles(evaluations(*map(evaluated, (before, after))), tmp_path)
        assert [c for c in ("up", "down") if f'class="{c}"' in html] == ([css] if css else [])
    # without intervals (another program's stats.jsonl) nothing is known
    bare = evaluations({"eval/accuracy": 0.0}, {"eval/accuracy": 1.0})
    html = tiles(bare, tmp_path)
    assert "+100.0 points" in html and "CI" not in html and 'class="up"' not in html


def test_the_gain_is_paired_where_the_prompts_are_the_same():
    """10 of 40 prompts are won and none lost: one sided, and far from chance."""
    before, after = [0.0] * 20 + [1.0] * 20, [0.0] * 10 + [1.0] * 30
    figures = [evaluated(before), evaluated(after)]
    paired = gain(evaluations(*figures, rewards=(before, after)), ACCURACY)
    other = evaluations(*figures, rewards=(before, after))
    other.eval_rewards[1]["another"] = other.eval_rewards[1].pop("p0")
    unpaired = gain(other, ACCURACY)
    assert paired.interval is not None and unpaired.interval is not None
    assert paired.up and unpaired.interval == gain(evaluations(*figures), ACCURACY).interval
    # Newcombe 1998 (Statistics in Medicine 17, 2635), method 10, without continuity correction
    p, q, n = 0.5, 0.75, 40
    (l1, u1), (l2, u2) = wilson(p, n), wilson(q, n)
    phi = (20 * 10 - 0 * 10) / math.sqrt(20 * 20 * 30 * 10)  # both right, neither, won, lost
    low = q - p - math.sqrt((q - l2) ** 2 - 2 * phi * (q - l2) * (u1 - p) + (u1 - p) ** 2)
    high = q - p + math.sqrt((u2 - q) ** 2 - 2 * phi * (u2 - q) * (p - l1) + (p - l1) ** 2)
    assert paired.interval == pytest.approx((low, high))
    assert paired.interval[0] > unpaired.interval[0] + 0.05


def test_rewards_of_evaluations_are_read_from_the_run_directory(tmp_path):
    run = write_run(tmp_path / "run", rl_rows())
    lines = [{"step": 0, "rewards": {"a": [0.0, 1.0]}}, {"step": 6, "rewards": {"a": [1.0, 1.0]}}]
    (run / "eval_rewards.jsonl").write_text("".join(json.dumps(li) + "\n" for li in lines))
    assert load_run(run).eval_rewards == {0: {"a": [0.0, 1.0]}, 6: {"a": [1.0, 1.0]}}


def test_a_phase_has_the_same_colour_in_every_chart(tmp_path):
    def colors(*phases: str) -> dict[str, str]:
        row = {"step": 1, "timing/step_s": 1.0} | {f"timing/{p}_s": 0.1 for p in phases}
        (hover,) = Page(step_time(Run(label="x", rows=[row]))).hover
        return {s["n"].rpartition(" ")[0]: s["c"] for s in hover["s"] if s["c"]}

    grpo = colors("rollout", "logp", "train", "update_weights")
    ppo = colors("rollout", "reward_model", "logp", "ref", "values", "train_critic", "train",
                 "update_weights")  # fmt: skip
    assert grpo.items() <= ppo.items() and len(set(ppo.values())) == len(ppo)
    every = [*PHASES, "judge", "other_judge"][:12]
    assert len(set(colors(*every).values())) == 12 and colors("judge")["other"] == "c7"
    assert len(set(colors(*PHASES).values())) == len(PHASES)
    assert len(set(colors("rollout", "train", "judge", "z").values())) == 5
    # beside each other, every run has its own chart
    for name in ("a", "b"):
        write_run(tmp_path / name, rl_rows())
    text = write_report(tmp_path / "r.html", [tmp_path / "a", tmp_path / "b"]).read_text()
    assert Page(text).headings.count("Step time") == 2


def test_the_legend_says_what_thin_and_thick_lines_are():
    def legend(*lengths: int) -> list[str]:
        lines = [
            Line(label=f"run{i}", points=[(float(x), 1.0) for x in range(n)], color=i,
                 smooth=smoothing_window(n))
            for i, n in enumerate(lengths)
        ]  # fmt: skip
        html = line_chart(Chart(title="t"), lines)
        return re.findall(r'<li><i class="key ([^"]*)"></i>([^<]*)', html)

    assert legend(10) == []
    assert legend(40) == [("c0 raw", "each step"), ("c0", "mean of 5 steps")]
    assert legend(40, 200)[2:] == [("c7 raw", "each step"), ("c7", "mean of 5 to 10 steps")]
    # which of several runs a lone line is of
    alone = Line(label="ppo", points=[(0, 1)], color=2)
    assert '<li><i class="key c2"></i>ppo</li>' in line_chart(Chart(title="t"), [alone], named=True)
    # of 4000 steps every point is the mean of ten, and the smoothed line still one of 200
    assert legend(4000) == [("c0 raw", "mean of 10 steps"), ("c0", "mean of 200 steps")]


def test_what_moves_has_a_chart_and_the_rest_a_value(tmp_path):
    def page(**figures: float) -> Page:
        rows = [
            {"step": s, "reward/mean": 0.5, **{k: s * v for k, v in figures.items()}}
            for s in (1, 2)
        ]
        return Page(write_report(tmp_path / "r.html", [Run(label="x", rows=rows)]).read_text())

    # a group without titles of its own, of a loss of the user's too, has one place
    critic = {"critic/explained_variance": 0.5, "critic/value_error": 0.1, "mine/sharpness": 0.2}
    assert {"Critic", "Mine"} <= set(page(**critic).headings)
    assert "Mine" not in page(**{"mine/sharpness": 0.0}).headings
    assert page(**{"mine/sharpness": 0.0}).text.count("mine/sharpness") == 1
    # rounding is no movement, but of a learning rate and of a gap
    assert "KL to the behaviour policy" not in page(approx_kl=4e-14).headings
    assert "KL to behaviour" not in page(approx_kl=4e-14).text
    assert "Update" in page(lr=1e-7).headings
    assert "Trainer / server gap" in page(**{f"{GAP}/mean": 1e-7}).headings


def test_the_gap_is_apart_from_staleness(tmp_path):
    """Tokens of older weights differ by what was trained since."""
    rows = [
        {"step": 1, "staleness/max": 0.0, f"{GAP}/mean": 1e-7, f"{GAP}/max": 1e-6},
        {"step": 2, "staleness/max": 1.0, f"{GAP}/mean": 0.2, f"{GAP}/max": 2.0,
         "mismatch/age_0/mean": 2e-7, "mismatch/age_0/max": 2e-6, "mismatch/age_1/mean": 0.3},
        {"step": 3, "staleness/max": 1.0, f"{GAP}/mean": 0.4, f"{GAP}/max": 4.0},  # all are old
    ]  # fmt: skip
    text = write_report(tmp_path / "r.html", [Run(label="x", rows=rows)]).read_text()
    shown = {s["n"]: s["v"] for s in charts(Page(text))["Trainer / server gap"]["s"]}
    assert shown == {"max": ["1e-6", "2e-6"], "mean": ["1e-7", "2e-7"]}
    (tile,) = re.findall(r"Trainer / server gap</div>\s*<div class=\"value\">([^<]*)</div>", text)
    assert float(tile) == pytest.approx(1.5e-7)


def test_ties_of_pairs_are_no_accuracy(tmp_path):
    """Before the first update the policy is its reference: half of the pairs, by construction."""

    def row(step: int, accuracy: float, margin: float) -> dict:
        low, high = wilson(accuracy, 40)
        return {"step": step, "eval/accuracy": accuracy, "eval/margin": margin,
                "eval/accuracy_lo": low, "eval/accuracy_hi": high}  # fmt: skip

    run = Run(label="x", rows=[row(0, 0.5, 0.0), row(4, 1.0, 0.3)])
    html = tiles(run, tmp_path)
    assert "Held-out pairs ranked right" in html and "points" not in html and "CI 91" in html
    lines = dict(summary_lines(summarize(run, seconds=1.0)))
    assert lines["pairs ranked right"] == "50.0% → 100.0%"
    run.rows.append(row(8, 0.9, 0.2))
    assert "-10.0 points" in tiles(run, tmp_path)


def test_a_reader_chooses_a_validation_set(tmp_path):
    rows = [
        {"step": s, "eval/accuracy": s / 4, "eval/easy/accuracy": s / 2, "eval/hard/accuracy": 0.0,
         "eval/easy/accuracy_lo": 0.0, "eval/easy/accuracy_hi": 1.0}
        for s in (1, 2)
    ]  # fmt: skip
    text = write_report(tmp_path / "r.html", [Run(label="x", rows=rows)]).read_text()
    assert re.findall(r'data-choice="([^"]*)"', text) == ["all sets", "easy", "hard"]
    hovers = Page(text).hover
    assert [h["s"][0]["v"][1] for h in hovers] == ["50.0%", "100.0% [0.0%, 100.0%]", "0.0%"]


def test_samples_of_several_turns_show_who_said_what(tmp_path):
    turns = [
        {"who": "model", "text": "is it <3>?"},
        {"who": "environment", "text": "\nno & less\n"},
        {"who": "model", "text": "2"},
    ]
    samples = [SAMPLES[0], {**SAMPLES[1], "turns": turns, "reward": 0.5}]
    run = Run(label="x", rows=[{"step": 1, "loss": 1.0}], samples=samples)
    text = write_report(tmp_path / "r.html", [run]).read_text()
    told = re.findall(r'<div class="turn (\w*)"><b>(\w+)</b><pre>([^<]*)</pre>', text)
    assert told == [
        ("", "model", "is it &lt;3&gt;?"),
        ("told", "environment", "no &amp; less"),
        ("", "model", "2"),
    ]
    assert SAMPLES[1]["completion"] not in text and 'class="chip part"' in text


def test_lines_are_named_by_what_tells_them_apart(tmp_path):
    rows = [
        {
            "step": s,
            "reward/mean": 0.5,
            "reward/format": 0.1 * s,
            "reward/format/std": 0.1,
            "reward/pass_rate": 0.4 * s,
            "difficulty/1/pass_rate": 0.4 * s,
            "difficulty/2/pass_rate": 0.3 * s,
            "difficulty/2/prompts": 4.0 * s,
            "staleness/max": 1.0,
            "staleness/age_0": 0.25 * s,
            "staleness/age_1": 1 - 0.25 * s,
        }
        for s in (1, 2)
    ]
    by_title = charts(
        Page(write_report(tmp_path / "r.html", [Run(label="x", rows=rows)]).read_text())
    )
    assert [s["n"] for s in by_title["Pass rate by difficulty"]["s"]] == ["1", "2"]
    assert [s["n"] for s in by_title["Parts of the reward"]["s"]] == ["format"]
    ages = by_title["Age of the trained tokens"]["s"]
    assert [(s["n"], s["v"][0]) for s in ages] == [("age_0", "25.0%"), ("age_1", "75.0%")]
    assert by_title["Difficulty"]["s"][0]["v"] == ["4", "8"]


def report(run: Path, out: Path) -> int:
    return cli(["report", str(run), "--out", str(out / "r.html")])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("stats.jsonl", b'[1, 2]\n{"step": "x"}\n{"step": 1, "loss": "much"}\n'),
        ("stats.jsonl", b"[" * 100_000 + b"}\n"),
        ("stats.jsonl", b'{"step": 1, "loss": [2]}\n'),
        ("samples.jsonl", b'"a text"\n'),
        ("samples.jsonl", b"\xff\xfe{}\n"),
        ("summary.json", b"[1]"),
        ("config.yaml", b"\xff\x00"),
        ("eval_rewards.jsonl", b'{"rewards": 3}\n'),
    ],
)
def test_what_a_damaged_run_directory_does_to_the_report_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    (run / name).write_bytes(content)
    status = report(run, tmp_path)
    said = capsys.readouterr().err
    assert status in (0, EXIT_CODE) and "Traceback" not in said
    assert status == 0 or "run" in said.splitlines()[-1]


@pytest.mark.parametrize("name", ["stats.jsonl", "samples.jsonl", "summary.json", "config.yaml"])
def test_a_fifo_in_a_run_directory_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert report(run, tmp_path) in (0, EXIT_CODE)
