"""The main job, as a user starts it: launcher, servers, trainers, weights over sockets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from tiny_model import make_model  # noqa: E402

from megarl.cli.trace import read_timeline, trace_events  # noqa: E402
from tests.dist.world import free_port  # noqa: E402
from tests.embedded_server import embedded_server  # noqa: E402

STEPS = 3
MODES = pytest.mark.parametrize(
    "mode",
    ["trainer.mode=spmd", pytest.param("trainer.mode=controller", marks=pytest.mark.full)],
    ids=lambda mode: mode.removeprefix("trainer.mode="),
)


def launch(config: str, *overrides: str, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.launcher.local", "--nproc", str(nproc)]
    command += ["--config", str(ROOT / "configs" / config), *overrides]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def stats(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]


def documented() -> re.Pattern[str]:
    """Matches the metrics that docs/metrics.md names, `<x>` standing for one part of a name, and
    those of weight syncs, which docs/servers.md has."""
    named = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "metrics.md").read_text())
    shapes = [re.sub(r"<\w+>", "[^/]+", re.escape(m)).replace(r"\.\.\.", ".+") for m in named]
    return re.compile(rf"weight_sync/\w+|(?:{'|'.join(shapes)})(?:_lo|_hi)?")


def check_books(run: Path, output: str, *, prompts: int, samples: int) -> None:
    """At every step and in the summary: nothing lost, every sample trained once."""
    parts = ("running", "accepted", "rejected", "failed", "dropped")
    for row in stats(run):
        if row["step"] > 0:
            counts = {n: row[f"rollout/{n}"] for n in ("submitted", *parts)}
            assert counts["submitted"] == sum(counts[n] for n in parts), row["step"]
            assert row["rollout/trained"] == prompts * row["step"]
    summary = json.loads((run / "summary.json").read_text())
    counts, steps = summary["prompts"], summary["steps"]
    assert counts["submitted"] == sum(counts[n] for n in parts)
    assert summary["status"] == "finished" and summary["each_sample_trained_once"]
    assert summary["prompts_trained"] == prompts * steps == counts["accepted"]
    assert counts["running"] == 0  # nothing was begun that no step was left for
    assert summary["samples_trained"] == prompts * samples * steps
    assert f"{counts['submitted']} submitted = {counts['running']} running" in output
    assert summary["paths"]["final model"] in output


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small model that SFT has taught to answer with digits (so that rewards differ)."""
    root = tmp_path_factory.mktemp("recipes")
    make_model(root / "model", hidden=64, layers=2)
    done = launch(
        "quickstart_sft.yaml", f"model.path={root / 'model'}", f"fileroot={root}",
        "experiment_name=e", "total_train_steps=200", "evaluator.freq_steps=100",
        "train_dataset.options.level=1", "train_dataset.size=40", "train_dataset.options.demos=64",
        "train_dataset.batch_size=32",
        "valid_dataset.options.level=1", "valid_dataset.size=15",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return root / "e" / "sft" / "final"


def test_sft_learns(model):
    rows = stats(model.parent)
    assert [r["step"] for r in rows] == list(range(1, 201))
    summary = json.loads((model.parent / "summary.json").read_text())
    assert summary["samples_trained"] == 200 * 32 and "prompts" not in summary
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert 0 <= rows[-1]["eval/accuracy_lo"] <= rows[-1]["eval/accuracy"] <= 1


PARTS = {"answer": {"type": "arithmetic", "weight": 0.5}}
PARTS["even"] = {"type": "format", "options": {"pattern": ".*[02468].*"}}
# layout x synchrony x transport x loss: each value of each at least once
CASES = {
    "tp2": ["actor.parallel.tp=2", "actor.ppo_n_minibatches=1"],
    "pp2-async-decoupled": [
        "actor.parallel.tp=1", "actor.parallel.pp=2", "rollout.max_head_offpolicyness=2",
        "actor.use_decoupled_loss=true", "actor.lora.r=4",
        "actor.kl_coef=0.01",
        "trainer=examples.custom_trainer:Annealed", "kl_start=0.1", "algorithm=gdpo",
        f"train_dataset.reward={json.dumps({'type': 'weighted', 'options': {'parts': PARTS}})}",
    ],
    "dp2-disk-kl": [
        "actor.parallel.tp=1", "weight_sync.type=disk", "actor.kl_coef=0.01",
        "train_dataset.reward=megarl.rollout.rewards:exact_reward",
        "actor.loss_agg=sequence-mean", "actor.ppo_n_minibatches=2",
        "gconfig.temperature=0.7", "actor.mb_spec.share_prefixes=true",
    ],
    "tp2-adapter": [
        "actor.parallel.tp=2", "actor.lora.r=4", "weight_sync.type=adapter",
        "actor.ppo_n_minibatches=1",
    ],
}  # fmt: skip
CASES["controller-pp2-async-workers"] = [
    *CASES["pp2-async-decoupled"], "trainer.mode=controller", "rollout.workers=2",
]  # fmt: skip
TIERS = {
    "controller-pp2-async-workers": pytest.mark.full,
    "pp2-async-decoupled": pytest.mark.system,
    "dp2-disk-kl": pytest.mark.full,
    "tp2-adapter": pytest.mark.full,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=TIERS.get(n, ())) for n in CASES])
