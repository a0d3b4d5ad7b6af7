"""Names that nothing has, and arguments that look like others, are answered before the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from megarl.config.check import check_config
from megarl.config.check_parts import free_problems
from megarl.config.command_line import parse_command_line
from megarl.config.earlier_run import config_changes
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, run_dir, save_config
from megarl.config.script import fetch_hub_models
from megarl.data.sources import load_rows
from megarl.observability.episodes import FOLDER, RECORDS, read_bytes
from megarl.trainer.user_code import check_code

EVALUATED = ("valid_dataset.type=arithmetic", "saver.keep_best=1", "saver.keep_last=1")


ROOT = Path(__file__).parents[2]
METRICS = ROOT / "docs" / "metrics.md"


def of(key: str, *overrides: str) -> list[str]:
    """What each override alone is told about `key`."""
    told = (problems(*EVALUATED, override) for override in overrides)
    return [p for each in told for p in each if p.startswith(f"{key}=")]


def problems(*overrides: str) -> list[str]:
    cfg = load_config(None, overrides)
    try:
        check_config(cfg, 1)
    except ConfigError as e:
        return list(e.problems)
    return []


@pytest.mark.parametrize(
    ("wrong", "key", "right"),
    [
        (["saver.metric=evl/accuracy"], "saver.metric=evl/accuracy", "eval"),
        (["saver.metric=eval/acuracy"], "saver.metric=eval/acuracy", "accuracy"),
        (["saver.metric=eval/maths/accuracy"], "saver.metric=eval/maths/accuracy", "maths"),
        (["valid_dataset=null"], "saver.metric=eval/accuracy", "valid_dataset"),
        (["profiler.phases=[logp,trian]"], "profiler.phases=['logp', 'trian']", "train"),
        (["valid_dataset.sampler=m:f"], "valid_dataset.sampler=m:f", ""),
    ],
)
def test_a_name_of_nothing_is_refused(wrong: list[str], key: str, right: str) -> None:
    found = [p for p in problems(*EVALUATED, *wrong) if p.startswith(key)]
    assert len(found) == 1 and right in found[0].removeprefix(key)


@pytest.mark.parametrize(
    "right",
    [
        "eval/accuracy",
        "eval/reward_lo",
        "eval/pass_at_4",
        "eval/math/reward",
        "reward/mean",
        "reward/own",
    ],
)
def test_a_metric_that_there_is_is_taken(right: str) -> None:
    found = problems(*EVALUATED, f"saver.metric={right}", "valid_datasets.math.type=arithmetic")
    assert not [p for p in found if p.startswith("saver.metric")]


@pytest.mark.parametrize(
    "own",
    [
        ["train_dataset.reward=mine:f"],
        ["rollout.workflow=mine:W"],
        ["rollout.backend=mine:B"],
        ["actor.loss=mine:f"],
        [f"train_dataset.{k}" for k in ("type=mix", "parts.a.type=chat", "parts.a.workflow=m:W")],
    ],
)
def test_code_of_ones_own_has_metrics_and_phases_of_its_own(own: list[str]) -> None:
    named = ["saver.metric=my/score", "profiler.phases=[mine]"]
    ours = ("saver.metric", "profiler.phases")
    assert len([p for p in problems(*EVALUATED, *named) if p.startswith(ours)]) == 2
    assert not [p for p in problems(*EVALUATED, *named, *own) if p.startswith(ours)]


def test_a_script_of_ones_own_has_metrics_and_phases_of_its_own() -> None:
    cfg = load_config(None, [*EVALUATED, "saver.metric=my/score", "profiler.phases=[mine]"])
    with pytest.raises(ConfigError) as caught:
        check_config(cfg, 1, own_script=True)
    assert "my/score" not in str(caught.value) and "mine" not in str(caught.value)


def test_an_argument_with_a_slash_before_its_equals_sign_is_a_path() -> None:
    command = parse_command_line(["runs/x/lr=1e-5", "seed=3", "actor.path=a/b=c"])
    assert command.words == ["runs/x/lr=1e-5"]
    assert command.overrides == ["seed=3", "actor.path=a/b=c"]


@pytest.mark.parametrize("text", ["", "- 1\n", "a: [", "\x00\x01"])
def test_a_damaged_config_of_a_run_says_so(tmp_path: Path, text: str) -> None:
    cfg = load_config(None, [f"fileroot={tmp_path}"])
    file = run_dir(cfg) / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config_changes(cfg)
    assert str(file) in str(caught.value) and "damaged" in str(caught.value)


def test_the_viewer_reads_records_alone(tmp_path: Path) -> None:
    records = tmp_path / FOLDER / RECORDS
    records.parent.mkdir()
    (tmp_path / "secret").write_text("mine, all mine")
    records.symlink_to(tmp_path / "secret")
    line = {"file": "../secret", "at": 0, "size": 4}
    with pytest.raises(ValueError, match="is a link"):
        read_bytes(tmp_path, line)
    records.unlink()
    records.write_text("records")
    assert read_bytes(tmp_path, line) == b"reco"


def test_servers_and_judges_take_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, **how: Any) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    cfg = load_config(None, [f"actor.path={tmp_path}", "server.path=org/a", "judge.path=org/b"])
    fetch_hub_models(cfg)
    assert asked == ["org/a", "org/b"]
    assert (cfg.server.path, cfg.judge.path) == (str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("path", ["models/qwen--7b", "org/a..b", "org/name.git", "org/a-"])
def test_a_path_that_is_no_name_of_the_hub_is_one_line(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch_hub_models(load_config(None, [f"actor.path={path}"]))
    (problem,) = caught.value.problems
    assert problem.startswith(f"actor.path={path}: ") and "\n" not in problem


def test_a_column_without_a_space_is_answered_with_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1", "answer": "2"}\n')
    words = ["type=chat", f"path={file}", "options.columns={messages:question}"]
    cfg = load_config(None, [f"train_dataset.{word}" for word in words])
    with pytest.raises(ValueError) as caught:
        load_rows(cfg.train_dataset, seed=1)
    assert "messages: question" in str(caught.value)


def test_a_configuration_names_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "one", tmp_path / "cwd"
    for folder in (home, here):
        folder.mkdir()
        for name in ("reward.py", "rows.jsonl"):
            (folder / name).write_text("")
    (home / "own.jinja").write_text("")
    (home / "trial").mkdir()
    (here / "reward.py").unlink()
    (home / "c.yaml").write_text(
        "trial_name: trial\nactor: {path: org/model}\nchat_template: own.jinja\n"
        "train_dataset: {type: chat, files: [rows.jsonl, none.jsonl], reward: reward.py:f}\n"
    )
    monkeypatch.chdir(here)
    cfg = load_config(home / "c.yaml", ["+train_dataset.options.x=own.jinja"])
    assert cfg.chat_template == str(home / "own.jinja")
    assert cfg.train_dataset.reward.type == f"{home}/reward.py:f"
    assert cfg.train_dataset.files == ["rows.jsonl", "none.jsonl"]  # here first; nowhere
    assert (cfg.trial_name, cfg.actor.path) == ("trial", "org/model")
    assert cfg.train_dataset.options == {"x": "own.jinja"}


@pytest.mark.parametrize(
    "text",
    [
        "Name each place as file.py:line. " + "You are a careful engineer. " * 12,
        "a" * 300 + ".py:f",
        "reward.py:line one",
        "one\ntwo.py:f",
        "\0.py:f",
    ],
)
def test_a_text_that_names_no_file_stays_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.py").write_text("")
    options = {"system": text, "path": text, "files": [text]}
    config = {"train_dataset": {"type": "chat", "options": options}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config, width=10_000))
    assert load_config(tmp_path / "c.yaml").train_dataset.options == options


def test_every_metric_of_the_docs_and_every_phase_may_be_named() -> None:
    """A name that is left out of a list would be refused though the run has it."""
    rows = [line.split("|")[1] for line in METRICS.read_text().splitlines() if line[:3] == "| `"]
    metrics = {name for row in rows for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", row)}
    metrics -= {"step", "time", "some_credit"}  # of a row, and of an evaluation alone
    named = {m for m in metrics if not m.startswith("eval/")}
    assert len(named) > 60
    assert of("saver.metric", *(f"saver.metric={m}" for m in sorted(named))) == []
    sources = "\n".join(path.read_text() for path in (ROOT / "megarl").rglob("*.py"))
    phases = set(re.findall(r'(?:record_timing|phase)\("([a-z_]+)"', sources))
    assert len(phases) > 10
    assert of("profiler.phases", f"profiler.phases=[{','.join(sorted(phases))}]") == []


def weighed(cap: float | None = None, **others: Any) -> dict[str, Any]:
    """AReaL's decoupled loss in our keys."""
    correction = {"weight": "token", "weight_cap": None, "mask_low": 0.0, "veto": 0.0}
    return correction | {"mask": "token" if cap else "none", "mask_high": cap} | others


