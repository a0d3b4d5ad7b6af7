"""Preference pairs: the formats they come in, and the tokens they become."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset

from megarl.config.dataset import DatasetConfig
from megarl.data.dataset import build_dataset, collate_pairs
from megarl.data.formats import check_margins
from megarl.data.sources import load_rows
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


FORMATS = {
    "texts": {"prompt": "1+1", "chosen": "2", "rejected": "3"},
    "messages": {
        "prompt": [user("1+1")],
        "chosen": [assistant("2")],
        "rejected": [assistant("3")],
    },
    "prompt in the answers": {
        "prompt": "1+1",
        "chosen": [user("1+1"), assistant("2")],
        "rejected": [user("1+1"), assistant("3")],
    },
    "whole conversations": {
        "chosen": [user("1+1"), assistant("2")],
        "rejected": [user("1+1"), assistant("3")],
    },
    "one text": {
        "chosen": "\n\nHuman: 1+1\n\nAssistant: 2",
        "rejected": "\n\nHuman: 1+1\n\nAssistant: 3",
    },
}


def a_file(tmp_path, rows, kind="jsonl"):
    path = tmp_path / f"pairs.{kind}"
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_the_same_pair(tmp_path, name, kind):
    path = a_file(tmp_path, [FORMATS[name] | {"margin": 0.5}], kind)
    (row,) = load_rows(DatasetConfig(type="preference", path=path), seed=1, purpose="pairs")
    assert row == {
        "messages": [user("1+1")],
        "chosen": [assistant("2")],
        "rejected": [assistant("3")],
        "margin": 0.5,
    }


def test_pairs_become_sequences_beside_each_other(tmp_path, tokenizer):
    talk = [user("1+1"), assistant("2"), user("2+2")]
    rows = [
        FORMATS["texts"],
        {"prompt": talk, "chosen": "4", "rejected": "5"},
    ]
    cfg = DatasetConfig(type="preference", path=a_file(tmp_path, rows))
    data = build_dataset(cfg, tokenizer, purpose="pairs", seed=1)

    def written(row, side):
        kept = [t for t, m in zip(row[f"{side}_ids"], row[f"{side}_mask"], strict=True) if m]
        return tokenizer.decode(kept)

    eos = tokenizer.eos_token
    assert (written(data[0], "chosen"), written(data[0], "rejected")) == (f"2{eos}", f"3{eos}")
    # turns before the answer are told, not compared
    assert (written(data[1], "chosen"), written(data[1], "rejected")) == (
        f"4{eos}",
        f"5{eos}",
    )
    batch = collate_pairs([data[0], data[1]])
    assert batch["input_ids"].shape[0] == 4
    assert batch["group_ids"].tolist() == batch["unit_ids"].tolist() == [0, 0, 1, 1]
    assert batch["chosen"].tolist() == [True, False, True, False]
    for i, ids in enumerate(
        (data[0]["chosen_ids"], data[0]["rejected_ids"], data[1]["chosen_ids"])
    ):
        assert batch["input_ids"][i, : len(ids)].tolist() == ids
        assert int(batch["attention_mask"][i].sum()) == len(ids)
    assert torch.equal(batch["loss_mask"] & batch["attention_mask"], batch["loss_mask"])


def test_the_chosen_answers_are_for_sft_too(tmp_path, tokenizer):
    cfg = DatasetConfig(type="preference", path=a_file(tmp_path, [FORMATS["texts"]]))
    (row,) = build_dataset(cfg, tokenizer, purpose="sft", seed=1)
    (pair,) = build_dataset(cfg, tokenizer, purpose="pairs", seed=1)
    assert row["input_ids"] == pair["chosen_ids"] and row["loss_mask"] == pair["chosen_mask"]


def test_a_pair_is_as_long_as_its_longer_side(tmp_path, tokenizer):
    rows = [FORMATS["texts"], {"prompt": "1+1", "chosen": "2", "rejected": "3" * 40}]
    cfg = DatasetConfig(type="preference", path=a_file(tmp_path, rows), max_length=30)
    assert len(build_dataset(cfg, tokenizer, purpose="pairs", seed=1)) == 1


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "chosen": "b"}, r"line 1 lacks the columns \['rejected'\]"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": "b", "rejected": "c"}, "name the prompt in options.columns.prompt"),
        ({"prompt": "a", "chosen": [user("b")], "rejected": "c"}, "does not end with an answer"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]},
            "begin with no common message",
        ),
    ],
)
def test_what_is_no_pair_is_named(tmp_path, row, match):
    cfg = DatasetConfig(type="preference", path=a_file(tmp_path, [row]))
    with pytest.raises(ValueError, match=match):
        load_rows(cfg, seed=1, purpose="pairs")


def test_pairs_are_asked_of_pairs(tmp_path):
    cfg = DatasetConfig(type="chat", path=a_file(tmp_path, [{"messages": "1+1"}]))
    with pytest.raises(ValueError, match=r"lacks \['chosen', 'rejected'\]: pairs are of type pref"):
        load_rows(cfg, seed=1, purpose="pairs")


def test_sums_come_with_a_careless_answer():
    rows = load_rows(DatasetConfig(size=40), seed=1, purpose="pairs")
    for row in rows:
        a, b = map(int, row["messages"][0]["content"].split("+"))
        ((right, wrong),) = zip(
            *([m["content"] for m in row[k]] for k in ("chosen", "rejected")), strict=True
        )
        careless = 10 * ((a // 10 + b // 10) % 10) + (a % 10 + b % 10) % 10
        assert int(right) == a + b != int(wrong)
        assert careless in (a + b, int(wrong))


def test_margins_go_with_their_pairs(tmp_path, tokenizer):
    rows = [FORMATS["texts"] | {"margin": m} for m in (0.5, 2)]
    cfg = DatasetConfig(type="preference", path=a_file(tmp_path, rows))
    data = build_dataset(cfg, tokenizer, purpose="pairs", seed=1)
    assert collate_pairs(list(data), margin=True)["margin"].tolist() == [0.5, 0.5, 2.0, 2.0]
    assert "margin" not in collate_pairs(list(data))
    check_margins(rows)
    for wrong, match in (
        ({}, "row 0: margin is missing; it has"),
        ({"margin": "1"}, "row 0: margin is '1'"),
        ({"margin": float("nan")}, "margin is nan, not a finite number"),
    ):
        with pytest.raises(ValueError, match=match):
            check_margins([FORMATS["texts"] | wrong])
