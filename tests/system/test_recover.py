"""Runs that are killed with SIGKILL and started again with the same command."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, LlamaForSequenceClassification

from megarl.cli.diff import diff
from megarl.observability.episodes import read_bytes, read_index, unpack
from tests.tiny import save_tiny, tiny_hf
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "system" / "recover_run.py"
STEPS = 5  # of 3 in an epoch, with a checkpoint after every second
SIGKILLED = (-9, 137)

COMMON = [
    "experiment_name=e", "trial_name=t", f"total_train_steps={STEPS}", "total_train_epochs=9",
    "train_dataset.size=12", "train_dataset.batch_size=4", "train_dataset.options.level=1",
    "recover.freq_steps=2", "saver.freq_steps=2", "evaluator.freq_steps=2",
    "valid_dataset.size=4", "valid_dataset.options.level=1", "valid_dataset.split=test",
    "stats_logger.table=false",
    "collective_timeout=120",
]  # fmt: skip
OPTIMIZER = ["lr=1e-2", "lr_scheduler_type=linear", "warmup_steps=0.4"]
GRPO = [
    "recipe=grpo", *(f"actor.optimizer.{o}" for o in OPTIMIZER), "actor.ppo_n_minibatches=2",
    "gconfig.n_samples=4", "gconfig.max_new_tokens=8", "gconfig.seed=7",
    "eval_gconfig.max_new_tokens=4", "server.deterministic=true", "server.context_length=64",
    "server.threads=1", "train_dataset.reward=tests.system.recover_run:even",
]  # fmt: skip
SFT = ["recipe=sft", *(f"model.optimizer.{o}" for o in OPTIMIZER)]
# in place of the plain data set: two parts, by weight and by pass rate, and a second validation set
MIXED = [
    "train_dataset.type=mix", "train_dataset.size=null", "train_dataset.options={}",
    "train_dataset.reward.type=", "train_dataset.curriculum.passes_at=0.5",
    "train_dataset.curriculum.explore=0.5", "valid_datasets.two.options.level=2",
    "valid_datasets.two.split=test", "valid_datasets.two.size=4",
    "train_dataset.parts.one.reward=tests.system.recover_run:even",
    "train_dataset.parts.two.reward=tests.system.recover_run:even",
    "train_dataset.parts.one.size=5", "train_dataset.parts.one.options.level=1",
    "train_dataset.parts.two.size=7", "train_dataset.parts.two.weight=2",
]  # fmt: skip
# a reference in another layout that follows the policy, and a weight of the KL that follows the KL
FOLLOWED = [
    "ref.parallel.pp=2", "ref.ema=0.9", "actor.kl_coef=0.1", "actor.kl_controller.target=0.01",
    "actor.kl_controller.horizon=64",
]  # fmt: skip
LAYOUTS = {
    "tp2": ["actor.parallel.tp=2"],
    "pp2": ["actor.parallel.pp=2"],
    "dp2": ["weight_sync.type=disk"],
}
VERIFIED = "tensors agree with all ranks of server"


@dataclass
class Run:
    """A command, and the directory it writes to."""

    root: Path
    command: tuple[str, ...]
    nproc: int = 2

    @property
    def dir(self) -> Path:
        return self.root / "e" / "t"

    def start(
        self,
        *more: str,
        kill: str = "",
        everything: bool = True,
        nproc: int = 0,
        rows: str = "",
        asked: str = "",
        number: int = 0,
    ) -> tuple[int, str]:
        """Runs to the end, or until it is killed at `kill`, where with `number` the launcher gets
        that signal instead; the status and the output. `rows`: a file for those trained on;
        `asked`: one for the requests.
        """
        env = os.environ | {"OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu"}
        env |= {"ROWS": str(self.root / rows)} if rows else {}
        env |= {"ASKED": str(self.root / asked)} if asked else {}
        if kill:
            env |= {"KILL": kill, "KILLED": str(self.root / f"killed-{kill}")}
            env |= {"KILL_ALL": "1"} if everything else {}
            env |= {"NUMBER": str(number)} if number else {}
        done = subprocess.run(
            [sys.executable, "-m", "megarl.launcher.local", str(SCRIPT), "--nproc",
             str(nproc or self.nproc), f"fileroot={self.root}", *self.command, *more],
            cwd=ROOT, env=env, timeout=300, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if kill:
            killed = self.root / f"killed-{kill}"
            assert killed.exists(), done.stdout  # it ended otherwise
            pids = json.loads(killed.read_text())
            assert len(pids) >= self.nproc
            deadline = time.monotonic() + 30.0
            while left := [p for p in pids if alive(p)]:
                assert time.monotonic() < deadline, f"processes {left} of the run are left"
                time.sleep(0.1)
        return done.returncode, done.stdout

    def finish(self, *more: str, **kw: Any) -> str:
        status, output = self.start(*more, **kw)
        assert status == 0, output
        return output

    def episodes(self) -> dict[tuple[int, int, str], tuple[Any, Any]]:
        """What is recorded of every group that counts, but for how long it took."""
        found = {}
        for line in read_index(self.dir):
            record = unpack(read_bytes(self.dir, line))
            arrays = {name: values.tobytes() for name, values in record.arrays.items()}
            key = line["step"], line["episode"]
            found[key] = record.about | {"latency": None}, arrays
        return found

    def rows(self, name: str = "stats") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / f"{name}.jsonl").read_text().splitlines()]

    def figures(self) -> list[dict[str, Any]]:
        """stats.jsonl without what depends on the clock."""
        clocks = (
            r"time|elapsed_s|(timing|weight_sync|perf|memory)/.*|"
            r"rollout/(wait_time|latency_\w+|(loop|worker)_lag)"
        )
        return [{k: v for k, v in r.items() if not re.fullmatch(clocks, k)} for r in self.rows()]

    def trained_rows(self, name: str) -> list[list[int]]:
        return [json.loads(line) for line in (self.root / name).read_text().splitlines()]

    def asked(self, name: str) -> list[str]:
        """Begun requests: those for samples without a token."""
        lines = (self.root / name).read_text().splitlines()
        return [line for line in lines if not any(json.loads(line))]

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.dir / "final" / "model.safetensors")

    def leftovers(self) -> list[Path]:
        return [p for p in self.dir.rglob(".*") if ".tmp-" in p.name or ".old-" in p.name]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny(tmp_path_factory.mktemp("model"), "qwen3", layers=2)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of a layout (or of other overrides) that nobody killed; made once."""
    runs: dict[tuple[str, ...], Run] = {}

    def get(*command: str, nproc: int = 2) -> Run:
        if command not in runs:
            runs[command] = Run(tmp_path_factory.mktemp("whole"), command, nproc)
            runs[command].finish()
        return runs[command]

    return get


