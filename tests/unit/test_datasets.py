"""Where rows come from: lists of files, the hub, several tasks, apart from the training data."""

from __future__ import annotations

import json

import datasets
import pytest
from datasets import Dataset

from megarl.config.check import check_config
from megarl.config.dataset import DatasetConfig, PartConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import config_yaml, load_config
from megarl.config.recipes import sources
from megarl.data.dataset import build_dataset
from megarl.data.sources import load_rows
from megarl.trainer.preflight import check_data


def asked(rows):
    return [row["messages"][-1]["content"] for row in rows]


def chat_file(path, questions):
    path.write_text("".join(json.dumps({"messages": q, "answer": q}) + "\n" for q in questions))
    return str(path)


def test_a_list_of_files_is_read_in_order(tmp_path):
    one, two = chat_file(tmp_path / "b.jsonl", "ab"), tmp_path / "a.parquet"
    Dataset.from_list([{"messages": "c", "answer": "c"}]).to_parquet(two)
    cfg = DatasetConfig(type="chat", files=[one, str(two)])
    assert asked(load_rows(cfg, seed=1)) == ["a", "b", "c"]
    cfg.size = 4
    with pytest.raises(ValueError, match=r"size=4, but .*b.jsonl, .*a.parquet.* has 3 rows"):
        load_rows(cfg, seed=1)


# the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The library `datasets`, offline, with one data set in its cache's place."""
    found = []

    def load(name, subset=None, *, split, revision=None):
        found.append((name, subset, split, revision))
        folder = tmp_path / "hub" / name
        if not folder.is_dir():
            return real(name, subset, split=split, revision=revision)
        return real(str(folder), subset, split=split)

    real = datasets.load_dataset
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    folder = tmp_path / "hub" / "openai" / "gsm8k"
    folder.mkdir(parents=True)
    rows = [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(3)]
    for split, part in (("train", rows[:2]), ("test", rows[2:])):
        Dataset.from_list(part).to_parquet(folder / f"{split}.parquet")
    return found


@pytest.mark.parametrize("path", ["openai/gsm8k", "hub://openai/gsm8k"])
def test_a_name_of_the_hub_is_read_with_its_revision_and_split(hub, path):
    options = {"subset": "default", "revision": "abc", "instruction": ""}
    for split, questions in (("train", ["0?", "1?"]), ("test", ["2?"])):
        cfg = DatasetConfig(type="gsm8k", path=path, split=split, options=options)
        assert asked(load_rows(cfg, seed=1)) == questions
        assert hub[-1] == ("openai/gsm8k", "default", split, "abc")


def test_a_hub_that_cannot_be_reached_says_what_to_do(hub):
    cfg = DatasetConfig(type="chat", path="nobody/nothing", options={"revision": "v2"})
    match = r"nobody/nothing \(split train, revision v2\) is neither a file nor .*download it"
    with pytest.raises(ValueError, match=match):
        load_rows(cfg, seed=1)


# reasoning_gym


def test_several_tasks_have_their_shares_of_every_beginning():
    tasks = {
        "leg_counting": {"weight": 3, "min_animals": 2, "max_animals": 2},
        "basic_arithmetic": {"weight": 1, "min_digits": 1, "max_digits": 1},
    }
    cfg = DatasetConfig(type="reasoning_gym", size=40, options={"task": tasks})
    rows = load_rows(cfg, seed=1)
    names = [row["task"] for row in rows]
    assert len(set(asked(rows))) == 40
    for n in range(1, 41):
        assert abs(names[:n].count("leg_counting") - 0.75 * n) < 1
    assert rows == load_rows(cfg, seed=1) != load_rows(cfg, seed=2)
    alone = DatasetConfig(type="reasoning_gym", size=30, options={"task": "leg_counting"})
    alone.options |= {"min_animals": 2, "max_animals": 2}
    assert [r for r in rows if r["task"] == "leg_counting"] == load_rows(alone, seed=1)


def test_a_tasks_own_curriculum_has_levels():
    def digits(level):
        options = {"task": "chain_sum", "curriculum_level": level}
        rows = load_rows(DatasetConfig(type="reasoning_gym", size=30, options=options), seed=1)
        return max(len(row["answer"]) for row in rows)

    assert digits(0) < digits(3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"task": {}}, "name a task at least"),
        ({"task": {"leg_counting": {"weight": 0}}}, "a weight above 0"),
        ({"task": {"leg_counting": 3}}, "a weight above 0"),
        ({"task": {"leg_counting": None}, "max_animals": 3}, "below each task's name"),
        ({"task": {"no_such": None}}, "use one of"),
        ({"task": "chain_sum", "curriculum_level": 99}, "has levels 0 to"),
    ],
)
def test_mistakes_in_tasks_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        load_rows(DatasetConfig(type="reasoning_gym", size=5, options=options), seed=1)


# apart from the training data


