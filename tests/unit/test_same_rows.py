"""A row is the same, to the token, from every format that holds it; nulls and JSON text in it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset

from examples.tiny_model import make_tokenizer
from megarl.api.chat_template import decoded
from megarl.config.dataset import DatasetConfig
from megarl.data.dataset import build_dataset
from megarl.data.sources import load_rows

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tool(name: str, **parameter: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameter}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def talk(question: str, name: str, arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "name": name},
        {"role": "assistant", "content": "so"},
    ]


ROWS = [
    {
        "messages": talk("a", "city", {"city": ["Rome"], "near": {"x": 1}}),
        "tools": [tool("city", city={"type": "array", "items": {"type": "string"}})],
    },
    {
        "messages": talk("b", "search", {"near": {"y": 2}, "q": "r"}),
        "tools": [tool("search", q={"type": "string"}), tool("none", n={"enum": ["a"]})],
    },
]


def as_text(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{name: json.dumps(value) for name, value in row.items()} for row in rows]


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def csv_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.csv"
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(as_text(rows))
    return str(file)


def held(cfg: DatasetConfig, *, seed: int) -> Dataset:
    """A data set of the library `datasets`, as a source of the user's returns it."""
    return Dataset.from_list(ROWS)


def read(path: str, purpose: str, type: str = "chat") -> list[dict[str, Any]]:
    tokenizer = make_tokenizer(1)
    tokenizer.chat_template = TEMPLATE
    cfg = DatasetConfig(type=type, path=path)
    data = build_dataset(cfg, tokenizer, purpose=purpose, seed=1)
    names = ("input_ids", "loss_mask") if purpose == "sft" else ("prompt", "messages", "tools")
    return [{name: row[name] for name in names} for row in data]


@pytest.mark.parametrize("purpose", ["sft", "prompts"])
def test_a_row_is_the_same_from_every_format(tmp_path: Path, purpose: str) -> None:
    want = read(jsonl(tmp_path, ROWS), purpose)
    assert read(parquet(tmp_path, ROWS), purpose) == want
    assert read(csv_file(tmp_path, ROWS), purpose) == want
    assert read("", purpose, f"{__name__}:held") == want
    (tmp_path / "text").mkdir()
    assert read(jsonl(tmp_path / "text", as_text(ROWS)), purpose) == want
    if purpose == "prompts":
        assert "null" not in want[1]["prompt"] and '{"q": {"type"' in want[1]["prompt"]


def test_a_null_that_a_person_wrote_stays(tmp_path: Path) -> None:
    rows = [
        {"messages": talk("a", "f", {"city": None, "k": [None]})} | {"tools": [tool("f", a={})]}
    ]
    calls = [
        read(path, "prompts")[0]["messages"][1]["tool_calls"]
        for path in (
            jsonl(tmp_path, rows),
            csv_file(tmp_path, rows),
            parquet(tmp_path, as_text(rows)),
        )
    ]
    assert [c[0]["function"]["arguments"] for c in calls] == [{"city": None, "k": [None]}] * 3


@pytest.mark.parametrize(
    ("arguments", "want"),
    [('{"city": "Rome"}', {"city": "Rome"}), ("", {}), (" ", {}), (None, {}), ("no", "no")],
)
def test_arguments_are_decoded(tmp_path: Path, arguments: Any, want: Any) -> None:
    path = jsonl(tmp_path, [{"messages": talk("a", "f", arguments), "tools": None}])
    (row,) = read(path, "prompts")
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == want
    assert row["tools"] == []


def test_text_that_is_no_json_is_text() -> None:
    assert decoded("[" * 100_000) == "[" * 100_000
    assert decoded("1+1") == "1+1" and decoded(" ") is None and decoded("[1]") == [1]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"messages": "[{'role': 'user', 'content': 'x'}]"}, "messages"),
        ({"messages": "x", "tools": "a hammer"}, "tools"),
        ({"messages": "x", "tools": [1]}, "tools"),
        (
            {"messages": talk("a", "f", {})[:1] + [{"role": "assistant", "tool_calls": "f()"}]},
            "f()",
        ),
        ({"messages": "a \ud83d"}, "ud83d"),
        ({"messages": talk("a", "f", {"t": "\udc00"})}, "udc00"),
        ({"messages": "a", "tools": [tool("\udc00")]}, "udc00"),
        ({"messages": "a", "response": "\udc00"}, "udc00"),
        ({"messages": talk("a", "f", {}), "response": "another"}, "response"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(tmp_path: Path, row: Any, named: str) -> None:
    path = jsonl(tmp_path, [{"messages": "good", "response": "x"}, row])
    with pytest.raises(ValueError) as caught:
        load_rows(DatasetConfig(type="chat", path=path), seed=1, purpose="sft")
    assert named in str(caught.value) and (
        "line 2" in str(caught.value) or "row 1" in str(caught.value)
    )


def test_a_csv_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for i, data in enumerate((b"messages,answer\n1+1\n", b'messages\n"1', b"messages\n\xff\n")):
        file = tmp_path / f"{i}.csv"
        file.write_bytes(data)
        with pytest.raises(ValueError, match=file.name):
            load_rows(DatasetConfig(type="chat", path=str(file)), seed=1)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        TEMPLATE.replace(
            "{{ m.content }}",
            "{% generation %}{{ m.content }}{% if m.role == 'assistant' %}<|end|>"
            "{% endif %}{% endgeneration %}",
        ).replace("{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}", "{% endfor %}"),
    ],
)
def test_an_answer_with_its_own_end_gets_no_second(tmp_path: Path, template: str) -> None:
    tokenizer = make_tokenizer(1)
    tokenizer.chat_template = template
    row = {"prompt": "1+1", "chosen": "2<|end|>", "rejected": "3"}
    asked = {"messages": "1+1", "response": "2<|end|>"}
    pairs = DatasetConfig(type="preference", path=jsonl(tmp_path, [row]))
    (pair,) = build_dataset(pairs, tokenizer, purpose="pairs", seed=1)
    (sft,) = build_dataset(
        DatasetConfig(type="chat", path=jsonl(tmp_path, [asked])), tokenizer, purpose="sft", seed=1
    )
    for ids, mask in (
        (pair["chosen_ids"], pair["chosen_mask"]),
        (sft["input_ids"], sft["loss_mask"]),
    ):
        trained = [t for t, m in zip(ids, mask, strict=True) if m]
        assert tokenizer.decode(trained).removeprefix("1+1") == "2<|end|>"