def grpo(model: Path, layout: str, *more: str) -> tuple[str, ...]:
    return (*GRPO, *COMMON, *LAYOUTS[layout], f"actor.path={model}", *more)


def check_same(run: Run, whole: Run, model: Path, *, generates: bool = True) -> None:
    """Bitwise the same weights and figures, and the training did something. generates: the run has
    episodes of every step."""
    before = load_file(model / "model.safetensors")
    after, expected = run.weights(), whole.weights()
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[k], expected[k]) for k in expected)
    assert sum(not torch.equal(before[k], after[k]) for k in before) > len(before) // 2
    assert [r["step"] for r in run.rows()] == list(range(STEPS + 1))
    assert run.figures() == whole.figures()
    assert run.episodes() == whole.episodes()
    assert {step for step, _ in run.episodes()} == set(range(1, STEPS + 1) if generates else ())
    elapsed = [r["elapsed_s"] for r in run.rows()]
    assert elapsed == sorted(elapsed)
    assert not run.leftovers()
    kept = sorted(p.name for p in (run.dir / "recover").glob("step_*"))
    assert kept == [f"step_{step:06d}" for step in (STEPS - 1, STEPS)]


def rewards_differ(whole: Run) -> bool:
    return all(r["reward/groups_all_equal"] < 1 for r in whole.rows() if r["step"])