ON = "actor: {use_decoupled_loss: true}"
OFF = "actor: {use_decoupled_loss: false}"
CAPPED = "actor: {use_decoupled_loss: true, behav_imp_weight_cap: 5.0}"
VETO = "actor: {correction: {veto: 0.1}}"
PRESET = "algorithm: decoupled"
GSM8K = (ROOT / "configs" / "gsm8k_grpo.yaml").read_text()
CAP, TRUE, FALSE, NULL = (
    *("actor.behav_imp_weight_cap=3", "actor.use_decoupled_loss=true"),
    *("actor.use_decoupled_loss=false", "actor.correction=null"),
)
TIS = weighed(weight_cap=2.0)


@pytest.mark.parametrize(
    ("files", "overrides", "correction"),
    [
        ([], [TRUE], weighed()),
        ([], [TRUE, CAP], weighed(3)),
        ([ON], [], weighed()),
        ([CAPPED], [], weighed(5.0)),
        ([CAPPED], [CAP], weighed(3)),
        ([ON], [FALSE], None),
        ([ON], [NULL], None),
        ([CAPPED], [NULL, TRUE], weighed()),
        ([CAPPED], ["actor.correction.veto=0.1"], weighed(5.0, veto=0.1)),
        ([CAPPED], ["actor.correction={veto: 0.1}"], {"veto": 0.1}),
        (["actor: {use_decoupled_loss: false, behav_imp_weight_cap: null}"], [], None),
        ([GSM8K], [], weighed(5.0)),
        ([GSM8K], ["actor.behav_imp_weight_cap=null"], weighed()),
        ([GSM8K], ["algorithm=tis"], TIS),
        ([GSM8K], ["algorithm=gspo"], weighed(5.0)),
        # files over files
        ([ON, "actor: {behav_imp_weight_cap: 3}"], [], weighed(3)),
        (["actor: {behav_imp_weight_cap: 3}", ON], [], weighed(3)),
        (["actor: {use_decoupled_loss: false, behav_imp_weight_cap: 5}", ON], [CAP], weighed(3)),
        ([CAPPED, "actor: {behav_imp_weight_cap: null}"], [], weighed()),
        ([CAPPED, OFF], [], None),
        ([CAPPED, OFF], [TRUE], weighed(5.0)),
        ([OFF, CAPPED], [], weighed(5.0)),
        ([CAPPED, VETO], [], weighed(5.0, veto=0.1)),
        ([OFF, VETO], [], {"veto": 0.1}),
        ([VETO, "actor: {correction: null, use_decoupled_loss: true}"], [], weighed()),
        ([CAPPED, "actor: {correction: null}"], [], None),
        ([CAPPED, "algorithm: tis"], [], TIS),
        ([VETO, PRESET], [], weighed(5.0)),
        # the preset
        ([PRESET], [], weighed(5.0)),
        ([PRESET], [CAP], weighed(3)),
        ([PRESET], [FALSE], None),
        ([PRESET], [NULL], None),
        ([PRESET, OFF], [], None),
        ([f"{PRESET}\n{OFF}"], [], None),
        ([f"{PRESET}\nactor: {{behav_imp_weight_cap: 3}}"], [], weighed(3)),
        ([PRESET], ["algorithm=tis"], TIS),
        ([CAPPED], ["algorithm=decoupled", CAP], weighed(3)),
    ],
)
def test_areals_keys_of_the_decoupled_loss_are_a_correction(
    tmp_path: Path, files: list[str], overrides: list[str], correction: dict[str, Any] | None
) -> None:
    """Each file has the one before among its defaults. What a run saves means the same again."""
    cfg = load_config(written(tmp_path, files), overrides)
    assert cfg.actor.correction == correction
    save_config(cfg, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml").actor.correction == correction


@pytest.mark.parametrize(
    ("files", "overrides", "key"),
    [
        ([], ["actor.use_decoupled_loss=maybe"], "actor.use_decoupled_loss=maybe"),
        ([], ["actor.use_decoupled_loss=null"], "actor.use_decoupled_loss=null"),
        ([], ["actor.use_decoupled_loss={a: 1}"], "actor.use_decoupled_loss={'a': 1}"),
        ([], ["actor.use_decoupled_loss=${x}"], "actor.use_decoupled_loss=${x}"),
        ([], [CAP], CAP),
        ([VETO], [TRUE], TRUE),
        ([VETO], [FALSE], FALSE),  # which might mean any of its parts
        ([VETO, ON], [], TRUE),
        ([VETO], [CAP], CAP),
        (["algorithm: tis"], [TRUE], TRUE),
        ([], ["actor.correction.weight=sequence", TRUE], TRUE),
    ],
)
def test_areals_keys_that_mean_no_correction_are_refused(
    tmp_path: Path, files: list[str], overrides: list[str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, files), overrides)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key}: ")


