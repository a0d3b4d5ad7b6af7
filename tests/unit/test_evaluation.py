"""Evaluation: figures with intervals over prompts, rewards by prompt, completions turn by turn."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from megarl.cli.status import status
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.run import EvaluatorConfig
from megarl.observability.intervals import bootstrap_ci, wilson
from megarl.observability.report import load_run, write_report
from megarl.observability.run_log import EVAL_REWARDS_FILE, RunLog
from megarl.observability.stats_logger import progress_line
from megarl.rollout.executor import Answered
from megarl.trainer.evaluation import HeldOut, SetEvaluator, with_means
from megarl.trainer.rollout_metrics import completions, expected

SPECIAL = 99
tokenizer = SimpleNamespace(
    decode=lambda ids, skip_special_tokens: " ".join(str(i) for i in ids if i != SPECIAL)
)


def a_batch(rewards: list[list[float]], prompts: list[int] | None = None) -> dict:
    """A prompt of one token, an answer of one; `rewards` by prompt and sample."""
    n = sum(map(len, rewards))
    names = prompts or range(len(rewards))
    return {
        "input_ids": torch.arange(2 * n).view(n, 2),
        "attention_mask": torch.ones(n, 2, dtype=torch.bool),
        "loss_mask": torch.tensor([[False, True]] * n),
        "rewards": torch.tensor([r for of in rewards for r in of]),
        "group_ids": torch.tensor([k for k, of in zip(names, rewards, strict=True) for _ in of]),
    }


class Client:
    """Answers with the same samples again and again: the client, and its executor."""

    version = 0

    def __init__(self, batch: dict | None, failed: list[int] | None = None) -> None:
        self.batch, self.failed = batch, failed
        self.executor = self

    def answer(self, rows, workflow):
        return Answered(self.batch, [0] * len(rows) if self.failed is None else self.failed)

    def get_version(self) -> int:
        return self.version


def held_out(rows: int, config: EvaluatorConfig | None = None, name: str = "") -> HeldOut:
    said = [[{"role": "user", "content": f"q{i}"}] for i in range(rows)]
    data = [{"prompt": f"q{i}", "messages": said[i], "answer": i} for i in range(rows)]
    own = {"rows": data, "workflow": None, "tokenizer": tokenizer, "seed": 0}
    return HeldOut([SetEvaluator(**own, config=config or EvaluatorConfig(), name=name)])


def test_intervals_are_those_of_prompts(tmp_path):
    """Eight equal samples of each of 20 prompts, 5 of them right, are 20 observations."""
    rewards = [[1.0] * 8] * 5 + [[0.25] * 8] * 15
    figures = held_out(20).evaluate(Client(a_batch(rewards)), tmp_path / "s.jsonl", None)
    assert figures["eval/accuracy"] == 0.25 and figures["eval/samples"] == 160
    bounds = [figures[f"eval/accuracy_{end}"] for end in ("lo", "hi")]
    assert bounds == pytest.approx(wilson(0.25, 20))
    bounds = [figures[f"eval/reward_{end}"] for end in ("lo", "hi")]
    assert bounds == pytest.approx(bootstrap_ci([1.0] * 5 + [0.25] * 15))
    perfect = held_out(20).evaluate(Client(a_batch([[1.0]] * 20)), tmp_path / "s.jsonl", None)
    assert perfect["eval/accuracy_hi"] == 1.0 and 0.8 < perfect["eval/accuracy_lo"] < 0.9


def test_pass_at_k_where_prompts_have_several_answers(tmp_path):
    batch = a_batch([[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0, 1.0]])  # two of the last have failed
    figures = held_out(3).evaluate(Client(batch), tmp_path / "s.jsonl", None)
    assert figures["eval/pass_at_2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert figures["eval/pass_at_4"] == 0.5  # of the prompts that have four
    assert figures["eval/pass_at_1"] == pytest.approx((0.25 + 0 + 1) / 3)
    # every sample says its own number: a tie of four, of four and of two
    assert figures["eval/maj_at_4"] == pytest.approx((0.25 + 0 + 1) / 3)
    assert figures["eval/maj_at_4_lo"] <= figures["eval/maj_at_4"] <= figures["eval/maj_at_4_hi"]
    alone = held_out(3).evaluate(Client(a_batch([[1.0]] * 3)), tmp_path / "s.jsonl", None)
    assert not [name for name in alone if "pass_at" in name]


def test_a_rollout_that_forked_counts_once(tmp_path):
    batch = a_batch([[1.0, 1.0, 1.0, 0.0], [0.0]]) | {"rollout_ids": torch.tensor([5, 5, 5, 1, 2])}
    figures = held_out(2).evaluate(Client(batch), tmp_path / "s.jsonl", None)
    assert figures["eval/accuracy"] == pytest.approx(1 / 3) and figures["eval/samples"] == 3
    assert figures["eval/response_len"] == pytest.approx(5 / 3)


def test_rewards_are_kept_by_prompt_and_what_an_earlier_start_wrote_gives_way(tmp_path):
    client = Client(a_batch([[1.0, 0.0], [0.5, 0.5]]))
    evaluator = held_out(2)
    (tmp_path / "stats.jsonl").write_text("")

    def evaluate(step: int) -> dict:
        client.version = step
        evaluator.evaluate(client, tmp_path / "samples.jsonl", None)
        return load_run(tmp_path).eval_rewards

    (first,) = evaluate(0).values()
    assert sorted(first.values()) == [[0.5, 0.5], [1.0, 0.0]]
    evaluate(20)
    both = evaluate(40)
    assert list(both) == [0, 20, 40] and both[40] == both[0]  # the same prompts, by name
    RunLog(tmp_path / EVAL_REWARDS_FILE).begin(25)  # as a start from step 25 does
    assert list(evaluate(30)) == [0, 20, 30]
    client.batch = a_batch([[0.5, 0.5]], prompts=[1])  # row 0 was rejected
    ((name, rewards),) = evaluate(50)[50].items()
    assert rewards == [0.5, 0.5] == both[0][name]


def test_what_failed_is_in_no_figure_and_said(tmp_path):
    """Of ten answers the one that failed would have been wrong: the accuracy is that of nine."""
    batch = a_batch([[1.0]] * 8 + [[0.0]], prompts=[*range(8), 9])
    client = Client(batch, failed=[0] * 8 + [1, 0])
    figures = held_out(10).evaluate(client, tmp_path / "s.jsonl", None)
    assert figures["eval/failed"] == 0.1 and figures["eval/samples"] == 9
    assert figures["eval/accuracy"] == pytest.approx(8 / 9)
    clean = held_out(4).evaluate(Client(a_batch([[1.0]] * 4)), tmp_path / "s.jsonl", None)
    assert clean["eval/failed"] == 0.0


@pytest.mark.parametrize("left", [8, 0])
def test_where_too_much_failed_the_accuracy_is_nan_and_neither_high_nor_zero(tmp_path, left):
    """Rows that fail would be the hard ones: of those that are left all are right."""
    batch = a_batch([[1.0, 1.0]] * left) if left else None
    client = Client(batch, failed=[0] * left + [2] * (10 - left))
    figures = held_out(10).evaluate(client, tmp_path / "s.jsonl", "after")
    assert figures["eval/failed"] == (10 - left) / 10 and figures["eval/samples"] == 2 * left
    bounds = ("accuracy_lo", "accuracy_hi", "reward_lo", "reward_hi")
    for name in ("accuracy", "reward", "response_len", *bounds):
        assert math.isnan(figures[f"eval/{name}"])
    assert all(math.isnan(v) for name, v in figures.items() if "_at_" in name)
    lenient = held_out(10, EvaluatorConfig(max_failed=1.0)).evaluate(
        client, tmp_path / "s.jsonl", None
    )
    assert lenient["eval/accuracy"] == 1.0 if left else math.isnan(lenient["eval/accuracy"])
    assert lenient["eval/failed"] == (10 - left) / 10
    with pytest.raises(RuntimeError, match="10"):  # that is no failure, but the workflow's word
        held_out(10).evaluate(Client(None), tmp_path / "s.jsonl", None)


def test_the_mean_over_data_sets_is_nan_where_one_says_nothing():
    found = {"eval/a/failed": 0.5, "eval/b/failed": 0.0, "eval/b/accuracy": 0.4}
    found |= {f"eval/a/accuracy{end}": math.nan for end in ("", "_lo", "_hi")}
    found |= {f"eval/b/accuracy{end}": v for end, v in (("_lo", 0.3), ("_hi", 0.5))}
    joined = with_means(found, ["a", "b"], ("accuracy", "failed"))
    assert math.isnan(joined["eval/accuracy"]) and math.isnan(joined["eval/accuracy_lo"])
    assert joined["eval/failed"] == 0.25


def test_failures_of_an_evaluation_are_on_every_page(tmp_path):
    """A null accuracy is no point of the report, and what failed stands beside the last one."""
    rows = [
        {"step": 0, "eval/accuracy": 0.25, "eval/failed": 0.0},
        {"step": 1, "eval/accuracy": 0.5, "eval/failed": 0.0625},
        {"step": 2, "eval/accuracy": None, "eval/failed": 0.375},
    ]
    (tmp_path / "stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path / "report.html", [tmp_path]).read_text()
    assert "37.5" in page
    assert status(tmp_path)["eval_failed"] == 0.375
    line = progress_line(2, {"eval/accuracy": math.nan, "eval/failed": 0.375}, 9, None)
    assert "nan" in line and "37.5%" in line


def test_a_row_without_answer_shows_the_columns_of_its_own():
    given = {"row_id": 3, "messages": [], "prompt": "p", "prompt_ids": [1]}
    assert expected({**given, "gold": "7"}) == "gold: 7"
    assert expected({**given, "gold": "7", "answer": "8"}) == "8"
    assert expected(given) == ""


def turns_of(ids: list[int], written: list[int], real: int | None = None) -> list[tuple[str, str]]:
    mask = torch.zeros(1, len(ids), dtype=torch.bool)
    mask[0, : real or len(ids)] = True
    batch = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": mask,
        "loss_mask": torch.tensor([written]).bool(),
        "rewards": torch.tensor([1.0]),
        "group_ids": torch.tensor([0]),
    }
    (record,) = completions(batch, tokenizer, [{"prompt": "p", "answer": "a"}])
    return [(t["who"], t["text"]) for t in record.get("turns", [])]


def test_turns_are_what_the_model_wrote_and_was_told():
    #          prompt  wrote  told  wrote  padding
    ids, wrote = [1, 2, 3, 4, 5, 6, 7, 0], [0, 0, 1, 1, 0, 0, 1, 0]
    assert turns_of(ids, wrote, real=7) == [
        ("model", "3 4"),
        ("environment", "5 6"),
        ("model", "7"),
    ]
    assert turns_of([1, 2, 3, 0], [0, 1, 1, 0], real=3) == []  # one answer: `completion` has it
    assert turns_of([1, 2, 3], [0, 0, 0]) == []
    # a closing token that is not trained on is nobody's turn; a tool's last word is
    assert turns_of([1, 2, SPECIAL], [0, 1, 0]) == []
    assert turns_of([1, 2, 3], [0, 1, 0]) == [("model", "2"), ("environment", "3")]


def test_records_of_one_data_set_leave_those_of_another(tmp_path):
    client, path = Client(a_batch([[1.0]])), tmp_path / "samples.jsonl"
    (tmp_path / "stats.jsonl").write_text("")
    for name in ("", "a", "b"):
        held_out(1, name=name).evaluate(client, path, "before")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r.get("dataset", "") for r in records] == ["", "a", "b"]
    kept = (tmp_path / "eval_rewards.jsonl").read_text().splitlines()
    assert sorted(json.loads(line).get("dataset", "") for line in kept) == ["", "a", "b"]
    assert load_run(tmp_path).eval_rewards == {0: json.loads(kept[0])["rewards"]}


def test_without_one_data_set_of_its_own_the_accuracy_is_the_mean_over_all():
    found = {}
    for name, value in (("a", 0.25), ("b", 0.75)):
        ends = {"": value, "_lo": value - 0.06, "_hi": value + 0.08}
        found |= {f"eval/{name}/accuracy{end}": v for end, v in ends.items()}
    joined = with_means(found, ["a", "b"], ("accuracy", "reward"))
    assert joined["eval/accuracy"] == 0.5 and "eval/reward" not in joined
    # two independent means: the width of one over the square root of two
    assert 0.5 - joined["eval/accuracy_lo"] == pytest.approx(0.06 / 2**0.5)
    assert joined["eval/accuracy_hi"] - 0.5 == pytest.approx(0.08 / 2**0.5)
    assert with_means(found, ["", "a", "b"], ("accuracy",)) == found


def test_the_report_and_the_status_show_every_data_set(tmp_path):
    rows = [
        {"step": step, "eval/easy/accuracy": 0.5 + step / 10, "eval/hard/accuracy": 0.1,
         "eval/accuracy": 0.3, "time": 0.0}
        for step in range(3)
    ]  # fmt: skip
    (tmp_path / "stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path / "report.html", [tmp_path]).read_text()
    assert 'data-choice="easy"' in page and 'data-choice="hard"' in page
    assert status(tmp_path)["eval_by_dataset"] == {"easy": 0.7, "hard": 0.1}


def test_a_set_that_cannot_be_read_is_named_once():
    keys = ["actor.path=m", "valid_dataset.type=chat", "valid_dataset.path=no/file.jsonl"]
    cfg = load_config(None, keys)
    with pytest.raises(ConfigError) as error:
        HeldOut.for_run(cfg, tokenizer, None, sets={"chat": cfg.valid_dataset})
    assert str(error.value).count("chat:") == str(error.value).count("no/file.jsonl") == 1
