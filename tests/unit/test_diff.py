"""Fingerprints name the first step, phase and tensor in which two runs differ."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algos import Actor, Ref
from megarl.api.batch import Batch, Home, Tokens
from megarl.cli.diff import main as diff
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, save_config
from megarl.config.run import batch_path, recorded_steps
from megarl.models.params import init_params
from megarl.models.piece_table import build_piece_table
from megarl.observability import run_log as fp
from megarl.observability.run_log import FingerprintFile, RunLog, compare, read_fingerprints
from megarl.parallel.layout import Layout
from megarl.trainer import step_recorder
from megarl.trainer.step_recorder import StepRecorder, field_fingerprints, read_batch
from megarl.utils.files import Fingerprint
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import hash_text, tensor_hash
from megarl.weight_sync.verify import weight_hashes
from tests.full_disk import files_below
from tests.unit.bigram import BigramEngine, rollout
from tests.unit.family_configs import config as family

STEPS, BROKEN = 3, 2  # a bug is there in step 2 alone
RECORD = ("record.keep=2",)


class Engine(BigramEngine):
    """Tells the fingerprints of its table, as two tensors."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"low": self.table.detach()[:5], "high": self.table.detach()[5:]}

    def fingerprints(self):
        return {
            name: Fingerprint(hash_text(tensor_hash(t)), float(t.norm()))
            for name, t in self.tensors().items()
        }


@cache
def loaded(*keys: str) -> Any:
    return load_config(None, keys)


class Run:
    """A small run of GRPO in this process: `bugs` are called where something can go wrong."""

    def __init__(self, root: Path, monkeypatch: Any, *keys: str, **bugs: Any) -> None:
        self.dir, self.bugs = root, bugs
        self.cfg = loaded("record.servers=true", "actor.ppo_n_minibatches=2", *keys)
        zero = SimpleNamespace(size=1, is_zero=True)
        ctx: Any = SimpleNamespace(run_dir=root, ranks=zero)
        self.record = StepRecorder(self.cfg, ctx, dataset_size=40)
        self.actor: Any = Actor(self.cfg.actor, Engine(), temperature=1.0)
        other = Engine()
        other.table.data += 0.1
        self.ref: Any = Ref(self.cfg.actor, other, temperature=1.0)
        self.record.watch({"actor": self.actor})
        self.served = {n: t.clone() for n, t in self.actor.engine.tensors().items()}
        monkeypatch.setattr(step_recorder, "held_checksums", self.held)

    def held(self, addresses: list[str], deadline: Any) -> dict[str, list[dict[str, str]]]:
        return {"s": [{n: hash_text(tensor_hash(t)) for n, t in self.served.items()}]}

    def go(self, steps: int = STEPS) -> Run:
        for step in range(1, steps + 1):
            self.step(step)
            if self.cfg.record.get("keep"):
                self.written(step)
        self.record.close()
        return self

    def written(self, step: int) -> None:
        """Waits for a step's batch, as the disk may be one batch behind, no more."""
        deadline = time.monotonic() + 30
        while not batch_path(self.dir, step).exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    def bug(self, where: str, step: int, value: Any = None) -> Any:
        if step == BROKEN and where in self.bugs:
            found = self.bugs[where](self if value is None else value)
            return value if found is None else found
        return value

    def step(self, step: int) -> None:
        actor, engine = self.actor, self.actor.engine
        engine.set_version(step - 1)
        self.record.begin_step(step)
        padded = rollout(engine)
        padded["versions"] = torch.where(padded["loss_mask"], step - 1, -1).int()
        batch = Batch.from_padded(self.bug("rollout", step, padded))
        batch = self.bug("batch", step, batch)
        self.record.handed_out(batch)
        self.bug("scored", step, batch)
        self.bug("before_logp", step)
        actor.compute_prox_logp(batch)
        batch["ref_logp"] = self.ref.compute_logp(batch)
        self.bug("after_logp", step, batch)
        actor.compute_advantages(batch)
        self.bug("after_advantages", step, batch)
        self.bug("before_update", step)
        actor.ppo_update(batch)
        self.record.computed(batch)
        self.bug("after_update", step)
        for name, tensor in engine.tensors().items():
            if name != self.bug("sync", step, "every one"):
                self.served[name] = tensor.clone()
        self.record.end_step(["s"])


