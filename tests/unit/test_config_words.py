"""A word stays as it was typed until the type of its key is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, run_dir, save_config

TEXT, WHOLE, REAL, TRUTH, FREE = KEYS = (
    "trial_name",
    "seed",
    "gconfig.temperature",
    "gconfig.greedy",
    "train_dataset.options.x",
)
NOT = object()  # the key does not take the word

# word: what a text, an integer, a number, a boolean, and an option of no known type make of it
WORDS: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "7": ("7", 7, 7.0, NOT, 7),
    "1": ("1", 1, 1.0, True, 1),
    "0": ("0", 0, 0.0, False, 0),
    "010": ("010", 10, 10.0, NOT, "010"),
    "00": ("00", 0, 0.0, NOT, "00"),
    "12:30": ("12:30", NOT, NOT, NOT, "12:30"),
    "1:2:3.5": ("1:2:3.5", NOT, NOT, NOT, "1:2:3.5"),
    "1e3": ("1e3", NOT, 1000.0, NOT, 1000.0),
    "1e-5": ("1e-5", NOT, 1e-5, NOT, 1e-5),
    "1.0": ("1.0", NOT, 1.0, NOT, 1.0),
    "1.": ("1.", NOT, 1.0, NOT, 1.0),
    ".5": (".5", NOT, 0.5, NOT, 0.5),
    "1_000": ("1_000", 1000, 1000.0, NOT, 1000),
    "+4": ("+4", 4, 4.0, NOT, 4),
    "0x10": ("0x10", 16, 16.0, NOT, 16),
    "0b11": ("0b11", 3, 3.0, NOT, 3),
    "0x_": ("0x_", NOT, NOT, NOT, "0x_"),
    "0o7": ("0o7", NOT, NOT, NOT, "0o7"),
    "no": ("no", NOT, NOT, False, False),
    "Yes": ("Yes", NOT, NOT, True, True),
    "on": ("on", NOT, NOT, True, True),
    "true": ("true", NOT, NOT, True, True),
    "null": (NOT, NOT, NOT, NOT, None),
    "~": (NOT, NOT, NOT, NOT, None),
    "'null'": ("null", NOT, NOT, NOT, "null"),
    ".inf": (".inf", NOT, float("inf"), NOT, float("inf")),
    ".Inf": (".Inf", NOT, float("inf"), NOT, float("inf")),
    "-.INF": ("-.INF", NOT, float("-inf"), NOT, float("-inf")),
    "2026-11-24": ("2026-11-24", NOT, NOT, NOT, "2026-11-24"),
    "a=b": ("a=b", NOT, NOT, NOT, "a=b"),
    "run#3": ("run#3", NOT, NOT, NOT, "run#3"),
}


def value_of(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        cfg = cfg[part] if isinstance(cfg, dict) else getattr(cfg, part)
    return cfg


def in_yaml(key: str, word: str) -> str:
    *sections, last = key.split(".")
    return (
        "{" + "".join(f"{s}: {{" for s in sections) + f"{last}: {word}" + "}" * len(key.split("."))
    )


@pytest.mark.parametrize("how", ["override", "file"])
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_what_its_key_takes(word: str, how: str, tmp_path: Path) -> None:
    for key, expected in zip(KEYS, WORDS[word], strict=True):
        file = tmp_path / "x.yaml"
        file.write_text(in_yaml(key, word) if how == "file" else "{}")
        overrides = [f"{key}={word}"] if how == "override" else []
        if expected is NOT:
            with pytest.raises(ConfigError) as caught:
                load_config(file, overrides)
            (problem,) = caught.value.problems
            assert problem.startswith(f"{key}=")
            continue
        cfg = load_config(file, overrides)
        assert value_of(cfg, key) == expected and type(value_of(cfg, key)) is type(expected)
        save_config(cfg, file)
        assert load_config(file) == cfg


@pytest.mark.parametrize("word", [".nan", ".NaN", ".NAN"])
def test_no_number_has_three_spellings(word: str) -> None:
    cfg = load_config(None, [f"{FREE}={word}"])
    assert math.isnan(value_of(cfg, FREE))


@pytest.mark.parametrize("how", ["override", "file"])
@pytest.mark.parametrize("word", ["!!int x", "!!float ''", "!!bool x"])
def test_a_tag_that_its_value_does_not_fit_is_one_line(word: str, how: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(in_yaml(FREE, word) if how == "file" else "{}")
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"{FREE}={word}"] if how == "override" else [])
    (problem,) = caught.value.problems
    assert "not valid YAML" in problem


def test_names_that_yaml_takes_for_one_number_are_two_runs() -> None:
    names = ["8", "010", "0o10", "1000", "1_000", "1e3", "1000.0", "run #3", "run #4", "#4"]
    runs = [run_dir(load_config(None, [f"trial_name={name}"])) for name in names]
    assert [run.name for run in runs] == names


def test_words_in_lists_and_sections() -> None:
    cfg = load_config(
        None,
        [
            "cluster.forward_env=[010, no, 12:30]",
            "gconfig.stop_token_ids=[1_0, 0x10]",
            "train_dataset.options={a: [010, 1e3], 010: {5: no}}",
            "cluster.ray_resources={a: 1e-3}",
        ],
    )
    assert cfg.cluster.forward_env == ["010", "no", "12:30"]
    assert cfg.gconfig.stop_token_ids == [10, 16]
    assert cfg.train_dataset.options == {"a": ["010", 1000.0], "010": {5: False}}
    assert cfg.cluster.ray_resources == {"a": 1e-3}


def test_a_boolean_stands_for_the_word_of_a_choice() -> None:
    assert load_config(None, ["weight_sync.verify=no"]).weight_sync.verify == "off"
    assert load_config(None, ["actor.recompute_logprob=false"]).actor.recompute_logprob == "false"


def test_texts_that_look_like_other_values_are_saved_as_texts(tmp_path: Path) -> None:
    texts = ["1e3", "010", "no", "12:30", "null", "~", "", "# c", "a: b", "1_000", ".5", "=", "<<"]
    texts += [" lead", "- item", "0b11", "2026-11-24", "line\nline: x", "x" * 90 + " y" * 60]
    cfg = load_config(None)
    cfg.train_dataset.options = {"texts": texts, **{f"k{i}": t for i, t in enumerate(texts)}}
    cfg.train_dataset.options |= {
        "number": 1e-5,
        "many": [1, True, None, float("inf")],
        "5": {5: 1},
    }
    save_config(cfg, tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == cfg
