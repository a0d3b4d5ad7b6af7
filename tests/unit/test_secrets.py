"""Secrets in a configuration: from the environment, or by their names; never in a file in clear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import evaluate
from megarl.config.container import View
from megarl.config.earlier_run import config_changes
from megarl.config.errors import ConfigError
from megarl.config.loader import config_yaml, load_config, save_config
from megarl.config.recipes import RECIPES
from megarl.config.run import StatsLoggerConfig
from megarl.config.schema import key_table
from megarl.config.secrets import (
    is_secret,
    masked,
    masked_override,
    masked_yaml,
    public_tree,
    written_tree,
)
from megarl.observability.stats_logger import StatsLogger
from megarl.run import main
from megarl.trainer import evaluation
from megarl.trainer.preflight import check_contents, check_recipe
from megarl.trainer.recover import data_of, same_data
from megarl.trainer.run_dir import claim, newest_checkpoint
from tests.hf_stub import write_stub

SECRET = "sk-0123456789abcdef"
CONFIG = """
recipe: grpo
experiment_name: e
actor: {path: "${oc.env:MY_MODEL}"}
ref: {path: "${actor.path}", parallel: "${actor.parallel}", dtype: "${actor.dtype}"}
train_dataset:
  type: gsm8k
  batch_size: 4
  options:
    api_key: ${oc.env:MY_KEY}
    again: "Bearer ${train_dataset.options.api_key}"
    judges: [{url: here, auth: "${oc.env:MY_KEY}"}, plain]
    hf_token: hf_literal
    level: 2