def written(folder: Path, files: list[str]) -> Path | None:
    below = ""
    for number, text in enumerate(files):
        (folder / f"{number}.yaml").write_text(f"{below}{text}")
        below = f"defaults: [{number}]\n"
    return folder / f"{len(files) - 1}.yaml" if files else None


@pytest.mark.parametrize(
    ("gone", "successor"),
    [
        ("server.extra_args.mem_fraction_static=0.8", "server.options.mem_fraction_static"),
        ("server.enforce_eager=true", "server.options."),
        ("actor.optimizer.warmup_steps_proportion=0.1", "actor.optimizer.warmup_steps"),
        (
            "actor.optimizer.cpu_offload_fraction=0.5",
            "optimizer.options.optimizer_offload_fraction",
        ),
        ("actor.moe.aux_loss_coef=0.1", "actor.options.moe_aux_loss_coeff"),
        ("actor.moe.z_loss_coef=0.1", "actor.options.moe_z_loss_coeff"),
        ("actor.moe.router_replay=rollout", "actor.router_replay"),
        ("actor.moe.per_layer_stats=true", "actor.options.load_per_layer"),
        ("actor.moe.token_dispatcher=flex", "actor.options.moe_token_dispatcher_type"),
        ("actor.moe.expert_bias_update_rate=0.1", "actor.options.moe_router_bias_update_rate"),
        ("actor.parallel.cp_comm_type=p2p", "actor.options.cp_comm_type"),
        ("ref.recompute_method=block", "ref.options.recompute_method"),
        ("actor.recompute_num_layers=2", "actor.options.recompute_num_layers"),
        ("actor.offload_activations=true", "actor.options.offload_activations"),
        ("actor.lm_head_chunk_tokens=64", "actor.options.lm_head_chunk_tokens"),
        ("actor.lm_head_keep_mb=64", "actor.options.lm_head_keep_mb"),
        ("actor.recompute_modules=[moe_act]", "actor.options.recompute_modules"),
        ("gae_length_alpha=0.05", "gae.length_alpha"),
        ("gae_lambda_critic=1", "gae.critic_lambda"),
        ("bootstrap_truncated=true", "gae.bootstrap"),
        ("saver.mode=min", "saver.metric=-"),
        ("actor.value_head_init=random", "actor.options.value_head_init"),
        ("actor.adv_std=population", "actor.advantages.options.kind"),
        ("weight_sync.senders=2", "one rank gathers and sends"),
        ("weight_sync.delta=true", "weight_sync.options.delta"),
        ("weight_sync.quantization=fp8_block", "weight_sync.options.quantization"),
        ("weight_sync.flattened=false", "a bucket goes as one broadcast"),
        ("weight_sync.sharded=on", "weight_sync.options.sharded"),
        ("actor.optimizer.precision_aware=true", "options.use_precision_aware_optimizer"),
        ("actor.optimizer.cpu_offload=true", "actor.optimizer.options.optimizer_cpu_offload"),
        ("rollout.meeting_timeout=60", "collective_timeout"),
        ("teacher.request_timeout=60", "rollout.request_timeout"),
        ("teacher.retry_timeout=60", "rollout.request_timeout"),
        ("rollout.retry_timeout=60", "rollout.request_timeout"),
        ("server.start_timeout=60", "rollout.setup_timeout"),
        ("cluster.rendezvous_timeout=60", "collective_timeout"),
        ("weight_sync.delta_on_host=true", "leave it out"),
        ("cluster.slurm.minutes=4", "--time="),
        ("cluster.slurm.save_before=4", "--signal="),
        ("cluster.slurm.requeue=false", "--no-requeue"),
        ("cluster.slurm.sbatch_args=[-x]", "cluster.sbatch_args"),
        ("cluster.slurm.account=us", "--account="),
        ("cluster.slurm={}", "cluster.sbatch_args"),
        ("evaluator.max_samples=4", "valid_dataset.size"),
        ("tokenizer.chat_template=a.jinja", "chat_template"),
        ("actor.value_head_bias=true", "leave it out"),
        ("rollout.max_queue=8", "max_concurrent_rollouts"),
    ],
)
def test_a_key_that_went_is_answered_with_what_takes_its_place(gone: str, successor: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [gone])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{gone.partition('=')[0]}: unknown key") and successor in problem


