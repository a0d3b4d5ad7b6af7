"""Loading: YAML, overrides, nullable sections, interpolation, and every kind of mistake."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml

from megarl.config.aliases import aliased, foreign_keys, is_key
from megarl.config.base import Choices, SeamConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, run_dir, save_config
from megarl.config.recipes import RECIPES, GRPOConfig, SFTConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.config.schema import key_table
from megarl.config.script import load_expr_config


def problems(*overrides: str, yaml: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(yaml, overrides)
    return list(caught.value.problems)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_yaml_and_overrides_in_that_order(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", "seed: 3\nactor: {path: a, optimizer: {lr: 1e-4}}\n")
    cfg = load_config(path, ["actor.optimizer.lr=2e-5", "actor.parallel.tp=2"])
    assert isinstance(cfg, GRPOConfig)
    assert (cfg.seed, cfg.actor.path, cfg.actor.optimizer.lr) == (3, "a", 2e-5)
    assert (cfg.actor.parallel.tp, cfg.actor.parallel.pp, cfg.gconfig.n_samples) == (2, 1, 1)


def test_command_line_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", "recipe: sft\n")
    cfg = load_config(["seed=5", "--config", str(path), "model.path=m"])
    assert isinstance(cfg, SFTConfig)
    assert (cfg.seed, cfg.model.path) == (5, "m")
    assert load_config([f"--config={path}"]) == load_config(path)


def test_recipe_key_picks_the_dataclass() -> None:
    assert isinstance(load_config(None), GRPOConfig)
    assert isinstance(load_config(None, ["recipe=sft"]), SFTConfig)
    listed = ", ".join(RECIPES)
    assert problems("recipe=[sft]") == [f"recipe=['sft']: not one of {listed} (or pkg.module:name)"]
    assert problems("recipe=xyz") == [f"recipe=xyz: not one of {listed} (or pkg.module:name)"]


def test_null_sections_become_real_when_a_key_is_set(tmp_path: Path) -> None:
    cfg = load_config(None)
    assert cfg.actor.optimizer is None and cfg.ref is None and cfg.valid_dataset is None
    path = write(tmp_path / "x.yaml", "ref: {}\nactor: {optimizer: {lr: 0.5}}\n")
    cfg = load_config(path, ["valid_dataset.split=test"])
    assert cfg.ref.parallel.tp == 1
    assert cfg.actor.optimizer.lr == 0.5
    assert (cfg.valid_dataset.split, cfg.valid_dataset.batch_size) == ("test", 8)
    assert load_config(path, ["ref=null"]).ref is None
    assert load_config(None, ["eval_gconfig.max_new_tokens=7"]).eval_gconfig.greedy  # kept default


def test_lists_dicts_and_text_values() -> None:
    cfg = load_config(
        None,
        [
            "rollout.addresses=[127.0.0.1:30000,node1:30001]",
            "gconfig.stop_token_ids=[1,2]",
            "+train_dataset.options.level=3",
            "train_dataset.options.name=x",
            "trial_name=7",
            "tokenizer_path=",
            "weight_sync.verify=off",
        ],
    )
    assert cfg.rollout.addresses == ["127.0.0.1:30000", "node1:30001"]
    assert cfg.gconfig.stop_token_ids == [1, 2]
    assert cfg.train_dataset.options == {"level": 3, "name": "x"}
    assert (cfg.trial_name, cfg.tokenizer_path, cfg.weight_sync.verify) == ("7", "", "off")


def test_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    text = "actor: {path: '${oc.env:MODELS}/m'}\nref: {path: '${actor.path}'}\n"
    path = write(tmp_path / "x.yaml", text + "valid_dataset: ${train_dataset}\n")
    cfg = load_config(path, ["train_dataset.size=4"])
    assert cfg.ref.path == "/models/m"
    assert cfg.valid_dataset == cfg.train_dataset and cfg.valid_dataset.size == 4
    assert problems("ref.path=${actor.pth}") == [
        "ref.path: Interpolation key 'actor.pth' not found"
    ]
    assert problems("valid_dataset=${train_dataset}", "valid_dataset.size=3") == [
        "valid_dataset.size: valid_dataset=${train_dataset} is a value, not a section"
    ]


def test_interpolated_values_are_checked_like_others() -> None:
    (problem,) = problems("weight_sync.type=${trial_name}", "trial_name=rdma")
    assert problem == (
        "weight_sync.type=rdma: not one of distributed, disk, colocated, adapter, nccl "
        "(or pkg.module:name)"
    )
    (problem,) = problems("seed=${trial_name}", "trial_name=x")
    assert problem.startswith("seed=x: ")


def test_saved_config_loads_back_equal(tmp_path: Path) -> None:
    cfg = load_config(
        None,
        [
            "actor.optimizer.lr=1e-5",
            "ref.path=${actor.path}",
            "actor.path=m",
            "+train_dataset.options.deep={a: [1, b]}",
            "weight_sync.verify=off",
            "max_train_seconds=60",
        ],
    )
    save_config(cfg, tmp_path / "run" / "config.yaml")
    assert load_config(tmp_path / "run" / "config.yaml") == cfg


def test_run_dir() -> None:
    cfg = load_config(None, ["fileroot=f", "experiment_name=e", "trial_name=t"])
    assert run_dir(cfg) == Path("f/e/t")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("actor.optimzer.lr=1", "actor.optimizer.lr"),
        ("actor.paralel.tp=2", "actor.parallel.tp"),
        ("gconfig.nsamples=2", "gconfig.n_samples"),
        ("lr=1", "actor.optimizer.lr"),
        ("max_new_tokns=1", "gconfig.max_new_tokens"),
        ("train_dataset.batchsize=4", "train_dataset.batch_size"),
        # the trained model comes first
        ("optimizer.lr=1", "actor.optimizer.lr"),
        ("parallel.tp=2", "actor.parallel.tp"),
        ("mb_spec.max_tokens_per_mb=2", "actor.mb_spec.max_tokens_per_mb"),
        ("path=m", "actor.path"),
        ("reference.paralel.tp=2", "ref.parallel.tp"),
        # other trainers' names
        ("learning_rate=1", "actor.optimizer.lr"),
        ("actor.lr=1", "actor.optimizer.lr"),
        ("actor_rollout_ref.actor.optim.lr=1", "actor.optimizer.lr"),
        ("actor_rollout_ref.rollout.n=4", "gconfig.n_samples"),
        ("rollout.tensor_parallel_size=2", "server.tp"),
        ("rollout.data_parallel_size=2", "server.dp"),
        ("trainer.nnodes=2", "cluster.n_nodes"),
        ("inf_engine=1", "rollout"),
        ("inf_engine.max_head_offpolicyness=1", "rollout.max_head_offpolicyness"),
        ("async_training=true", "rollout.max_head_offpolicyness"),
        ("sglang.attention_backend=triton", "server.options.attention_backend"),
        ("sglang.context_length=9", "server.context_length"),
        ("server.extra_args.dtype=auto", "server.dtype"),
        ("rollout.workflow.x=1", "rollout.workflow.options.x"),
        ("rollout.workflow.tpye=a", "rollout.workflow.type"),
        ("actor_rollout_ref.rollout.name=sglang", "server.type"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "rollout.workflow"),
        ("rollout.multi_turn.max_turns=5", "rollout.workflow.options.max_turns"),
        ("multi_turn.tool_config_path=x", "rollout.workflow.options.tools"),
        ("algorithm.kl_ctrl.type=adaptive", "actor.kl_controller={target: 0.1, horizon: 10000}"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "kl_ctl"),
        ("gpu_memory_utilization=1", "server.options.mem_fraction_static=0.8"),
    ],
)
def test_unknown_override_names_the_nearest_key(wrong: str, right: str) -> None:
    key = wrong.partition("=")[0]
    assert problems(wrong) == [f"{key}: unknown key; did you mean {right}?"]


def test_an_added_key_of_another_system_names_ours_alone() -> None:
    (problem,) = problems("+sglang.attention_backend=triton")
    assert "server.options.attention_backend" in problem and "train_dataset" not in problem
    (problem,) = problems("data.return_raw_chat=true")
    assert problem.startswith("data.return_raw_chat: ") and "did you mean" not in problem


def test_unknown_yaml_key_names_the_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", "actor:\n  optimizer:\n    learning_rate_: 1\n    epss: 1\n")
    assert problems(yaml=path) == [
        "actor.optimizer.learning_rate_: unknown key; --help lists all keys",
        "actor.optimizer.epss: unknown key; did you mean actor.optimizer.eps?",
    ]
    path = write(tmp_path / "y.yaml", "actor.path: m\n")
    assert "nest the key" in problems(yaml=path)[0]
    assert problems("stop_at_exact_match=1") == [
        "stop_at_exact_match: unknown key of this recipe; recipe=sft has it"
    ]


def test_names_of_another_recipe_are_answered_with_both() -> None:
    (problem,) = problems("discount=0.9")
    assert problem == "discount: unknown key of this recipe; recipe=ppo has it"
    (problem,) = problems("recipe=sft", "rollout.n=4")
    assert problem == "rollout.n: unknown key of this recipe; recipe=grpo has gconfig.n_samples"
    (problem,) = problems("recipe=sft", "optimizer.lr=1")
    assert problem.endswith("did you mean model.optimizer.lr?")
    (problem,) = problems("recipe=ppo", "critic.learning_rate=1")
    assert problem.endswith("did you mean critic.optimizer.lr?")


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_alias_leads_to_a_key(recipe: str) -> None:
    """A value that comes with a key is one that it takes."""
    table = key_table(RECIPES[recipe])
    taken = {*table, *(f"{name}." for name, key in table.items() if key.free_form)}
    found = {
        alias: aliased(table, alias)
        for alias, ours in foreign_keys().items()
        if is_key(ours) and taken.isdisjoint((alias, re.sub(r"\w+$", "", alias)))
        and not alias.endswith(".*")
    }  # fmt: skip
    said = {
        p.partition(":")[0]: p for p in problems(f"recipe={recipe}", *(f"{a}=1" for a in found))
    }
    for alias, target in found.items():
        if target is None:
            assert "unknown key of this recipe; recipe=" in said[alias]
        else:
            key = target.partition("=")[0]
            free = table.get(key.rpartition(".")[0])
            assert key in table or (free is not None and free.free_form)
            assert f"{alias}: unknown key; did you mean {target}?" in said[alias]
    load_config(None, [f"recipe={recipe}", *{t for t in found.values() if t and "=" in t}])


def test_a_plus_sign_sets_a_key_as_none_does() -> None:
    for signs in ("", "+", "++"):
        (problem,) = problems(f"{signs}actor.learning_rate=1")
        assert problem.startswith("actor.learning_rate: unknown key")
        cfg = load_config(None, [f"{signs}seed=7", f"{signs}train_dataset.options.level=3"])
        assert (cfg.seed, cfg.train_dataset.options) == (7, {"level": 3})
    (problem,) = problems("+++seed=7")
    assert problem.startswith("'+++seed=7'")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.parallel.tp=x", "actor.parallel.tp=x: not of type int"),
        ("actor.parallel.tp=1.5", "actor.parallel.tp=1.5: not of type int"),
        ("gconfig.temperature=hot", "gconfig.temperature=hot: not of type float"),
        ("gconfig.greedy=maybe", "gconfig.greedy=maybe: not of type bool"),
        ("rollout.addresses=a:1", "rollout.addresses=a:1: not of type list[str]; write [a,b]"),
        (
            "train_dataset.options=3",
            "train_dataset.options=3: not of type dict[str, Any]; write {name: value}",
        ),
        ("gconfig.temperature={a: 1}", "gconfig.temperature={'a': 1}: not of type float"),
        ("seed=null", "seed=null: needs a value of type int"),
        (
            "actor.adv_norm=grp",
            "actor.adv_norm=grp: not one of group, group_mean, group_batch, batch, none; "
            "did you mean group?",
        ),
        (
            "actor.router_replay=maybe",
            "actor.router_replay=maybe: not one of off, trainer, rollout",
        ),
        ("nonsense", "'nonsense': an override is key=value, +key=value or ++key=value"),
        ("a..b=1", "'a..b=1': an override is key=value, +key=value or ++key=value"),
    ],
)
def test_wrong_value_names_key_value_and_what_is_allowed(override: str, expected: str) -> None:
    assert problems(override) == [expected]


def test_section_given_a_value_lists_its_keys() -> None:
    (problem,) = problems("actor.mb_spec=3")
    assert problem == (
        "actor.mb_spec=3: a section, not a value; it has actor.mb_spec.max_tokens_per_mb, "
        "actor.mb_spec.forward_max_tokens_per_mb, actor.mb_spec.share_prefixes"
    )


def test_problems_are_collected_and_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["actor.pth=m", "seed=x", "weight_sync.type=rdma"])
    assert len(caught.value.problems) == 3
    report = caught.value.report()
    assert report.startswith("config error: 3 problems\n  - ")
    assert all(f"\n  - {p}" in report for p in caught.value.problems)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert problems(yaml=missing) == [f"--config {missing}: no such file"]
    (problem,) = problems(yaml=write(tmp_path / "bad.yaml", "actor: {path: m\nseed: 1\n"))
    assert "not valid YAML" in problem and "line" in problem
    (problem,) = problems(yaml=write(tmp_path / "twice.yaml", "seed: 1\nseed: 2\n"))
    assert "duplicate" in problem
    (problem,) = problems(yaml=write(tmp_path / "list.yaml", "- 1\n"))
    assert "top level" in problem
    (problem,) = problems("stop=[1,", yaml=write(tmp_path / "empty.yaml", ""))
    assert problem.startswith("'stop=[1,': the value is not valid YAML")


def test_required_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("experiment_name=???") == ["experiment_name: required, set it"]


def test_every_shipped_config_loads() -> None:
    configs = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert configs
    for path in configs:
        load_config(path)


# composition


@pytest.fixture
def layered(tmp_path: Path) -> Path:
    """A file over a base and a group of two options, each with keys that the others set, too."""
    (tmp_path / "base").mkdir()
    (tmp_path / "task").mkdir()
    write(
        tmp_path / "base" / "common.yaml",
        "seed: 2\ntrial_name: base\nactor: {path: m, optimizer: {lr: 1.0, beta1: 0.8}}\n"
        "train_dataset: {type: arithmetic, options: {level: 3}}\nrollout: {workflow: a:B}\n",
    )
    write(tmp_path / "task" / "easy.yaml", "trial_name: easy\ngconfig: {n_samples: 2}\n")
    write(
        tmp_path / "task" / "hard.yaml",
        "trial_name: hard\ntrain_dataset: {type: reasoning_gym, options: {task: chain_sum}}\n",
    )
    text = "defaults: [base/common.yaml, {task: easy}]\nseed: 3\nactor: {optimizer: {lr: 0.5}}\n"
    return write(tmp_path / "x.yaml", text + "rollout: {workflow: {options: {turns: 3}}}\n")


def test_files_are_merged_in_order_below_the_files_own_keys(layered: Path) -> None:
    cfg = load_config(layered, ["actor.optimizer.beta1=0.7"])
    assert isinstance(cfg, GRPOConfig) and cfg.actor.optimizer is not None
    assert (cfg.seed, cfg.trial_name, cfg.gconfig.n_samples) == (3, "easy", 2)
    assert (cfg.actor.path, cfg.actor.optimizer.lr, cfg.actor.optimizer.beta1) == ("m", 0.5, 0.7)
    assert cfg.rollout.workflow == SeamConfig(type="a:B", options={"turns": 3})
    first = layered.parent / "y.yaml"
    write(first, "defaults: [_self_, x]\nseed: 4\nexperiment_name: y\n")
    cfg = load_config(first)
    assert (cfg.seed, cfg.experiment_name) == (3, "y")


def test_a_group_is_switched_on_the_command_line(layered: Path) -> None:
    cfg = load_config(layered, ["task=hard"])
    assert isinstance(cfg, GRPOConfig)
    assert (cfg.trial_name, cfg.gconfig.n_samples) == ("hard", 1)
    # options of another type do not stay
    assert cfg.train_dataset.options == {"task": "chain_sum"}
    assert load_config(layered, ["task=null"]).trial_name == "base"
    (layered.parent / "extra").mkdir()
    write(layered.parent / "extra" / "long.yaml", "seed: 9\n")
    assert load_config(layered, ["+extra=long"]).seed == 9
    assert load_config(layered, ["+extra=long", "seed=10"]).seed == 10


def test_mistakes_in_defaults_are_named(layered: Path) -> None:
    (problem,) = problems("task=hrd", yaml=layered)
    assert "task=hrd: no such file" in problem and "there are easy, hard" in problem
    (problem,) = problems(yaml=write(layered.parent / "a.yaml", "defaults: [a]\n"))
    assert "among its own defaults" in problem
    (problem,) = problems(yaml=write(layered.parent / "b.yaml", "defaults: base/common\n"))
    assert "must be a list" in problem
    (problem,) = problems(yaml=write(layered.parent / "c.yaml", "defaults: [{a: b, c: d}]\n"))
    assert "one group" in problem


# seams and configurations of one's own


def test_a_seam_is_a_name_or_a_section() -> None:
    cfg = load_config(None, ["rollout.workflow=m:A", "rollout.workflow.options.turns=3"])
    assert isinstance(cfg, GRPOConfig)
    assert cfg.rollout.workflow == SeamConfig(type="m:A", options={"turns": 3})
    cfg = load_config(None, ["train_dataset.reward={type: m:f, options: {scale: 2}}"])
    assert cfg.train_dataset.reward == SeamConfig(type="m:f", options={"scale": 2})
    (problem,) = problems("rollout.workflow.option.turns=3")
    assert problem.startswith("rollout.workflow.option.turns: unknown key")


def test_another_type_on_the_command_line_drops_the_options_of_the_one_before(
    tmp_path: Path,
) -> None:
    text = "actor: {loss: {type: m:a, options: {eps: 1}}}\ntrain_dataset: {options: {level: 2}}\n"
    path = write(tmp_path / "x.yaml", text)

    def loss(*overrides: str) -> tuple[str, dict[str, Any]]:
        cfg = load_config(path, overrides)
        assert isinstance(cfg, GRPOConfig)
        return cfg.actor.loss.type, cfg.actor.loss.options

    assert loss() == loss("actor.loss=m:a") == loss("actor.loss.type=m:a") == ("m:a", {"eps": 1})
    assert loss("actor.loss=m:b") == loss("actor.loss.type=m:b") == ("m:b", {})
    for words in (
        ("actor.loss.type=m:b", "actor.loss.options.x=2"),
        ("actor.loss.options.x=2", "actor.loss.type=m:b"),
        ("actor.loss.options.x=2", "actor.loss=m:b"),
    ):
        assert loss(*words) == ("m:b", {"x": 2})
    assert loss("actor.loss={type: m:b}", "actor.loss.type=m:c") == ("m:c", {})
    assert load_config(path, ["train_dataset.type=arithmetic"]).train_dataset.options == {
        "level": 2
    }
    assert load_config(path, ["train_dataset.type=gsm8k"]).train_dataset.options == {}


@dataclass(kw_only=True)
class OwnConfig(GRPOConfig):
    bonus: float = 0.5


class OwnTrainer:
    config_class = OwnConfig


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    here = __name__
    path = write(tmp_path / "x.yaml", f"recipe: {here}:OwnConfig\nbonus: 2\nactor: {{path: m}}\n")
    cfg = load_config(path, ["seed=3"])
    assert type(cfg) is OwnConfig and (cfg.bonus, cfg.actor.path, cfg.seed) == (2.0, "m", 3)
    save_config(cfg, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == cfg
    assert load_config(["bonus=1"], cls=OwnConfig).bonus == 1.0
    assert type(load_config([f"trainer={here}:OwnTrainer", "bonus=1"])) is OwnConfig
    (problem,) = problems(f"recipe={here}:OwnConfig", "bonos=1")
    assert problem == "bonos: unknown key; did you mean bonus?"
    (problem,) = problems(f"recipe={here}:OwnTrainer")
    assert "not a subclass of a recipe's" in problem
    with pytest.raises(ConfigError, match=r"recipe=ppo: OwnConfig is not one of that recipe's"):
        load_config(["recipe=ppo"], cls=OwnConfig)


def test_a_class_of_ones_own_may_check_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are those behind interpolations."""

    @dataclass(kw_only=True)
    class Checked(GRPOConfig):
        share: float = 0.5

        def __post_init__(self) -> None:
            if not 0 < self.share < 1:
                raise ValueError(f"share={self.share}: between 0 and 1")

    monkeypatch.setenv("SHARE", "0.25")
    assert load_config(None, ["share=${oc.env:SHARE}"], cls=Checked).share == 0.25
    monkeypatch.setenv("SHARE", "2")
    with pytest.raises(ConfigError, match=r"share=2\.0: between 0 and 1"):
        load_config(None, ["share=${oc.env:SHARE}"], cls=Checked)