"""


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("MY_MODEL", str(tmp_path))
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return load_config(path, [f"fileroot={tmp_path}"])


def test_the_run_gets_the_value_and_its_config_yaml_the_interpolation(cfg, tmp_path, monkeypatch):
    options = cfg.train_dataset.options
    assert options["api_key"] == SECRET and options["again"] == f"Bearer {SECRET}"
    saved = tmp_path / "config.yaml"
    save_config(cfg, saved)
    text = saved.read_text()
    assert SECRET not in text
    tree = yaml.safe_load(text)
    kept = tree["train_dataset"]["options"]
    assert kept["api_key"] == "${oc.env:MY_KEY}" and kept["level"] == 2
    assert kept["again"] == "Bearer ${train_dataset.options.api_key}"
    assert kept["judges"] == [{"url": "here", "auth": "${oc.env:MY_KEY}"}, "plain"]
    assert tree["actor"]["path"] == "${oc.env:MY_MODEL}" and tree["ref"]["path"] == "${actor.path}"
    # what does not come from the environment has its value, so that its keys can be overridden
    assert tree["ref"]["dtype"] == tree["actor"]["dtype"] == "auto"
    assert tree["ref"]["parallel"] == tree["actor"]["parallel"]
    assert load_config(saved) == cfg
    monkeypatch.setenv("MY_KEY", "another")
    assert load_config(saved).train_dataset.options["again"] == "Bearer another"


def test_a_value_set_since_loading_is_the_one_that_is_written(cfg):
    cfg.actor.path = "/snapshot"
    tree = written_tree(cfg)
    assert tree["actor"]["path"] == "/snapshot"
    assert tree["train_dataset"]["options"]["api_key"] == "${oc.env:MY_KEY}"
    cfg.ref, cfg.train_dataset.options["judges"] = None, []  # where some of them stood
    assert written_tree(cfg)["ref"] is None


def test_print_config_shows_the_interpolation(cfg, tmp_path, capsys):
    assert main(["--config", str(tmp_path / "c.yaml"), "--print-config"]) == 0
    out = capsys.readouterr().out
    assert SECRET not in out and "api_key: ${oc.env:MY_KEY}" in out


@pytest.mark.parametrize("key", ["seed", "weight_sync.type", "gconfig.stop_token_ids", "saver"])
@pytest.mark.parametrize("value", ["${oc.env:MY_KEY}", "[1, '${oc.env:MY_KEY}']"])
def test_a_value_that_its_key_does_not_take_is_not_shown(monkeypatch, key, value):
    monkeypatch.setenv("MY_KEY", SECRET)
    with pytest.raises(ConfigError, match=rf"^{key}=.*\$\{{oc.env:MY_KEY\}}.*: ") as e:
        load_config(None, [f"{key}={value}", "actor.path=x", "train_dataset.type=gsm8k"])
    assert SECRET not in str(e.value)


def test_another_value_of_the_variable_is_no_change_of_the_configuration(
    cfg, tmp_path, monkeypatch
):
    directory = tmp_path / "e" / cfg.trial_name
    save_config(cfg, directory / "config.yaml")
    assert config_changes(cfg) == []
    monkeypatch.setenv("MY_KEY", "another")
    changed = load_config(
        tmp_path / "c.yaml",
        [f"fileroot={tmp_path}", "seed=7", "train_dataset.options.hf_token=hf_new"],
    )
    assert config_changes(changed) == [
        "seed: 1 -> 7",
        "train_dataset.options.hf_token: *** -> ***",
    ]


def test_a_run_that_began_with_the_secret_in_clear_goes_on_without_telling_it(cfg, tmp_path):
    directory = tmp_path / "e" / cfg.trial_name
    clear = (
        config_yaml(cfg).replace('"${oc.env:MY_KEY}"', SECRET).replace("${oc.env:MY_KEY}", SECRET)
    )
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(clear)
    changes = config_changes(cfg)
    assert "train_dataset.options.api_key: *** -> ${oc.env:MY_KEY}" in changes
    assert SECRET not in "".join(changes)


def test_a_checkpoint_knows_other_data_without_holding_secrets(cfg, tmp_path, monkeypatch):
    def data(**environment: str) -> dict:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        overrides = [f"fileroot={tmp_path}", "train_dataset.path=${oc.env:MY_MODEL}/rows"]
        return data_of(load_config(tmp_path / "c.yaml", overrides), 100)

    first = data()
    assert SECRET not in json.dumps(first) and first["options"]["level"] == 2
    assert same_data(first, data())
    rotated = data(MY_KEY="another")
    assert rotated["options"]["api_key"] == first["options"]["api_key"] == "***"
    assert data(MY_KEY=SECRET) == first
    assert not same_data(first, data(MY_MODEL="/elsewhere"))


def test_no_file_of_a_run_and_no_line_holds_a_secret(cfg, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    (tmp_path / "c.yaml").unlink()
    lock = claim(cfg)
    newest_checkpoint(cfg, lambda fn, *args: fn(*args))
    run = tmp_path / "e" / cfg.trial_name
    logger = StatsLogger(
        StatsLoggerConfig(wandb={"mode": "offline"}), run_dir=run, experiment_name="e",
        trial_name=cfg.trial_name, run_config=public_tree(cfg),
    )  # fmt: skip
    logger.log(1, {"loss": 1.0})
    logger.close()
    lock.close()
    files = [p for p in run.rglob("*") if p.is_file()]
    assert {"config.yaml", "report.html"} <= {p.name for p in files}
    assert any(p.suffix == ".wandb" for p in files)
    literal = {p.name for p in files if b"hf_literal" in p.read_bytes()}
    assert literal == {"config.yaml"}  # as the user has written it, to be read again
    assert not [p for p in files if SECRET.encode() in p.read_bytes()]
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err and "hf_literal" not in said.out + said.err


@pytest.mark.parametrize(
    "name",
    [
        *("X-Api-Key", "api-key", "access-key", "Authorization", "api_keys", "api_key"),
        *("OPENAI_API_KEY", "a.b.token", "hf_token", "db-password", "secret", "apikey"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name) and masked("x", name) == "***"
    assert masked(None, name) is None and masked("${oc.env:X}", name) == "${oc.env:X}"


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokenizer_path", "max_new_tokens", "answer_key", "monkey", "tokens"]
)
def test_names_of_no_secrets(name):
    assert not is_secret(name)


def test_results_of_an_evaluation_hold_no_secret(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    model = write_stub(tmp_path / "model")
    asked = {}

    def judged(cfg, model, datasets, *, logs):
        asked.update(datasets)
        return {name: {"failed": 0.0} for name in datasets}, []

    monkeypatch.setattr(evaluation, "evaluate_model", judged)
    reward = "reward.options.auth=${oc.env:MY_KEY}"
    words = ["valid_dataset.type=gsm8k", f"+valid_dataset.{reward}"]
    words += ["valid_datasets.own.type=gsm8k", f"valid_datasets.own.{reward}"]
    config = tmp_path / "c.yaml"
    save_config(load_config(None, words), config)
    line = [str(model), "--config", str(config), "--out", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    assert evaluate.main(line) == 0 and len(asked) == 2
    assert asked["own"].reward.options == {"auth": SECRET}
    text = (tmp_path / "out" / "results.json").read_text()
    assert SECRET not in text and text.count("${oc.env:MY_KEY}") == 2


def test_masks():
    tree = {"token": {"a": 1, "b": ["x", None]}, "rest": [{"password": "p"}, 3]}
    assert masked(tree) == {
        "token": {"a": "***", "b": ["***", None]},
        "rest": [{"password": "***"}, 3],
    }
    assert masked_override("+train_dataset.options.api_key=abc") == (
        "+train_dataset.options.api_key=***"
    )
    assert masked_override("+x.judge={url: u, api_key: abc}") == "+x.judge={url: u, api_key: '***'}"
    assert masked_override("+x.api_key=${oc.env:K}") == "+x.api_key=${oc.env:K}"
    for same in ("--config", "a.b=[1,2]", "a.b={x", "train_dataset.size=40"):
        assert masked_override(same) == same
    text = "a: 1  # as it stands\n"
    assert masked_yaml(text) == text and masked_yaml("a<b: [") == "a<b: ["
    assert yaml.safe_load(masked_yaml("a: {password: x, b: 2}")) == {
        "a": {"password": "***", "b": 2}
    }


@pytest.mark.parametrize("broken", ["p: !!python/tuple [1]", "n: !!int x", "l: [", "d: 2024-13-45"])
def test_text_that_is_no_yaml_is_masked_line_by_line(broken: str) -> None:
    text = f"a:\n  api_key: of-mine\n- 'hf_token': of-mine\n  b: s3://u:of-mine@h\n{broken}\nc: 1"
    shown = masked_yaml(text)
    assert "of-mine" not in shown and broken in shown and shown.endswith("\nc: 1")


@pytest.mark.parametrize(
    "text",
    [
        "a.api_key=${oc.env:K}${a.b}", "a.url=https://bob:${oc.env:K}@h/x",
        "a.url=https://${oc.env:${a.name}}@h/x", "a.header=Bearer ${oc.env:K}",
    ],
)  # fmt: skip
def test_an_interpolation_is_no_secret(text: str) -> None:
    assert masked_override(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "a.api_key=${oc.env:K}of-mine", "a.url=https://bob:of-mine@${oc.env:H}/x",
        "a.url=https://bob:so@of-mine@h/x", "a.url=https://of-mine:@h", "a.url=https://u:of-mine:@h",
    ],
)  # fmt: skip
def test_a_secret_beside_an_interpolation_is_one(text: str) -> None:
    assert "of-mine" not in masked_override(text)


@pytest.mark.parametrize(
    "reads",
    [
        "${oc.select:train_dataset.options.api_key,none}",
        "${oc.dict.values:train_dataset.options.d}",
        "${oc.decode:${oc.env:MY_KEY}}",
    ],
)
def test_a_resolver_that_reads_the_environment_is_kept_as_written(cfg, tmp_path, reads) -> None:
    more = [f"+train_dataset.options.x={reads}", "+train_dataset.options.d.a=${oc.env:MY_KEY}"]
    text = config_yaml(load_config(tmp_path / "c.yaml", more))
    assert SECRET not in text and reads in text


def test_a_value_that_another_key_gives_is_shown_where_none_of_it_is_the_environments() -> None:
    reads = "+train_dataset.options.x=${oc.select:train_dataset.options.y,none}"
    text = config_yaml(load_config(None, [reads, "+train_dataset.options.y=plain-value"]))
    assert yaml.safe_load(text)["train_dataset"]["options"]["x"] == "plain-value"


def test_an_error_shows_no_secret() -> None:
    wrong = ["server.api_key=of-mine", "rollout.x=https://u:of-mine@h", "seed=https://u:of-mine@h"]
    with pytest.raises(ConfigError) as caught:
        load_config(None, wrong)
    report = caught.value.report()
    assert "of-mine" not in report and "server.api_key" in report and "seed=" in report


def test_no_key_of_a_recipe_is_masked_by_mistake():
    for cls in RECIPES.values():
        assert not [name for name in key_table(cls) if is_secret(name)]


LOGIN, KEY = "user:pw-of-mine", "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    "text",
    [
        f"https://{LOGIN}@proxy.example:3128",
        f"train_dataset.reward.options.base_url=https://{LOGIN}@judge/v1",
        f"train_dataset.reward.options={{base_url: 'https://{LOGIN}@judge/v1'}}",
        f"train_dataset.options.x={KEY}",
        f"train_dataset.options.header=Bearer {KEY}",
    ],
)
def test_a_value_that_is_a_secret_is_masked_under_any_name(text):
    shown = masked_override(text)
    assert LOGIN not in shown and KEY not in shown and "***" in shown
    tree = {"base_url": f"https://{LOGIN}@judge/v1", "deep": [{"x": f"Bearer {KEY}"}]}
    assert LOGIN not in str(masked(tree)) and KEY not in str(masked(tree))


def test_what_is_no_secret_stays():
    tree = {
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "mask_token": "[MASK]",
        "path": "runs/a@b",
        "url": "https://host:80/x@y",
        "max_tokens": 3,
    }
    assert masked(tree) == tree
    assert masked({"hf_token": "<pad"}) != {"hf_token": "<pad"}


def picky(config: Any, *, x: int) -> Any:
    """A loss of the user's."""