def test_grpo(name, model, tmp_path):
    done = launch(
        "quickstart_grpo.yaml", f"actor.path={model}", f"fileroot={tmp_path}", "experiment_name=e",
        f"total_train_steps={STEPS}", "train_dataset.batch_size=8", "train_dataset.size=40",
        "train_dataset.options.level=1", "valid_dataset.options.level=1", "valid_dataset.size=15",
        "evaluator.freq_steps=2", "weight_sync.verify=full", "actor.optimizer.lr=1e-3",
        "record.keep=3", "record.servers=true", *CASES[name],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    run = tmp_path / "e" / "grpo"
    rows = stats(run)
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert not [name for r in rows for name in r if not documented().fullmatch(name)]
    assert "eval/accuracy" in rows[0] and "eval/accuracy" in rows[2] and "eval/accuracy" in rows[3]
    trained = rows[1:]
    bound = 2 if "async" in name else 0
    assert max(r["staleness/max"] for r in trained) <= bound
    if bound == 0:  # same weights on both sides: what the server says, the trainer says
        assert max(r["train_rollout_logprob_abs_diff/max"] for r in trained) < 1e-4
    assert all(r["update_successful"] == 1 and r["grad_norm"] > 0 for r in trained)
    assert trained[0]["first_ratio_abs_dev"] < 1e-5
    if "kl_start=0.1" in CASES[name]:  # the loop of examples/custom_trainer.py
        assert [r["kl_ctl"] for r in trained] == pytest.approx([0.1, 0.2 / 3, 0.1 / 3])
    assert trained[-1]["kl_ref"] > 1e-4  # away from a reference that stays
    for passed in ("the first update starts from ratio 1", "actor and reference, of the same"):
        assert done.stdout.count(f"self check: {passed}") == 1, done.stdout
    own = "actor.ppo_n_minibatches=1" in CASES[name]
    from_where = "the update's own pass" if own else "a pass before every update"
    assert done.stdout.count(f"prox_logp comes from {from_where}") == 1, done.stdout
    before, after = (
        AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (model, run / "final")
    )
    assert any(not torch.equal(before[k], after[k]) for k in before)
    assert AutoTokenizer.from_pretrained(run / "final").chat_template
    whens = [json.loads(line)["when"] for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {"before", "after"} == set(whens)
    assert "<svg" in (run / "report.html").read_text()
    kept = [json.loads(line) for line in (run / "eval_rewards.jsonl").read_text().splitlines()]
    assert [k["step"] for k in kept] == [0, 2, 3] and len({tuple(k["rewards"]) for k in kept}) == 1
    assert done.stdout.count("fingerprints of") <= 1  # of four syncs
    check_books(run, done.stdout, prompts=8, samples=8)
    status, said = replay(run, 3, "--train-only")  # in the same layout, from the first step on
    assert status == 0 and "no difference in steps 1-3" in said, said


def replay(run: Path, step: int, *more: str) -> tuple[int, str]:
    """Returns the exit status and the output of megarl replay."""
    command = [sys.executable, "-m", "megarl.cli", "replay", str(run), "--step", str(step), *more]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


@MODES
@pytest.mark.system
def test_servers_and_trainers_in_turn_make_the_run_without_turns(mode, model, tmp_path):
    """PPO with a reference, on devices that both sides give up to each other; then its end again
    from the checkpoint in the middle, with servers and trainers that keep their memory."""
    done = launch(
        "quickstart_ppo.yaml", f"actor.path={model}", f"fileroot={tmp_path}", "experiment_name=e",
        "total_train_steps=4", "train_dataset.batch_size=8", "train_dataset.size=40",
        "train_dataset.options.level=1", "valid_dataset.options.level=1", "valid_dataset.size=5",
        "evaluator.freq_steps=2", "actor.optimizer.lr=1e-3", "actor.kl_coef=0.01", "ref={}",
        "actor.parallel.tp=2", "gconfig.seed=7", "server.deterministic=true", "server.threads=1",
        "weight_sync.type=colocated", "weight_sync.verify=full", "saver.freq_steps=2", mode,
        "recover.freq_steps=2", "recover.keep_last=9", "record.keep=2", "record.servers=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    run = tmp_path / "e" / "ppo"
    check_books(run, done.stdout, prompts=8, samples=4)
    memory = {name for row in stats(run) for name in row if name.startswith("memory/")}
    assert len(memory) == 1 + 3 * (1 + 5) and all(map(documented().fullmatch, memory))
    assert (run / "critic" / "hf" / "step_000002" / "model.safetensors").exists()
    lines = (run / "timeline" / "rank_0.jsonl").read_text().splitlines()
    turns = [s for s in map(json.loads, lines) if s["track"] == "memory"]
    names = ["generate", "train", "sync"]
    assert [s["name"] for s in turns][:9] == names * 3
    trainers, servers = ("params", "optimizer", "grads"), ("server_weights", "server_kv_cache")
    held = {"generate": servers, "train": trainers, "sync": ("params", "server_weights")}
    for span in turns[3:]:  # in the first turns there is no optimizer state, and no cache
        assert {part for part, n in span["about"].items() if n} == {*held[span["name"]]}, span
    status, said = replay(run, 4, "server.release_memory=false")
    assert status == 0 and "no difference in steps 3-4" in said, said
    assert "server.release_memory: true | false" in said


@pytest.mark.full
def test_a_step_is_run_again_to_the_bit(model, tmp_path):
    """From the checkpoint in the middle: its training, its rollouts, also in processes of their
    own, and all of it."""
    done = launch(
        "quickstart_grpo.yaml", f"actor.path={model}", f"fileroot={tmp_path}", "experiment_name=e",
        "total_train_steps=4", "train_dataset.batch_size=8", "train_dataset.size=40",
        "train_dataset.options.level=1", "valid_dataset=null", "actor.optimizer.lr=1e-3",
        "actor.parallel.tp=2", "gconfig.seed=7", "server.deterministic=true", "server.threads=1",
        "recover.freq_steps=2", "recover.keep_last=9", "record.keep=2", "record.servers=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    run = tmp_path / "e" / "grpo"
    before = sorted(p for p in run.rglob("*") if p.is_file())
    in_workers = ["--rollout-only", "rollout.workers=2"]
    for mode in (["--train-only"], ["--rollout-only"], in_workers, []):
        status, said = replay(run, 4, *mode)
        assert status == 0 and "no difference in steps 3-4" in said, said
    status, said = replay(run, 4, "--train-only", "actor.optimizer.lr=2e-3")
    assert status == 1 and "step 3, update 1: lr: " in said, said
    assert "configuration: actor.optimizer.lr: 0.001 | 0.002" in said
    status, said = replay(run, 2, "--train-only")
    assert status == 2 and "the batch of step 1 is not in" in said, said
    assert sorted(p for p in run.rglob("*") if p.is_file() and "replay" not in p.parts) == before


def hurt(path: Path, like: Path) -> Path:
    """A model with noise on its weights: a student that stays near what its teacher knows."""
    shutil.copytree(like, path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(like, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.6 * weight.std() * torch.randn_like(weight) * (weight.ndim == 2)
    model.save_pretrained(path)
    return path


@MODES
def test_distillation_draws_a_student_to_its_teacher(mode, model, tmp_path):
    """Which reads a template of its own, by which it sees what the student does."""
    done = launch(
        "quickstart_distill.yaml", f"actor.path={hurt(tmp_path / 'hurt', model)}",
        f"teacher.path={model}", f"fileroot={tmp_path}", "experiment_name=e",
        "total_train_steps=10", "train_dataset.batch_size=32", "train_dataset.size=40",
        "train_dataset.options.level=1", "valid_dataset=null", "actor.optimizer.lr=3e-4", mode,
        "teacher.context='{{ question }}'",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rows = stats(tmp_path / "e" / "distill")
    assert not [name for r in rows for name in r if not documented().fullmatch(name)]
    assert all(r["update_successful"] == 1 and r["approx_kl"] < 1e-6 for r in rows)
    shown = [r["teacher_kl_reverse"] for r in rows]
    assert shown[-1] < 0.4 * shown[0] and shown[0] > 1, shown
    check_books(tmp_path / "e" / "distill", done.stdout, prompts=32, samples=8)


@MODES
@pytest.mark.system
def test_distillation_by_policy_gradient_from_a_teacher_that_a_server_holds(mode, model, tmp_path):
    flags = ("--context-length", "64", "--dtype", "float32")
    with embedded_server(model, *flags, log=tmp_path / "server.log") as server:
        done = launch(
            "quickstart_distill.yaml", f"actor.path={model.parents[2] / 'model'}",
            "teacher.path=", f"teacher.addresses=[127.0.0.1:{server.port}]",
            f"fileroot={tmp_path}", "experiment_name=e", "total_train_steps=3",
            "train_dataset.batch_size=8", "train_dataset.size=40", "valid_dataset=null",
            "train_dataset.options.level=1", "actor.loss=policy", mode,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rows = stats(tmp_path / "e" / "distill")
    assert all(r["update_successful"] == 1 and r["advantage"] < 0 for r in rows)
    check_books(tmp_path / "e" / "distill", done.stdout, prompts=8, samples=8)


SUMS = [
    "train_dataset.options.level=1", "train_dataset.size=40", "train_dataset.batch_size=16",
    "valid_dataset.options.level=1", "valid_dataset.size=15", "experiment_name=e",
]  # fmt: skip


def test_dpo(model, tmp_path):
    """The policy is data parallel, the reference tensor parallel; they begin as the same."""
    command = ["quickstart_dpo.yaml", f"model.path={model}", f"fileroot={tmp_path}", *SUMS]
    command += ["model.optimizer.lr=1e-3", "evaluator.freq_steps=null"]
    done = launch(*command, "total_train_steps=16", "ref.parallel={tp: 2}")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("self check: the first update starts from ratio 1") == 1, done.stdout
    run = tmp_path / "e" / "dpo"
    rows = stats(run)
    assert [r["step"] for r in rows] == list(range(17))
    assert not [name for r in rows for name in r if not documented().fullmatch(name)]
    assert rows[0]["eval/margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows[1]["loss"] == pytest.approx(0.6931, abs=1e-3)
    last = rows[-5:]  # a batch has 16 pairs, and its loss wavers by a tenth
    assert sum(r["loss"] for r in last) / 5 < 0.6
    assert sum(r["accuracy"] for r in last) / 5 > 0.8 > rows[1]["accuracy"]
    assert rows[-1]["eval/margin"] > 0.02
    AutoModelForCausalLM.from_pretrained(run / "final")


def reward_model(root: Path, like: Path) -> Path:
    """A scorer of whole answers that recipe rm has trained."""
    done = launch(
        "quickstart_rm.yaml", f"model.path={like}", f"fileroot={root}", *SUMS,
        "total_train_steps=3", "model.optimizer.lr=1e-3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = stats(root / "e" / "rm")
    assert found[-1]["loss"] < found[1]["loss"] and "eval/accuracy" in found[-1]
    return root / "e" / "rm" / "final"


@MODES
@pytest.mark.system
def test_ppo_and_on_from_its_checkpoint(mode, model, tmp_path):
    command = [
        "quickstart_ppo.yaml", f"actor.path={model}", f"fileroot={tmp_path}", "experiment_name=e",
        "train_dataset.batch_size=8", "train_dataset.size=40", "train_dataset.options.level=1",
        "valid_dataset=null", "critic.optimizer.lr=1e-3", "weight_sync.verify=full",
        f"reward_model.path={reward_model(tmp_path / 'scorer', model)}",
        "reward_model.parallel.pp=2", "profiler.start_step=2", "profiler.ranks=[0,1]",
        "profiler.peak_tflops=0.001", mode,
    ]  # fmt: skip
    done = launch(*command, "total_train_steps=2")
    assert done.returncode == 0, done.stdout
    for passed in ("the first update starts from ratio 1", "actor and reference, of the same"):
        assert done.stdout.count(f"self check: {passed}") == 1, done.stdout
    assert "has no value head: it starts as zero" in done.stdout
    done = launch(*command, "total_train_steps=3")
    assert done.returncode == 0 and "from step 2 of 3 (version 2)" in done.stdout, done.stdout

    run = tmp_path / "e" / "ppo"
    rows = stats(run)
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert max(r["train_rollout_logprob_abs_diff/max"] for r in rows) < 1e-4
    assert all(r["update_successful"] == r["critic/update_successful"] == 1 for r in rows)
    assert rows[0]["critic/explained_variance"] == 0  # all values were
    # scores, where the function gives ones and zeros to 32 samples
    assert all(r["reward/mean"] * 32 % 1 and r["timing/reward_model_s"] > 0 for r in rows)
    assert all(r["perf/mfu"] == r["perf/tflops_per_gpu"] / 0.001 > 0 for r in rows)
    files = {f"steps_{n}-{n}.rank{r}.json.gz" for n in (2, 3) for r in (0, 1)}
    assert {p.name for p in (run / "profile").iterdir()} == files
    assert all(r["critic/n_updates"] == 4 and r["critic/value"] != 0 for r in rows[1:])
    critic = AutoModelForTokenClassification.from_pretrained(run / "critic" / "final")
    assert critic.num_labels == 1 and critic.score.weight.any()
    AutoModelForCausalLM.from_pretrained(run / "final")
    check_books(run, done.stdout, prompts=8, samples=4)


@pytest.mark.full
def test_ppo_as_a_graph_gives_the_weights_of_the_recipe(model, tmp_path):
    """On meshes of its own for each model, with a checkpoint between. The bits of the servers'
    logprobs depend on which requests meet in a batch, but for the deterministic mode."""
    keys = [
        f"actor.path={model}", f"fileroot={tmp_path}", "experiment_name=e",
        "train_dataset.batch_size=8", "train_dataset.size=40", "train_dataset.options.level=1",
        "actor.parallel.sequence_parallel=true", "actor.optimizer.lr=1e-3",
        "critic.optimizer.lr=1e-3", "valid_dataset=null", "gconfig.seed=1",
        "server.deterministic=true", "server.threads=1",
    ]  # fmt: skip
    done = launch("quickstart_ppo.yaml", *keys, "total_train_steps=3")
    assert done.returncode == 0, done.stdout
    for steps in (2, 3):
        done = launch("../examples/ppo_graph.yaml", *keys, f"total_train_steps={steps}", nproc=4)
        assert done.returncode == 0, done.stdout
    assert "from step 2 of 3 (version 2)" in done.stdout, done.stdout
    plain, graph = tmp_path / "e" / "ppo", tmp_path / "e" / "ppo_graph"
    for part in ("final", "critic/final"):
        one, other = (load_file(run / part / "model.safetensors") for run in (plain, graph))
        assert one.keys() == other.keys()
        assert not [name for name in one if not torch.equal(one[name], other[name])], part
    clocks = re.compile(r"time|elapsed_s|(timing|perf|memory|weight_sync)/|rollout/(lat|loop|wait)")
    for row, same in zip(stats(plain), stats(graph), strict=True):
        apart = [n for n in row.keys() | same.keys() if row.get(n) != same.get(n)]
        assert not [name for name in apart if not clocks.match(name)]
    events = list(trace_events(read_timeline(graph), {}))
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows >= {"calls on g0-g1", "calls on g2-g3", "calls on servers"}
    assert {e["name"] for e in events} >= {"train_actor", "train_critic"}
    check_books(graph, done.stdout, prompts=8, samples=4)


@pytest.mark.system
def test_torchrun_against_a_running_server(model, tmp_path):
    """As in the README: servers elsewhere, plain torchrun, two steps; the server stays up. It
    starts from other weights than the actor's, and must not generate with them.
    """
    flags = ("--context-length", "64", "--dtype", "float32")
    with embedded_server(model.parents[2] / "model", *flags, log=tmp_path / "server.log") as server:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command += ["megarl/run.py", "--config", "configs/quickstart_grpo.yaml"]
        command += [f"rollout.addresses=[127.0.0.1:{server.port}]", f"actor.path={model}"]
        command += [f"fileroot={tmp_path}", "total_train_steps=2", "valid_dataset=null"]
        command += ["train_dataset.batch_size=8", "train_dataset.options.level=1"]
        command += ["train_dataset.size=40", "ref=null", "experiment_name=e"]
        done = subprocess.run(
            command, cwd=ROOT, timeout=300, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert server.get("/model_info")[1]["weight_version"] == "2"
    rows = stats(tmp_path / "e" / "grpo")
    assert [r["step"] for r in rows] == [1, 2]
    assert max(r["train_rollout_logprob_abs_diff/max"] for r in rows) < 1e-4


@pytest.mark.full
def test_servers_that_do_not_answer_are_named(model, tmp_path):
    done = launch(
        "quickstart_grpo.yaml", f"actor.path={model}", f"fileroot={tmp_path}",
        "rollout.addresses=[127.0.0.1:9]", "rollout.setup_timeout=2",
    )  # fmt: skip
    assert done.returncode != 0
    assert "127.0.0.1:9" in done.stdout