def test_a_script_has_keys_of_its_own(tmp_path):
    """The launcher leaves them out, and nothing else."""

    @dataclass(kw_only=True)
    class Script(GRPOConfig):
        transfer: Annotated[str, Choices("disk", "megatron")] = "disk"

    path = tmp_path / "x.yaml"
    path.write_text("transfer: megatron\nseed: 3\n")
    config, source = load_expr_config(["--config", str(path), "seed=4"], Script)
    assert (config.transfer, config.seed, source) == ("megatron", 4, str(path))
    assert load_config(path, ["transfer=disk"], foreign=True).seed == 3
    with pytest.raises(ConfigError, match="transfer: unknown key"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"actor\.pathh: unknown key"):
        load_config(path, ["actor.pathh=x"], foreign=True)


def test_a_path_of_a_scripts_own_is_saved_and_loads_back(tmp_path: Path) -> None:
    @dataclass(kw_only=True)
    class WithPath(GRPOConfig):
        cache: Path = Path("/tmp")

    cfg = load_config(None, [f"cache={tmp_path}"], cls=WithPath)
    assert cfg.cache == tmp_path
    save_config(cfg, tmp_path / "c.yaml")
    assert yaml.safe_load((tmp_path / "c.yaml").read_text())["cache"] == str(tmp_path)
    assert load_config(tmp_path / "c.yaml", cls=WithPath) == cfg