@pytest.mark.parametrize(
    ("gone", "successor"),
    [
        ("rollout.gateway.max_n=4", "at most 8 answers"),
        ("rollout.gateway.max_answers=4", "at most 1024 answers"),
        ("rollout.gateway.context_length=4", "servers"),
        ("rollout.gateway.match=[thoughts]", "leave it out"),
        ("profiler.memory=true", "profile_memory"),
        ("profiler.stacks=true", "with_stack"),
        ("stats_logger.wandb.project=x", "stats_logger.wandb.options"),
        ("stats_logger.wandb.entity=x", "stats_logger.wandb.options"),
        ("record.steps=[1]", "set keep"),
        ("cluster.reward_pool.restarts=2", "three times"),
    ],
)
def test_an_option_that_went_is_answered_with_what_takes_its_place(
    gone: str, successor: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_code(load_config(None, [gone]), {})
    (problem,) = (p for p in caught.value.problems if p.startswith(gone.partition("=")[0]))
    assert successor in problem


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("profiler.options.with_stack=5", "not of type bool"),  # torch's own types cannot be read
        ("profiler.options.with_stak=true", "profile has no such option; did you mean with_stack?"),
        ("actor.correction.weight_cap=.inf", "must be a finite number"),
        ("actor.correction.mask_low=.inf", "must be a finite number"),
        ("actor.kl_controller.horizon=.inf", "must be a finite number"),
        ("actor.options.moe_z_loss_coeff=.inf", "must be a finite number"),
        ("train_dataset.curriculum.passes_at=.nan", "must be a finite number"),
        (
            "train_dataset.curriculum.explor=0.5",
            "Curriculum has no such option; did you mean explore?",
        ),
    ],
)
def test_an_option_that_its_part_does_not_take_is_refused(option: str, fix: str) -> None:
    if option.startswith(("profiler", "actor.correction", "actor.kl_controller")):
        pytest.importorskip("torch")  # which these parts import; missing in make stranger-313
    (problem,) = free_problems(load_config(None, [option]))
    assert problem.startswith(f"{option.partition('=')[0]}=") and problem.endswith(fix)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ["actor.eps_clip=0.2", "actor.eps_clip.x=1"],
            "actor.eps_clip.x: actor.eps_clip=0.2 is a value",
        ),
        (["valid_datasets.a=5"], "valid_datasets.a=5: a section"),
        (["valid_dataset=5"], "valid_dataset=5: a section"),
    ],
)
def test_a_value_in_the_place_of_a_section_is_one_problem(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    (problem,) = caught.value.problems
    assert problem.startswith(key)


def test_a_number_of_a_file_is_not_the_type_of_a_section(tmp_path: Path) -> None:
    path = written(tmp_path, ["actor: {eps_clip: 0.2}", "actor: {eps_clip: {x: 1}}"])
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.problems == ("actor.eps_clip={'x': 1}: not of type float",)