def test_killed_twice_and_started_again(model, uninterrupted, tmp_path):
    """In the update of step 5, while the checkpoint after step 4 is written behind it; and again
    before that checkpoint is renamed, with all its files there, at the end of step 5."""
    whole = uninterrupted(*grpo(model, "tp2", *MIXED, *FOLLOWED))
    assert rewards_differ(whole)
    coefs = [row["kl_coef"] for row in whole.rows()[1:]]
    assert coefs[0] == 0.1 and len(set(coefs)) == STEPS and whole.rows()[-1]["kl_ref"] > 0
    run = Run(tmp_path, grpo(model, "tp2", *MIXED, *FOLLOWED))
    for kill in ("writing:4", "checkpoint:4"):
        status, output = run.start(kill=kill)
        assert status in SIGKILLED, output
        assert VERIFIED in output and run.leftovers()
    output = run.finish()
    assert re.search(r"continuing \S+ from step 2 of 5 \(version 2\)", output), output
    assert VERIFIED in output  # after a resume as at the start
    check_same(run, whole, model)
    assert run.rows("samples") == whole.rows("samples")
    last = run.rows()[-1]
    # of 5 batches of 4 draws, one third and two thirds; of 12 rows not all are in the band
    drawn = [sum(r[f"dataset/{part}/prompts"] for r in run.rows()[1:]) for part in ("one", "two")]
    assert drawn == [7, 13] and 0 < last["curriculum/in_band"] < last["curriculum/answered"]
    assert 10 <= last["curriculum/explored"] < 20
    assert {"eval/accuracy", "eval/two/accuracy"} <= set(last)
    assert [r["step"] for r in run.rows("stats.superseded")] == [3, 4, 3, 4, 5]