def test_sampling_as_a_model_recommends_it(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 7]}')
    found = GenerationHyperparameters.from_pretrained(tmp_path, max_new_tokens=9)
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 1.0)
    assert found.stop_token_ids == [7] and found.max_new_tokens == 9 and not found.greedy
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"generation_config\.json"):
        GenerationHyperparameters.from_pretrained(tmp_path / "none")


RECOMMENDED = '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 7]}'


def test_a_key_takes_the_sampling_of_the_trained_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(RECOMMENDED)
    both = ["gconfig.from_model=true", "eval_gconfig.from_model=true"]
    others = ["gconfig.n_samples=4", "server.options.seen=${eval_gconfig.temperature}"]
    words = [f"actor.path={tmp_path}", *both, "gconfig.temperature=0.9", *others]
    cfg = load_config(None, words)
    assert (cfg.gconfig.temperature, cfg.gconfig.top_p, cfg.gconfig.top_k) == (0.9, 0.95, -1)
    assert cfg.gconfig.stop_token_ids == [7] and cfg.gconfig.n_samples == 4
    # by default evaluations are greedy; this model's file asks for samples
    assert cfg.eval_gconfig.temperature == 0.6 and not cfg.eval_gconfig.greedy
    assert cfg.server.options["seen"] == 0.6
    (tmp_path / "saved").mkdir()
    save_config(cfg, tmp_path / "saved" / "config.yaml")
    (tmp_path / "generation_config.json").write_text("{}")  # what the run has seen stays
    assert load_config(tmp_path / "saved" / "config.yaml") == cfg


