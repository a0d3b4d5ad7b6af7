"""The recipes dpo and rm before torch: what they read, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.algos.preferences import DPO, SimPO, preference_loss
from megarl.config.algo import PreferenceConfig
from megarl.config.check import check_config
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipe_engines import engines, model_path, ref_is_below_adapters
from megarl.config.recipes import BaseConfig, data_purpose
from megarl.models.hf_config import read_hf_config
from megarl.trainer.preflight import check_data
from megarl.trainer.user_code import check_code
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("lm") / "lm", "llama"))


def recipe(model: str, name: str, *overrides: str) -> BaseConfig:
    words = [f"recipe={name}", f"model.path={model}", "model.optimizer.lr=1e-4"]
    return load_config(None, [*words, "train_dataset.size=20", *overrides])


def problems(model: str, name: str, *overrides: str) -> list[str]:
    try:
        check_config(recipe(model, name, *overrides), 1)
    except ConfigError as e:
        return list(e.problems)
    return []


def test_a_reference_is_built_where_the_loss_measures_against_one(model: str) -> None:
    for loss, found in (("dpo", ["model", "ref"]), ("ipo", ["model", "ref"]), ("simpo", ["model"])):
        cfg = recipe(model, "dpo", f"preference.loss={loss}")
        assert list(engines(cfg)) == found
        check_config(cfg, 1)
    cfg = recipe(model, "dpo")
    assert model_path(cfg, "ref") == model and not ref_is_below_adapters(cfg)
    lora = recipe(model, "dpo", "model.lora.r=4")
    assert ref_is_below_adapters(lora)
    assert list(engines(recipe(model, "rm"))) == ["model"]


def test_what_rows_are_read_for(model: str) -> None:
    assert data_purpose(recipe(model, "dpo")) == data_purpose(recipe(model, "rm")) == "pairs"
    assert data_purpose(recipe(model, "sft")) == "sft"


def test_the_section_makes_the_loss_of_its_name() -> None:
    def made(loss: str = "dpo", **options: object) -> object:
        return preference_loss(PreferenceConfig(loss=loss, options=options)).fn

    assert made() == DPO() == made(loss="dpo", beta=0.1)
    assert made(loss="ipo", length_normalized=True) == DPO(ipo=True, length_normalized=True)
    assert made(sft_coef=1.0) == DPO(sft_coef=1.0)
    assert made(loss="simpo") == SimPO(beta=2.0, gamma=1.0)
    assert made(loss="simpo", gamma=0.0).gamma == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("dpo", ["preference.loss=ddpo"], "preference.loss=ddpo: not one of dpo, ipo"),
        ("dpo", ["preference.loss=kto"], "preference.loss=kto: not one of dpo, ipo, simpo"),
        (
            "dpo",
            ["preference.loss=simpo", "ref.path=/elsewhere"],
            "ref.path=/elsewhere with preference.loss=simpo: measures against no",
        ),
        ("dpo", ["ref.optimizer.lr=1"], "ref.optimizer: a frozen model"),
        (
            "dpo",
            ["model.lora.r=4", "ref.parallel.tp=2"],
            "ref.parallel: with model.lora on the same model the reference is the model's engine",
        ),
        ("rm", ["train_dataset.type=chat", "train_dataset.path=x"], "has no pairs of answers; ta"),
        ("rm", ["train_dataset.curriculum.low=0.2"], "train_dataset.curriculum: goes by rewards"),
        ("rm", ["model.head=lm"], "model.head=lm: not one of value"),
        ("sft", ["model.head=value"], "only a critic or a reward model has one"),
    ],
)
def test_bad_settings_are_named(model: str, name: str, overrides: list[str], words: str) -> None:
    found = problems(model, name, *overrides)
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["beta=0"], "preference.options.beta=0: must be greater than 0"),
        (["beta=.inf"], "preference.options.beta=inf: must be a finite number"),
        (["label_smoothing=0.1"], "preference.options.label_smoothing=0.1: dpo has no such option"),
        (["loss=simpo", "gamma=-1"], "preference.options.gamma=-1: must be greater than or equal"),
        (["loss=simpo", "gamma=2", "beta=0.2"], ""),
        (["loss=ipo", "gamma=1"], "it takes beta, length_normalized, sft_coef"),
    ],
)
def test_a_losss_options_are_those_of_its_function(
    model: str, overrides: list[str], words: str
) -> None:
    named = [f"preference.{'' if 'loss=' in o else 'options.'}{o}" for o in overrides]
    try:
        check_code(recipe(model, "dpo", *named), {})
    except ConfigError as e:
        assert words and words in str(e)
    else:
        assert not words


def test_a_number_beside_the_loss_is_pointed_to_the_options(model: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean preference\.options.sft_coef"):
        recipe(model, "dpo", "preference.sft_coef=0.1")


def test_bad_pairs_are_named_before_anything_starts(model: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "gap": 1}) + "\n")
    data = ["train_dataset.type=preference", f"train_dataset.path={file}", "train_dataset.size=1"]
    data += ["train_dataset.batch_size=1"]
    check_data(recipe(model, "dpo", *data))
    check_data(recipe(model, "rm", *data))
    with pytest.raises(ConfigError, match=r"train_dataset: row 0: margin is missing; it has"):
        check_data(recipe(model, "rm", *data, "margin=true"))
    named = "train_dataset.options.columns.margin=gap"
    check_data(recipe(model, "rm", *data, "margin=true", named))
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(ConfigError, match=r"lacks \['chosen', 'rejected'\]|lacks the columns"):
        check_data(recipe(model, "dpo", *data))


def test_a_reward_model_is_of_huggingfaces_kind(model: str) -> None:
    """Without a bias, which no pair would teach it."""
    cfg = engines(recipe(model, "rm"))["model"]
    found = read_hf_config(model, head=cfg.head, new_bias=cfg.value_head_bias)
    assert found.raw["architectures"] == ["LlamaForSequenceClassification"]
    assert found.new_head and not found.score_bias
    critic = read_hf_config(model, head="value")
    assert critic.raw["architectures"] == ["LlamaForTokenClassification"] and critic.score_bias