@pytest.mark.parametrize(
    "wrong",
    [
        "train_dataset.options.level=${oc.env:MY_KEY}",
        "train_dataset.reward={type: judge, options: {base_url: '${oc.env:MY_KEY}'}}",
        "train_dataset.reward={type: judge, options: {base_url: x, tires: '${oc.env:MY_KEY}'}}",
        "actor.correction={weight: '${oc.env:MY_KEY}'}",
        "actor.correction={weight_cap: '${oc.env:MY_KEY}'}",
        "actor.loss={type: 'tests.unit.test_secrets:picky', options: {x: '${oc.env:MY_KEY}'}}",
        "tokenizer_path=${oc.env:MY_KEY}",
        "rollout.backend=${oc.env:MY_KEY}",
    ],
)
def test_no_check_of_a_start_shows_a_value_of_the_environment(
    monkeypatch, tmp_path, wrong: str
) -> None:
    """Neither of an option, nor of what a reward or a data set says of it."""
    write_stub(tmp_path / "model")
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for 45 s
    words = [f"actor.path={tmp_path / 'model'}", "gconfig.n_samples=2", f"fileroot={tmp_path}"]
    words += ["train_dataset.type=arithmetic", "actor.optimizer.lr=1e-5"]
    cfg = load_config(None, [*words, wrong])
    with pytest.raises(ConfigError) as caught:
        check_recipe(cfg, 1)
        check_contents(cfg)
    assert SECRET not in str(caught.value) and "${oc.env:MY_KEY}" in str(caught.value)


@pytest.mark.parametrize(("name", "is_shown"), [("DATA_DIR", True), ("DATA_TOKEN", False)])
def test_a_path_that_does_not_exist_is_shown_unless_a_secret_is_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, is_shown: bool
) -> None:
    write_stub(tmp_path / "model")
    monkeypatch.setenv(name, str(tmp_path))
    words = [f"actor.path={tmp_path / 'model'}", "gconfig.n_samples=2", "train_dataset.type=gsm8k"]
    read = f"${{oc.env:{name}}}/rows.jsonl"
    words += ["actor.optimizer.lr=1e-5", f"train_dataset.files=['{read}']"]
    with pytest.raises(ConfigError) as caught:
        View(load_config(None, words)).check(lambda cfg: check_recipe(cfg, 1))
    assert read in str(caught.value)
    assert (str(tmp_path / "rows.jsonl") in str(caught.value)) == is_shown
