"""megarl init: what it asks, writes and refuses. tests/e2e/test_init.py trains what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import make_model
from megarl.cli import main
from megarl.config.loader import keys_set, load_config
from megarl.data.sources import load_rows
from megarl.launcher import local

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, hidden=64, layers=1)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGARL_DEVICE", "cpu")
    return tmp_path


def rows(*rows: dict[str, Any]) -> str:
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "train.jsonl"


TALK = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize(
    ("algorithm", "row", "kind", "columns"),
    [
        ("grpo", {"messages": "1+1", "answer": "2"}, "chat", None),
        ("dapo", {"problem": "1+1", "solution": "2"}, "chat",
         {"messages": "problem", "answer": "solution"}),
        ("grpo", {"question": "1+1", "answer": "So\n#### 2"}, "gsm8k", None),
        ("sft", {"messages": TALK, "answer": "2"}, "chat", None),
        ("sft", {"prompt": "1+1", "completion": "2"}, "chat",
         {"messages": "prompt", "response": "completion"}),
        ("sft", {"question": "1+1", "answer": "2"}, "chat",
         {"messages": "question", "response": "answer"}),
        ("sft", {"conversations": SHAREGPT}, "chat", {"messages": "conversations"}),
        ("sft", {"messages": TALK[:1], "answer": "3", "response": "2"}, "chat", None),
        ("sft", {"instruction": "1", "input": "+1", "output": "2"}, "chat",
         {"messages": ["instruction", "input"], "response": "output"}),
        ("grpo", {"prompt": TALK[:1], "reward_model": {"style": "rule", "ground_truth": "2"}},
         "chat", {"messages": "prompt", "answer": "reward_model.ground_truth"}),
        ("dpo", {"prompt": "1+1", "chosen": "2", "rejected": "3"}, "preference", None),
        ("rm", {"prompt": "1+1", "chosen": "2", "rejected": "3"}, "preference", None),
    ],
)  # fmt: skip
def test_columns_say_how_data_is_read(
    model: Path, algorithm: str, row: dict[str, Any], kind: str, columns: dict[str, str] | None
) -> None:
    reward = "gsm8k" if kind == "gsm8k" else "exact"
    flags = ["--model", str(model), "--data", rows(row), "--reward", reward]
    assert main(["init", "new", "--algorithm", algorithm, *flags, "--yes"]) == 0
    cfg = load_config(Path("new", f"{algorithm}.yaml"))
    assert cfg.train_dataset.type == kind
    assert cfg.train_dataset.options.get("columns") == columns
    assert cfg.experiment_name == "new" and cfg.trial_name == algorithm
    assert getattr(cfg, "algorithm", "") == ("dapo" if algorithm == "dapo" else "")


def test_what_is_joined_and_what_is_left_out(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(
        {"instruction": "Say it.", "input": "", "output": "2", "history": []},
        {"instruction": "Add.", "input": "51+29", "output": "80", "history": ["1+1"], "ID\n": "a"},
    )
    flags = ["--model", str(model), "--data", data, "--algorithm", "sft"]
    assert main(["init", "new", *flags, "--yes"]) == 0
    read = load_rows(load_config("new/sft.yaml").train_dataset, seed=1, purpose="sft")
    assert [row["messages"][0]["content"] for row in read] == ["Say it.", "Add.\n\n51+29"]
    assert [row["response"] for row in read] == ["2", "80"]
    said = capsys.readouterr().out
    for text in (said, Path("new/sft.yaml").read_text()):
        assert "['history', 'ID\\n']" in text
    refused = rows({"instruction": "Add.", "input": ["51"], "output": "80"})
    assert main(["init", "odd", *flags[:3], refused, *flags[4:], "--yes"]) == 2
    assert "['instruction', 'input']" in capsys.readouterr().err


def test_every_value_has_a_comment_and_the_commands_are_printed(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows({"prompt": "1+1", "answer": "2"})
    assert main(["init", "--model", str(model), "--data", data, "--yes"]) == 0
    *lines, valid = Path("grpo.yaml").read_text().splitlines()
    assert 15 <= len(lines) <= 25
    assert all(line.endswith(":") or "  # " in line for line in lines)
    values = [line for line in lines if "  # " in line]
    cfg = load_config("grpo.yaml")
    assert cfg.server.context_length == 256  # all that this model has
    assert cfg.eval_gconfig.max_new_tokens == cfg.gconfig.max_new_tokens == 64
    assert len(keys_set(load_config("grpo.yaml"))) == len(values)
    check, launch = capsys.readouterr().out.splitlines()[-2:]
    assert launch == "MEGARL_DEVICE=cpu megarl launch --config grpo.yaml --nproc 1"
    assert check == f"{launch} --check"
    Path("test.jsonl").write_text('{"prompt": "2+1", "answer": "3"}\n')
    Path("both.yaml").write_text("\n".join([*lines, valid.removeprefix("# ")]))
    assert local.main(["--config", "both.yaml", "--nproc", "1", "--check"]) == 0
    assert load_config("both.yaml").valid_dataset.reward.type == "exact"


def test_questions_are_asked_on_a_terminal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows({"prompt": "1+1", "answer": "2"})
    asked: list[str] = []
    answers = {"algorithm": "gspo", "model": f" {model} ", "data": "", "gpus": ""}

    def answer(question: str) -> str:
        asked.append(question.partition(":")[0])
        return answers[asked[-1]]

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["init", "--reward", "none"]) == 0  # a flag is not asked for
    assert asked == ["algorithm", "model", "data", "gpus"]
    cfg: Any = load_config("gspo.yaml")
    assert (cfg.algorithm, cfg.actor.path, cfg.train_dataset.reward.type) == (
        "gspo", str(model), "none",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--data none.jsonl", "--data none.jsonl"),
        ("--model none", "actor.path=none"),
        ("--reward none.py:f", "none.py"),
        ("--reward exakt", "exakt"),
        ("--algorithm dopo", "algorithm=dopo"),
        ("--gpus two", "--gpus two"),
        ("--gpus=-1", "--gpus -1"),
        ("--algorithm gropo", "did you mean grpo?"),
        ("--model list", "list/config.json"),
        ("--model deep", "deep/config.json"),
        ("--model word", "max_position_embeddings"),
        ("--model broken", "--model broken: broken/config.json"),
        ("--algorithm dpo", "--data train.jsonl: --algorithm dpo needs the columns chosen"),
        ("--algorithm rm", "['answer', 'prompt']"),
        ("--algorithm ppo", "--algorithm ppo: init writes"),
        ("--algorithm distill", "--from quickstart_distill"),
        ("--data odd.txt", "config error: --data odd.txt: "),
        ("--data odd.jsonl", "config error: --data odd.jsonl: "),
        ("--data odd.csv", "config error: --data odd.csv: "),
        ("--gpus two --data odd.txt", "config error: --gpus two: "),
    ],
)
def test_what_does_not_exist_is_refused_and_nothing_is_written(
    model: Path, flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows({"prompt": "1+1", "answer": "2"})
    known = json.loads(Path(model, "config.json").read_text())
    odd = {"broken": "{", "list": "[]", "deep": "[" * 9000,
           "word": json.dumps(known | {"max_position_embeddings": "x"})}  # fmt: skip
    for name, text in odd.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    for name in ("odd.txt", "odd.jsonl", "odd.csv"):
        Path(name).write_bytes(b"{\xff\n")
    known = ["--model", str(model), "--data", data]
    assert main(["init", "new", *known, *flags.split(), "--yes"]) == 2
    assert re.search(re.escape(named), capsys.readouterr().err)
    assert not Path("new").exists()


def test_a_file_is_not_overwritten(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("grpo.yaml").write_text("mine")
    data = rows({"prompt": "1+1", "answer": "2"})
    assert main(["init", "--model", str(model), "--data", data, "--yes"]) == 2
    assert Path("grpo.yaml").read_text() == "mine"
    assert "grpo.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_is_copied_with_what_it_builds_on(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "mine", "--from", name]) == 0
    assert keys_set(load_config(Path("mine", "configs", f"{name}.yaml"))) == keys_set(
        load_config(ROOT / "configs" / f"{name}.yaml")
    )
    assert f"configs/{name}.yaml" in capsys.readouterr().out
    text = Path("mine", "configs", f"{name}.yaml").read_text()
    for module in re.findall(r"examples[./](\w+)", text):
        assert any(Path("mine", "examples").glob(f"{module}*"))


def test_another_shipped_configuration_goes_beside_the_first() -> None:
    assert (
        main(["init", "--from", "quickstart_sft"])
        == main(["init", "--from", "quickstart_ppo"])
        == 0
    )
    assert {p.name for p in Path("configs").rglob("*.yaml")} == {
        "quickstart_sft.yaml", "quickstart_ppo.yaml", "sums_rl.yaml",
    }  # fmt: skip


def test_a_name_that_does_not_ship_is_answered_with_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", "--from", "nothing"]) == 2
    assert set(SHIPPED) <= set(re.findall(r"\w+", capsys.readouterr().err))
    assert not any(Path().iterdir())


def test_a_changed_copy_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--from", "quickstart_grpo"]) == 0
    path = Path("configs", "base", "sums_rl.yaml")
    path.write_text("seed: 7\n")
    assert main(["init", "--from", "quickstart_grpo"]) == 2
    assert str(path) in capsys.readouterr().err and path.read_text() == "seed: 7\n"


def test_answers_are_refused_beside_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--from", "quickstart_grpo", "--gpus", "2"]) == 2
    assert "--gpus" in capsys.readouterr().err and not any(Path().iterdir())