def swapped(field: str, *rows: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def swap(padded: dict[str, torch.Tensor]) -> None:
        a, b = rows
        padded[field][[a, b]] = padded[field][[b, a]]

    return swap


def changed(field: str, fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Batch], None]:
    def change(batch: Batch) -> None:
        old = batch[field]
        new = fn(old.values) if isinstance(old, Tokens) else fn(old)
        batch[field] = Tokens(new, old.lengths) if isinstance(old, Tokens) else new

    return change


def flipped_bit(run: Run) -> None:
    run.actor.engine.table.data.view(torch.int32)[7, 3] ^= 1


def other_mask_in_the_update(run: Run) -> None:
    once, inner = [True], run.actor.update_check.train_batch

    def train_batch(engine: Any, data: Batch, *args: Any, **kw: Any) -> Any:
        if once:
            once.clear()
            changed("loss_mask", torch.ones_like)(data)
        return inner(engine, data, *args, **kw)

    run.actor.update_check = SimpleNamespace(train_batch=train_batch)


def other_rate(run: Run) -> None:
    run.actor.engine.lr *= 1.0001


def doubled_gradient(run: Run) -> None:
    run.actor.engine.table.grad = torch.full_like(run.actor.engine.table, 1e-3)


def set_temperature(run: Run) -> None:
    run.actor.temperature = 0.99


def moved_reference(run: Run) -> None:
    run.ref.engine.table.data[0, 0] += 1e-3