def test_answers_of_the_step_under_way_are_not_made_again(model, uninterrupted, tmp_path):
    """Killed in the update of step 3, with its answers written beside the checkpoint of step 2."""
    whole = uninterrupted(*grpo(model, "tp2", *MIXED, *FOLLOWED))
    run = Run(
        tmp_path,
        grpo(
            model, "tp2", *MIXED, *FOLLOWED, "recover.async_save=false", "recover.answers_secs=1e-3"
        ),
    )
    status, output = run.start(kill="update:3", asked="first")
    assert status in SIGKILLED and "answers so far: " in output, output
    output = run.finish(asked="second")
    assert "going on with 16 answers of before, of" in output, output
    check_same(run, whole, model)
    # steps 1 to 3, then 4 and 5: 4 prompts each
    assert [len(run.asked(name)) for name in ("first", "second")] == [12, 8]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, so that any two answers differ in their score; without a bias."""
    path = tmp_path_factory.mktemp("reward_model")
    config = tiny_hf("llama", layers=2).config
    config.num_labels = 1
    torch.manual_seed(3)
    LlamaForSequenceClassification(config).save_pretrained(path)
    return path


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ppo_killed_and_started_again(model, reward_model, uninterrupted, tmp_path):
    """Actor, critic, reference and reward model, each in its own layout. Both trained models
    continue, and both come out as directories that transformers loads.
    """
    ppo = [
        "recipe=ppo", *LAYOUTS["tp2"], "actor.adv_norm=batch", "kl_ctl=0.01", "gae_lambda=0.9",
        "gae.bootstrap=true", "critic.parallel.pp=2", "critic.ppo_n_minibatches=2",
        *(f"critic.optimizer.{o}" for o in OPTIMIZER), "ref.parallel.pp=2",
        f"reward_model.path={reward_model}", "reward_model.parallel.tp=2",
        "reward_model.parallel.sequence_parallel=true",
    ]  # fmt: skip
    command = (*GRPO[1:], *COMMON, *ppo, f"actor.path={model}")
    whole = uninterrupted(*command)
    run = Run(tmp_path, command)
    status, output = run.start(kill="update:4")
    assert status in SIGKILLED, output
    assert "continuing" in run.finish()
    check_same(run, whole, model)
    values = [AutoModelForTokenClassification.from_pretrained(
        r.dir / "critic" / "final").state_dict() for r in (run, whole)]  # fmt: skip
    assert values[0]["score.weight"].any()  # it started as zero
    assert all(torch.equal(values[0][k], values[1][k]) for k in values[1])
    for row in whole.rows()[1:]:
        assert row["update_successful"] == row["critic/update_successful"] == 1
        assert row["critic/grad_norm"] > 0 and row["reward/std"] > 0
    assert {p.name for p in (run.dir / "critic" / "hf").iterdir()} == {"step_000002", "step_000004"}


# Where a start goes on from is exact only with checkpoints that are whole when their step ends.
AT_ONCE = "recover.async_save=false"
# phase:step of the kills of one run, and the step the next start continues from
CHAIN = {
    "rollout:1": 0, "eval:2": 0, "update:2": 0, "sync:3": 2, "rollout:4": 2, "eval:4": 2,
    "hf_save:4": 2, "engine_save:4": 2, "checkpoint:4": 2, "update:5": 4, "hf_save:0": 5,
}  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_in_every_phase(layout, model, uninterrupted, tmp_path):
    """One run, killed in one phase after the other, ends as if nothing had been."""
    whole = uninterrupted(*grpo(model, layout))
    assert rewards_differ(whole)
    run, done = Run(tmp_path, grpo(model, layout, AT_ONCE)), 0
    for kill, next_start in CHAIN.items():
        status, output = run.start(kill=kill)
        assert status in SIGKILLED, output
        assert ("continuing" in output) == (done > 0)
        assert not done or f"from step {done} of {STEPS}" in output
        done = next_start
    output = run.finish()
    assert "ended at step 5 of 5: nothing to do" in output
    check_same(run, whole, model)


def test_signals_end_a_run_with_a_checkpoint(model, uninterrupted, tmp_path):
    """SIGTERM while answers are generated: that step begins anew. SIGINT in an update: the step is
    finished first. What is damaged then costs one step."""
    command = grpo(model, "tp2", *MIXED)
    whole, run = uninterrupted(*command), Run(tmp_path, command)
    for kill, number, done in (("rollout:2", signal.SIGTERM, 1), ("update:3", signal.SIGINT, 3)):
        status, output = run.start(kill=kill, number=number)
        assert status == 128 + number and "Traceback" not in output, output
        assert f"stopped by a signal after step {done}: the same command goes on from" in output
        newest = max((run.dir / "recover").iterdir())
        assert newest.name == f"step_{done:06d}" and not run.leftovers()
    # and bytes of the newest are lost: both ranks take the one before
    part = next((newest / "actor").glob("__1_*.distcp"))
    content = part.read_bytes()
    part.write_bytes(content[:1000] + bytes(b ^ 0x55 for b in content[1000:1064]) + content[1064:])
    output = run.finish()
    assert "step_000003 is not whole" in output and "from step 2 of 5" in output
    check_same(run, whole, model)


def test_a_file_asks_for_a_checkpoint_and_the_run_goes_on(model, tmp_path, monkeypatch):
    """In the update of step 3; a start that goes on from that checkpoint is the same run, too."""
    command = (*SFT, *COMMON, f"model.path={model}", "recover.freq_steps=null")
    whole, run = (Run(tmp_path / name, command) for name in ("whole", "run"))
    whole.finish()
    monkeypatch.setenv("INSTEAD", f"touch {run.dir}/SAVE")
    status, output = run.start(kill="update:2")  # with the rate of 2 steps before it
    assert status == 0 and f"checkpoint {run.dir}/recover/step_000003" in output, output
    assert not (run.dir / "SAVE").exists() and not run.leftovers()
    kept = sorted(p.name for p in (run.dir / "recover").iterdir())
    assert kept == ["step_000003", "step_000005"]
    figures, weights = whole.figures(), whole.weights()
    assert run.figures() == figures
    assert all(torch.equal(run.weights()[k], w) for k, w in weights.items())
    for path in (run.dir / "recover" / "step_000005", run.dir / "final"):
        shutil.rmtree(path)
    assert "from step 3 of 5" in run.finish()
    assert run.figures() == figures
    assert all(torch.equal(run.weights()[k], w) for k, w in weights.items())


CONTROLLER = "trainer.mode=controller"


def test_under_a_controller(model, uninterrupted, tmp_path):
    """Killed before the checkpoint of step 4 is renamed and started again, it is to the bit the run
    of ranks that nobody killed."""
    whole = uninterrupted(*grpo(model, "tp2", *MIXED, *FOLLOWED))
    run = Run(tmp_path, grpo(model, "tp2", *MIXED, *FOLLOWED, CONTROLLER, AT_ONCE))
    run.dir.mkdir(parents=True)
    (run.dir / "SAVE").touch()
    status, output = run.start(kill="checkpoint:4")
    assert status in SIGKILLED and run.leftovers(), output
    assert (run.dir / "recover" / "step_000001").exists() and not (run.dir / "SAVE").exists()
    assert re.search(r"continuing \S+ from step 2 of 5 \(version 2\)", run.finish())
    check_same(run, whole, model)
    assert run.rows("samples") == whole.rows("samples")
    seen = json.loads((run.dir / "processes" / "rank_0.json").read_text())
    assert (seen["name"], seen["state"], seen["total_steps"]) == ("controller", "ended", STEPS)
    assert diff(run.dir, whole.dir, steps=None, shown=10) == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_controller_and_ranks_continue_each_other(model, uninterrupted, tmp_path):
    """Two steps under a controller, until a signal; two by ranks, until they are killed; the rest
    under a controller."""
    command = grpo(model, "tp2", *MIXED)
    run = Run(tmp_path, (*command, AT_ONCE))
    status, output = run.start(CONTROLLER, kill="checkpoint:2", number=signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and "Traceback" not in output, output
    assert re.search(r"stopped by a signal after step [23]: the same command", output), output
    status, output = run.start(kill="update:5")
    assert status in SIGKILLED and "continuing" in output, output
    assert "from step 4 of 5" in run.finish(CONTROLLER)
    check_same(run, uninterrupted(*command), model)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ppo_under_a_controller(model, reward_model, uninterrupted, tmp_path):
    ppo = [
        "recipe=ppo", *LAYOUTS["tp2"], "critic.parallel.pp=2", "critic.ppo_n_minibatches=2",
        *(f"critic.optimizer.{o}" for o in OPTIMIZER), "ref.parallel.pp=2", "kl_ctl=0.01",
        f"reward_model.path={reward_model}",
    ]  # fmt: skip
    command = (*GRPO[1:], *COMMON, *ppo, f"actor.path={model}")
    run = Run(tmp_path, (*command, CONTROLLER))
    run.finish()
    check_same(run, uninterrupted(*command), model)


@pytest.mark.full
def test_the_error_of_a_worker_ends_the_run(model, tmp_path):
    run = Run(
        tmp_path, grpo(model, "dp2", CONTROLLER, "actor.loss=tests.system.recover_run:broken")
    )
    status, output = run.start()
    assert status == 1 and "worker trainers/" in output, output
    assert "ZeroDivisionError" in output and "recover_run.py" in output
    assert json.loads((run.dir / "summary.json").read_text())["status"].startswith("failed")


@pytest.mark.full
@pytest.mark.parametrize(
    ("kill", "mode"), [("update:4", "trainer.mode=spmd"), ("checkpoint:4", CONTROLLER)]
)
def test_the_launcher_starts_a_failed_run_again(kill, mode, model, uninterrupted, tmp_path):
    """One rank, or the controller, is killed; the launcher ends the rest, and its second start goes
    on from step 2."""
    run = Run(tmp_path, grpo(model, "tp2", AT_ONCE, mode))
    output = run.finish("recover.restarts=1", kill=kill, everything=False)
    assert "starting again, 0 restart(s) left" in output and "from step 2 of 5" in output
    check_same(run, uninterrupted(*grpo(model, "tp2")), model)


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_dp_goes_on_with_the_same_data(before, after, model, tmp_path):
    command = grpo(model, "dp2", AT_ONCE)
    whole, run = Run(tmp_path / "a", command), Run(tmp_path / "b", command)
    for r in (whole, run):
        r.root.mkdir()
    whole.finish(rows="rows")
    status, output = run.start(kill="rollout:4", nproc=before, rows="first")
    assert status in SIGKILLED, output
    run.finish(nproc=after, rows="second")
    seen = whole.trained_rows("rows")
    assert len(seen) == STEPS and sorted(chain(*seen[:3])) == list(range(12))
    assert run.trained_rows("first") == seen[:3] and run.trained_rows("second") == seen[2:]
    assert [r["step"] for r in run.rows()] == list(range(STEPS + 1))


@pytest.mark.full
@pytest.mark.parametrize("kill", ["rollout:4", "update:4", "sync:4", "checkpoint:4"])
def test_asynchronous_runs_continue(kill, model, tmp_path):
    """Nothing is lost or trained twice: the prompts in flight come again, in order."""
    run = Run(tmp_path, grpo(model, "tp2", "rollout.max_head_offpolicyness=2", AT_ONCE))
    status, output = run.start(kill=kill, rows="first")
    assert status in SIGKILLED, output
    run.finish(rows="second")
    trained = run.trained_rows("first")[:2] + run.trained_rows("second")
    last = run.rows()[-1]
    assert len(trained) == STEPS and last["rollout/trained"] == 4 * STEPS
    if not last["rollout/dropped"]:
        assert sorted(chain(*trained[:3])) == list(range(12))
    assert max(r["staleness/max"] for r in run.rows()[1:]) <= 2
    assert [r["step"] for r in run.rows()] == list(range(STEPS + 1))


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["tp", "pp", "dp"])
def test_sft(parallel, model, uninterrupted, tmp_path):
    layout = [] if parallel == "dp" else [f"model.parallel.{parallel}=2"]
    command = (*SFT, *COMMON, *layout, f"model.path={model}")
    whole = uninterrupted(*command)
    run = Run(tmp_path, command)
    for kill in ("update:1", "update:4", "engine_save:4", "checkpoint:4", "hf_save:4", "hf_save:0"):
        status, output = run.start(kill=kill)
        assert status in SIGKILLED, output
    assert "ended at step 5 of 5" in run.finish()
    check_same(run, whole, model, generates=False)


@pytest.mark.full
def test_a_finished_run(model, tmp_path):
    """Started again it does nothing; with more steps it goes on; it is not overwritten."""
    run = Run(tmp_path, (*SFT, *COMMON, f"model.path={model}"), nproc=1)
    run.finish()
    figures, final = run.figures(), (run.dir / "final").stat().st_mtime_ns
    assert "ended at step 5 of 5: nothing to do" in run.finish()
    assert run.figures() == figures and (run.dir / "final").stat().st_mtime_ns == final
    output = run.finish("total_train_steps=7")
    assert "total_train_steps: 5 -> 7" in output and "from step 5 of 7" in output
    assert [r["step"] for r in run.rows()] == list(range(8)) and run.figures()[:6] == figures
    assert (run.dir / "final").stat().st_mtime_ns > final
    assert "total_train_steps: 5" in (run.dir / "config.1.yaml").read_text()
    status, output = run.start("recover.mode=disabled")
    assert status == 2 and "holds a run already" in output and str(run.dir) in output
