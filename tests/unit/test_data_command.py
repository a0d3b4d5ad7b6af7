"""`megarl data`: the rows that training builds, as the model reads them."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.tiny_model import make_model
from megarl.cli import main
from megarl.config.loader import load_config
from megarl.data.dataset import build_dataset
from megarl.launcher.local import main as launch

TURNS = [("user", "1+1"), ("assistant", "2"), ("user", "20+2"), ("assistant", "22")]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    make_model(place / "model", hidden=64, layers=1)
    rows = {
        "sft": [
            {"messages": messages(*TURNS)},
            {"messages": messages(("user", "1" * 9 + "+" + "2" * 9), ("assistant", "3" * 9))},
            {"messages": messages(("user", "3+3"), ("assistant", "6"))},
        ],
        "pairs": [{"prompt": "1+1", "chosen": "2", "rejected": "33"}],
        "rl": [{"messages": "4+4", "answer": "8"}, {"messages": "5+5", "answer": "10"}],
        "bad": [{"messages": "4+4", "answer": "8"}, {"messages": None}],
    }
    for name, of in rows.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    return place


def recipe(place: Path, name: str, **train: Any) -> list[str]:
    """A command's words: the recipe `name` with rows of a file."""
    key = "actor" if name == "grpo" else "model"
    kind, rows = {"grpo": ("chat", "rl"), "sft": ("chat", "sft")}.get(name, ("preference", "pairs"))
    keys = {"type": kind, "path": place / f"{rows}.jsonl", "batch_size": 1} | train
    (place / "x.yaml").write_text(f"recipe: {name}\nfileroot: {place}\n")
    words = [f"train_dataset.{k}={v}" for k, v in keys.items()]
    return [str(place / "x.yaml"), f"{key}.path={place / 'model'}", *words]


def test_what_is_trained_stands_in_marks_and_what_is_too_long_is_counted(
    place: Path, capsys: pytest.CaptureFixture[str], warnings: list[str]
) -> None:
    words = recipe(place, "sft", max_length=20)
    assert main(["data", *words, "--show", "2"]) == 0
    text = capsys.readouterr().out
    first, second = re.split(r"^--- .*\n", text, flags=re.MULTILINE)[1:]
    assert re.findall("«(.*?)»", first) == ["2<|end|>", "22<|end|>"]
    assert re.findall("«(.*?)»", second) == ["6<|end|>"]
    cfg = load_config(words[0], words[1:])
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    rows = list(build_dataset(cfg.train_dataset, tokenizer, purpose="sft", seed=1))
    assert re.sub("[«»\n]", "", first) == tokenizer.decode(rows[0]["input_ids"])
    lengths = [len(row["input_ids"]) for row in rows]
    trained = [sum(row["loss_mask"]) for row in rows]
    assert re.findall("row (\\d): input of (\\d+) tokens, (\\d+) of them trained", text) == [
        (str(row["row_id"]), str(length), str(n))
        for row, length, n in zip(rows, lengths, trained, strict=True)
    ]
    low, high, middle = min(lengths), max(lengths), statistics.median(lengths)
    assert text.splitlines()[-1:] == [
        f"=== train_dataset: 2 rows of {low} to {high} tokens, median {middle:g}, "
        f"{sum(trained) / sum(lengths):.1%} of them trained"
    ]
    assert any("dropped 1 of 3 rows longer than max_length=20 tokens" in said for said in warnings)


def test_what_a_terminal_would_act_on_is_escaped(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, written = "\x1b]0;x\x07\r\x00", "\x1b[2J\x9b2J"
    row = {"messages": messages(("user", f"a{asked}\tb\nc"), ("assistant", written))}
    (place / "odd.jsonl").write_text(json.dumps(row))
    assert main(["data", *recipe(place, "sft", path=place / "odd.jsonl")]) == 0
    text = capsys.readouterr().out
    assert not set(text) & {chr(i) for i in (*range(32), *range(127, 160)) if chr(i) not in "\t\n"}
    assert "a\\x1b]0;x\\x07\\r\\x00 " in text and "b\nc" in text and "«\\x1b[2J\\x9b2J" in text


def test_a_terminal_has_colours_for_marks(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["data", *recipe(place, "sft"), "--show", "1"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"\x1b\[[\d;]+m(\d+<\|end\|>)\x1b\[0m", text) == ["2<|end|>", "22<|end|>"]
    assert "«" not in text


def test_prompts_pairs_and_parts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = recipe(place, "grpo", reward="exact")
    assert main(["data", *words, "valid_dataset.type=arithmetic", "valid_dataset.size=4"]) == 0
    text = capsys.readouterr().out
    assert "<|user|>5+5<|assistant|>\n" in text and "«" not in text
    assert re.findall("=== ([a-z_]+): (\\d+) rows.*, 0.0% of", text) == [
        ("train_dataset", "2"),
        ("valid_dataset", "4"),
    ]
    for name in ("dpo", "rm"):
        assert main(["data", *recipe(place, name)]) == 0
        text = capsys.readouterr().out
        assert re.findall("^--- .*: (chosen|rejected) of.*\n.*«(.*)»", text, re.MULTILINE) == [
            ("chosen", "2<|end|>"),
            ("rejected", "33<|end|>"),
        ]
    mix = recipe(place, "sft", type="mix", path="")
    parts = [f"train_dataset.parts.a.{k}" for k in ("type=chat", f"path={place / 'sft.jsonl'}")]
    assert main(["data", *mix, *parts, "train_dataset.parts.b.size=3"]) == 0
    summaries = re.findall("=== (\\S+): (\\d) rows", capsys.readouterr().out)
    assert summaries == [("train_dataset.parts.a", "3"), ("train_dataset.parts.b", "3")]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["train_dataset.path=nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["train_dataset.path=BAD"], "bad.jsonl line 2"),
        (["train_dataset.options.system=3"], "options.system=3: not text"),
    ],
)
def test_bad_data_is_the_launchers_line(
    keys: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [key.replace("BAD", str(place / "bad.jsonl")) for key in keys]
    config, *given = recipe(place, "grpo", reward="exact")
    assert main(["data", config, *given, *keys]) == 2
    shown = capsys.readouterr()
    sound = [
        "actor.optimizer.lr=1e-3",
        "server.context_length=64",
        "gconfig.max_new_tokens=8",
        "gconfig.n_samples=2",
        "eval_gconfig.max_new_tokens=8",
    ]
    assert launch(["--config", config, "--check", *sound, *given, *keys]) == 2
    assert shown.err == capsys.readouterr().err and not shown.out
    assert shown.err.startswith("config error: train_dataset") and words in shown.err


def test_data_of_which_no_row_is_left_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *recipe(place, "grpo", reward="exact", max_length=2)]) == 2
    assert "config error: train_dataset: dataset chat" in (error := capsys.readouterr().err)
    assert "all 2 rows are longer than max_length=2" in error