def test_the_sampling_of_an_evaluation_by_generation(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(RECOMMENDED)
    words = ["recipe=sft", f"model.path={tmp_path}"]
    assert load_config(None, words).generation is None
    cfg = load_config(None, [*words, "generation.gconfig.from_model=true"])
    assert cfg.generation.gconfig.top_p == 0.95


@pytest.mark.parametrize("text", [None, "no json", "[1]"])
def test_a_model_without_sampling_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    (problem,) = problems("gconfig.from_model=true", f"actor.path={tmp_path}")
    assert problem.startswith("gconfig.from_model=true: ") and f"actor.path={tmp_path}" in problem
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (problem,) = problems("gconfig.from_model=true", "actor.path=org/absent")
    assert "actor.path=org/absent" in problem


def test_problems_travel_between_processes() -> None:
    again = pickle.loads(pickle.dumps(ConfigError(["a.b=1: too small", "c: unknown"])))
    assert again.problems == ("a.b=1: too small", "c: unknown")


def test_a_section_that_is_null_is_named_beside_what_an_allocation_sets_in_it() -> None:
    (problem,) = problems("server=null", "allocation_mode=sglang.d2+megatron.d1")
    assert problem.startswith("server=null: ")


def test_a_file_that_repeats_the_default_type_keeps_the_options_below(tmp_path: Path) -> None:
    below, above = tmp_path / "below.yaml", tmp_path / "above.yaml"
    below.write_text("weight_sync: {options: {delta: true}}\n")
    above.write_text("defaults: [below]\nrecipe: grpo\nweight_sync: {type: distributed}\n")
    assert load_config(above, ["actor.path=m"]).weight_sync.options == {"delta": True}
    named = load_config(above, ["actor.path=m", "weight_sync.type=nccl"])  # another word for it
    assert named.weight_sync.options == {"delta": True}
    above.write_text("defaults: [below]\nrecipe: grpo\nweight_sync: {type: nccl}\n")
    assert load_config(above, ["actor.path=m"]).weight_sync.options == {"delta": True}
    other = load_config(above, ["actor.path=m", "weight_sync.type=disk"])
    assert other.weight_sync.options == {}


def test_a_preset_that_names_the_type_there_is_keeps_its_options(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("recipe: grpo\nactor: {advantages: {options: {kind: population}}}\n")
    cfg = load_config(file, ["actor.path=m", "algorithm=grpo"])
    assert isinstance(cfg, GRPOConfig) and cfg.actor.advantages.options == {"kind": "population"}