@pytest.mark.parametrize("purpose", ["rl", "sft"])
def test_prompts_of_the_training_data_leave_the_validation_data(
    tmp_path, tokenizer, warnings, purpose
):
    def data(name, questions, **how):
        rows = [{"messages": q, "response": "x", "answer": "x"} for q in questions]
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cfg = DatasetConfig(type="chat", path=str(path), options={"system": name})
        return build_dataset(cfg, tokenizer, purpose=purpose, seed=1, **how)

    trained = data("train.jsonl", ["1+1", "2+2", "3+3"])
    valid = data("valid.jsonl", ["4+4", " 2+2\n", "5+5"], apart_from=trained)
    assert len(valid) == 2
    assert "1 of 3 prompts that the training data has, too (rows 1)" in warnings[0]
    kept = data("valid.jsonl", ["4+4", "2+2"], apart_from=trained, overlap="keep")
    assert len(kept) == 2 and len(warnings) == 1
    with pytest.raises(ValueError, match=r"1 of 2 prompts .*set evaluator.overlap=drop"):
        data("valid.jsonl", ["4+4", "2+2"], apart_from=trained, overlap="refuse")
    with pytest.raises(ValueError, match=r"2 of 2 prompts .*set evaluator.overlap=keep"):
        data("valid.jsonl", ["1+1", "2+2"], apart_from=trained)


# the configuration


def test_mixtures_and_named_validation_sets_are_configured_by_sections(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        """
recipe: grpo
train_dataset:
  type: mix
  parts:
    sums: {weight: 3, size: 50, options: {level: 1}}
    mine: {type: chat, files: [a.jsonl], reward: exact}
valid_datasets:
  easy: {size: 5}
"""
    )
    overrides = ["valid_datasets.hard.options.level=3", "valid_datasets.easy.reward=arithmetic"]
    cfg = load_config(path, [*overrides, "+train_dataset.parts.sums.options.ops='-+'"])
    assert list(sources(cfg)) == [
        "train_dataset.parts.sums", "train_dataset.parts.mine",
        "valid_datasets.easy", "valid_datasets.hard",
    ]  # fmt: skip
    sums, mine = cfg.train_dataset.parts.values()
    assert isinstance(sums, PartConfig) and (sums.weight, sums.options["ops"]) == (3.0, "-+")
    assert mine.files == ["a.jsonl"] and mine.reward.type == "exact"
    assert cfg.valid_datasets["easy"].reward.type == "arithmetic"
    assert cfg.valid_datasets["hard"].options == {"level": 3}
    again = tmp_path / "again.yaml"
    again.write_text(config_yaml(cfg))
    assert load_config(again) == cfg


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["train_dataset.parts.a.wieght=2"], r"train_dataset.parts.a.wieght: unknown key"),
        (["valid_datasets.a.size=0"], r"valid_datasets.a.size=0: must be > 0"),
        (["valid_datasets.a.type=nope"], r"valid_datasets.a.type=nope: not one of"),
        (["valid_datasets.a=3"], "valid_datasets.a=3: a section, not a value"),
        (["valid_datasets.a/b.size=3"], "valid_datasets.a/b: name data sets in letters"),
        (["train_dataset.type=mix"], "type=mix draws from its parts"),
        (["train_dataset.parts.a.size=5"], "type=mix draws from its parts"),
        (
            ["train_dataset.type=mix", "train_dataset.parts.a.size=5", "train_dataset.size=3"],
            "train_dataset.size: with type=mix set it in each of train_dataset.parts",
        ),
        (
            ["train_dataset.type=mix", "train_dataset.parts.a.type=chat"],
            "train_dataset.parts.a.path is empty",
        ),
        (
            ["valid_datasets.v.type=mix", "valid_datasets.v.parts.a.size=3"],
            "name them in valid_datasets",
        ),
        (["train_dataset.files=[no.jsonl]", "train_dataset.type=chat"], "no.jsonl: no such file"),
        (
            ["train_dataset.curriculum.explore=0.5", "train_dataset.num_workers=1"],
            "needs train_dataset.num_workers=0 ",
        ),
        (
            ["train_dataset.curriculum.explore=0.5", "train_dataset.sampler=a.b:c"],
            "leave train_dataset.curriculum out",
        ),
        (["valid_dataset.curriculum.explore=0.5"], "only training draws rows"),
    ],
)
def test_mistakes_are_named(overrides, match):
    with pytest.raises(ConfigError, match=match):
        check_config(load_config(None, overrides))


def test_a_curriculum_is_for_rewards():
    cfg = load_config(None, ["recipe=sft", "train_dataset.curriculum.explore=0.5"])
    with pytest.raises(ConfigError, match=r"train_dataset\.curriculum: goes by rewards"):
        check_config(cfg)
    assert cfg.train_dataset.curriculum == {"explore": 0.5}


def test_the_data_of_a_configuration_is_checked_part_by_part(tmp_path):
    mine = chat_file(tmp_path / "mine.jsonl", "ab")
    cfg = load_config(
        None,
        [
            "train_dataset.type=mix", "train_dataset.parts.sums.size=40",
            "train_dataset.parts.mine.type=chat", f"train_dataset.parts.mine.files=[{mine}]",
            "valid_datasets.seen.type=chat", f"valid_datasets.seen.path={mine}",
        ],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"valid_datasets.seen: .* 2 of 2 prompts") as e:
        check_data(cfg)
    assert len(e.value.problems) == 1
    cfg.evaluator.overlap = "keep"
    keys = check_data(cfg)
    assert "dataset" in keys["train_dataset.parts.mine"].columns
    assert "answer" in keys["train_dataset.parts.sums"].columns
    cfg.train_dataset.batch_size = 43
    with pytest.raises(ConfigError, match=r"train_dataset: .* 42 rows do not fill"):
        check_data(cfg)