SHUFFLED = torch.arange(16).flip(0)
BUGS: dict[str, tuple[dict[str, Any], str]] = {
    "a dropped row": ({"batch": lambda b: b.keep(torch.arange(16) != 5)},
                      "rollout: lengths: int64 [16 rows] and int64 [15 rows]"),
    "shuffled rows": ({"rollout": lambda p: {k: v[SHUFFLED] for k, v in p.items()}},
                      "rollout: input_ids: the same rows in another order"),
    "a swapped mask": ({"rollout": lambda p: p | {"loss_mask": ~p["loss_mask"]}},
                       "rollout: loss_mask: norm "),
    "a wrong weight version": ({"rollout": lambda p: p | {"versions": p["versions"] + 1}},
                               "rollout: versions: norm "),
    "rewards of another row": ({"rollout": swapped("rewards", 0, 9)},
                               "rollout: rewards: the same rows in another order"),
    "a filter between": ({"scored": changed("rewards", lambda r: 2 * r)},
                         "batch: rewards: norm "),
    "a temperature": ({"before_logp": set_temperature}, "logp: prox_logp: norm "),
    "a reference that moved": ({"before_logp": moved_reference}, "ref: ref_logp: norm "),
    "advantages negated": ({"after_advantages": changed("advantages", torch.neg)},
                           "advantages: advantages: norm "),
    "a different loss mask": ({"before_update": other_mask_in_the_update},
                              "update 1: loss_mask: norm "),
    "a gradient that stayed": ({"before_update": doubled_gradient}, "update 1: grad_norm: "),
    "a learning rate": ({"before_update": other_rate}, "update 1: lr: "),
    "a flipped bit in a weight": ({"after_update": flipped_bit}, "weights: high: norm "),
    "a stale tensor in the sync": ({"sync": lambda _: "low"}, "servers: low: not the same bits"),
}  # fmt: skip


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return Run(tmp_path_factory.mktemp("right"), patch, *RECORD).go()


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named(name, right, tmp_path, monkeypatch, capsys):
    bugs, said = BUGS[name]
    Run(tmp_path, monkeypatch, **bugs).go(BROKEN)
    assert diff([str(right.dir), str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"step {BROKEN}, {said}"), lines
    assert lines[-1] == "no difference before it, in step 1"


def test_equal_runs_have_no_difference(right, tmp_path, monkeypatch, capsys):
    Run(tmp_path, monkeypatch).go()
    assert diff([str(right.dir), str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no difference in steps 1-3: ")


def test_configurations_and_machines_that_differ_are_shown(right, tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, monkeypatch, "gconfig.temperature=0.5").go(1)
    before = right.dir / "config.yaml"
    save_config(right.cfg, before)
    save_config(run.cfg, tmp_path / "config.yaml")
    text = (tmp_path / fp.FINGERPRINTS_FILE).read_text()
    (tmp_path / fp.FINGERPRINTS_FILE).write_text(text.replace('"world_size":1', '"world_size":2'))
    assert diff([str(right.dir), str(tmp_path)]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    before.unlink()  # the other tests compare without
    assert first == "not the same: world_size: 1 | 2"
    assert second == "configuration: gconfig.temperature: 1.0 | 0.5"


def test_what_cannot_be_compared_is_told(right, tmp_path):
    with pytest.raises(ConfigError, match="no fingerprints; no step has begun"):
        diff([str(right.dir), str(tmp_path)])
    with pytest.raises(ConfigError, match="no step of 7-9 that both runs recorded"):
        diff([str(right.dir), str(right.dir), "--steps", "7-9"])
    with pytest.raises(ConfigError, match="required: RUN_B"):
        diff([str(right.dir)])


# ---- what is on disk


def test_a_start_supersedes_the_steps_it_makes_again(right, tmp_path):
    file = FingerprintFile(tmp_path)
    file.begin(0, {"world_size": 1})
    for step in (1, 2, 3):
        file.append(step, fp.ROLLOUT, {"x": Fingerprint("a")})
    with (tmp_path / fp.FINGERPRINTS_FILE).open("a") as f:
        f.write('{"step": 4, "ph')  # killed here
    RunLog(tmp_path / fp.FINGERPRINTS_FILE).begin(1)
    FingerprintFile(tmp_path).begin(1, {"world_size": 2})
    FingerprintFile(tmp_path).append(2, fp.ROLLOUT, {"x": Fingerprint("b")})
    found = read_fingerprints(tmp_path)
    assert found.start == {"world_size": 2} and list(found.steps) == [1, 2]
    assert found.steps[2][fp.ROLLOUT]["x"].bits == "b"


def test_long_runs_list_weights_no_longer(right, tmp_path, monkeypatch):
    """Then the hash of all of them is compared with the list of a run that still has it."""
    monkeypatch.setattr(fp, "DETAIL_BYTES", 0)
    Run(tmp_path / "same", monkeypatch).go()
    Run(tmp_path / "other", monkeypatch, after_update=flipped_bit).go(BROKEN)
    mine = read_fingerprints(right.dir)
    same, other = (read_fingerprints(tmp_path / n) for n in ("same", "other"))
    assert list(same.steps[1][fp.WEIGHTS]) == [fp.ALL]
    assert compare(mine, same).phase is None
    found = compare(mine, other)
    assert (found.steps[-1], found.phase) == (BROKEN, fp.WEIGHTS)


def test_the_newest_batches_are_kept_and_those_asked_for(right):
    assert recorded_steps(right.dir) == [2, 3]
    rows, about = read_batch(batch_path(right.dir, 3))
    assert about == {"step": 3, "dataset_size": 40} and len(rows) == 16
    again = field_fingerprints(Batch.from_local(rows))
    recorded = read_fingerprints(right.dir).steps[3][fp.ROLLOUT]
    assert {n: f.bits for n, f in again.items()} == {n: f.bits for n, f in recorded.items()}


def test_old_batches_go(tmp_path, monkeypatch):
    for step in (1, 2):
        run = Run(tmp_path, monkeypatch, "record.keep=1")
        run.step(step)
        run.record.close()  # else the second could find the disk behind
    assert recorded_steps(tmp_path) == [2]


def test_a_full_disk_is_told_and_ends_nothing(tmp_path, monkeypatch, caplog):
    logger = logging.getLogger("megarl")
    monkeypatch.setattr(logger, "propagate", True)
    run = Run(tmp_path, monkeypatch, "record.keep=1")
    with files_below(200), caplog.at_level(logging.ERROR):
        run.step(1)
        run.step(2)
        run.record.close()
    said = {r.getMessage() for r in caplog.records}
    assert sum("fingerprints are not recorded from step 1 on" in text for text in said) == 1
    assert sum("not recorded: the batch of step 1: DiskFull" in text for text in said) == 1


def test_numbers_of_a_file_are_json(right):
    for line in (right.dir / fp.FINGERPRINTS_FILE).read_text().splitlines():
        assert not line or json.loads(line)


# ---- hashes


class ThreadComm:
    """Is the Comm of a thread that stands for a rank."""

    size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, said: dict[int, torch.Tensor]):
        self.rank, self.meeting, self.said = rank, meeting, said

    def all_gather(self, data: torch.Tensor, name: str = "") -> list[torch.Tensor]:
        self.said[self.rank] = data
        self.meeting.wait()
        found = [self.said[r] for r in range(self.size)]
        self.meeting.wait()
        return found


@pytest.mark.parametrize("holders", ("rank 0", "both", "rank 1"))
def test_fingerprints_of_a_batch_do_not_depend_on_who_holds_it(holders):
    padded = rollout(BigramEngine())
    padded["routed_experts"] = padded["input_ids"][..., None, None].expand(-1, -1, 2, 3).short()
    whole = field_fingerprints(Batch.from_padded(padded))
    meeting, said = threading.Barrier(2, timeout=30), {}
    of_row = {"rank 0": torch.zeros(16), "both": torch.arange(16) % 2, "rank 1": torch.ones(16)}

    def of_rank(rank: int) -> dict[str, Fingerprint]:
        alone = Batch.from_padded(padded)
        comm, home = ThreadComm(rank, meeting, said), Home((0, 1), of_row[holders].long())
        held = home.rows(rank)
        tokens = {name: t.take(held) for name, t in alone.per_token.items()}
        batch = Batch(alone.lengths, alone.per_sample, tokens, home=home, comm=comm)
        return field_fingerprints(batch)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(of_rank, range(2))] == [whole, whole]
    assert whole["routed_experts"].shape == "int16 [16 rows, 128 tokens, 2, 3]"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_no_single_change_leaves_a_hash_as_it_was(dtype):
    g = torch.Generator().manual_seed(0)
    for shape in ((7,), (5, 3), (3, 4, 2)):
        values = torch.randn(shape, generator=g).to(dtype)
        whole = tensor_hash(values)
        bits = values.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
        seen = {int(whole)}
        for i in range(values.numel()):
            for bit in range(8 * dtype.itemsize - 1):
                bits.view(-1)[i] ^= 1 << bit
                seen.add(int(tensor_hash(values)))
                bits.view(-1)[i] ^= 1 << bit
        assert len(seen) == 1 + values.numel() * (8 * dtype.itemsize - 1)
        assert tensor_hash(values.flip(0)) != whole  # order counts
        parts = (tensor_hash(p, (i, *[0] * (p.ndim - 1))) for i, p in enumerate(values.split(1)))
        assert sum(parts, torch.tensor(0)) == whole


@pytest.mark.parametrize("architecture", ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM"))
def test_hashes_of_weights_do_not_depend_on_the_layout(architecture):
    model = family(architecture)
    moe = dict(ep=2, etp=1) if "Moe" in architecture else {}
    found = []
    for layout in (Layout(), Layout(tp=2), Layout(tp=2, pp=2, **moe), Layout(pp=2, vpp=2, dp=2)):
        table = build_piece_table(model, layout)
        hashes, squares = 0, 0
        for rank in range(layout.world_size):
            c = layout.coords(rank)
            params = {n: torch.empty(p.shape) for n, p in table.local_params(c).items()}
            init_params(table, c, params, seed=3)
            mine = weight_hashes(table, rank, params, torch.device("cpu"))
            hashes, squares = hashes + mine[0], squares + mine[1]
        found.append((hashes, squares))
    for hashes, squares in found[1:]:
        assert torch.equal(hashes, found[0][0])
        torch.testing.assert_close(squares, found[0][1], rtol=1e-6, atol=0)
