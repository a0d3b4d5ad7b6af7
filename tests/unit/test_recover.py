"""Checkpoints of a run: whole or not there, found again, refused where they do not fit."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megarl import run as entry
from megarl.ckpt import background
from megarl.ckpt.files import check_contents, write_marker
from megarl.config.check import check_config
from megarl.config.earlier_run import check_run_dir, checkpoints, config_changes
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, save_config
from megarl.config.recipe_engines import saved_engines, trained_engines
from megarl.config.recipes import BaseConfig
from megarl.config.run import FrequencyConfig, SaverConfig
from megarl.trainer import run_dir as claims
from megarl.trainer.preflight import check_recipe
from megarl.trainer.recover import Recovery, data_of, same_data
from megarl.trainer.run_dir import CHECKSUM, claim, newest_checkpoint
from megarl.trainer.saver import Frequency, Saved, Saver
from megarl.utils import files
from megarl.utils.files import DiskFull, file_digest, seal
from tests.hf_stub import write_stub
from tests.hostile import Hostile

# ---- directories and files that are whole or not there


def killed(at: int, work: Any) -> int:
    """Runs `work` in a process that dies before its `at`-th change of names or trees; its exit
    status: 9 if it died, 0 if there were fewer.
    """
    if (pid := os.fork()) == 0:
        try:
            left = at

            def dying(real: Any) -> Any:
                def call(*args: Any, **kw: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        os._exit(9)
                    return real(*args, **kw)

                return call

            Path.rename = dying(Path.rename)  # type: ignore[method-assign]
            Path.replace = dying(Path.replace)  # type: ignore[method-assign]
            Path.unlink = dying(Path.unlink)  # type: ignore[method-assign]
            shutil.rmtree = dying(shutil.rmtree)
            os.unlink = dying(os.unlink)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(directory: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in directory.iterdir()} if directory.exists() else {}


@pytest.mark.parametrize("replaces", [False, True])
def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path, replaces):
    old = {"a": "old", "b": "old"} if replaces else {}
    new = {"a": "new", "c": "new"}

    def write() -> None:
        place = files.stage(tmp_path / "x")
        for name, text in new.items():
            (place / name).write_text(text)
        files.put_in_place(place, tmp_path / "x")

    for at in range(20):
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        if replaces:
            (tmp_path / "x").mkdir()
            for name, text in old.items():
                (tmp_path / "x" / name).write_text(text)
        status = killed(at, write)
        files.clean_up(tmp_path)
        assert content(tmp_path / "x") in ((new,) if status == 0 else (old, new))
        assert [p.name for p in tmp_path.iterdir()] == (["x"] if content(tmp_path / "x") else [])
        if status == 0:
            break
    assert status == 0 and at >= (3 if replaces else 1)


def test_a_directory_that_cannot_be_replaced_stays(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").touch()
    place = files.stage(tmp_path / "x")
    with (
        mock.patch.object(Path, "rename", autospec=True, side_effect=renamed_but(place)),
        pytest.raises(OSError, match="in use"),
    ):
        files.put_in_place(place, tmp_path / "x")
    assert content(tmp_path / "x") == {"old": ""}


def renamed_but(stuck: Path):
    """Renames, but for one directory."""
    rename = Path.rename

    def renames(path: Path, target: Path) -> Path:
        if path == stuck:
            raise OSError("in use")
        return rename(path, target)

    return renames


def test_a_directory_is_removed_whole_or_not_at_all(tmp_path):
    def remove() -> None:
        files.remove(tmp_path / "x")

    for at in range(20):
        (tmp_path / "x").mkdir(exist_ok=True)
        for name in "abc":
            (tmp_path / "x" / name).write_text(name)
        status = killed(at, remove)
        assert not (tmp_path / "x").exists() or len(content(tmp_path / "x")) == 3
        files.clean_up(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] in ([], ["x"])
        if status == 0:
            break
    assert status == 0 and at > 1


def test_a_file_is_rewritten_whole_or_not_at_all(tmp_path):
    file = tmp_path / "f"
    file.write_text("old")
    assert killed(0, lambda: files.write_whole(file, "new")) == 9
    assert file.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    files.clean_up(tmp_path)
    files.write_whole(file, "new")
    assert content(tmp_path) == {"f": "new"}


def test_clean_up_leaves_what_is_not_ours(tmp_path):
    for name in (".git", "x.tmp-12345678", ".x.tmp-1234", ".x.tmp-1234567g"):
        (tmp_path / name).mkdir()
    assert files.clean_up(tmp_path) == [] and len(list(tmp_path.iterdir())) == 4
    assert files.clean_up(tmp_path / "nowhere") == []


# ---- a run directory and the configuration that wants it


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_stub(tmp_path / "model")


def sft(root: Path, model: Path, *more: str) -> BaseConfig:
    return load_config(None, [*arguments(root, model), *more])


def arguments(root: Path, model: Path) -> list[str]:
    run = [f"fileroot={root}", "experiment_name=e", "trial_name=t"]
    return ["recipe=sft", f"model.path={model}", "model.optimizer.lr=1e-3", *run]


class Weights:
    """What is trained: one number."""

    def __init__(self) -> None:
        self.value, self.version = 0, 0

    def save(self, meta: Any) -> None:
        path = Path(meta.path)
        path.mkdir()
        if meta.weight_format == "hf":
            (path / "config.json").write_text("{}")
            return
        assert meta.with_optim is (path.name != "ref")
        (path / "weights").write_text(str(self.value))
        write_marker(path, {})

    def begin_save(self, meta: Any) -> Any:
        return Writing(self, meta)

    def load(self, meta: Any) -> None:
        self.value = int((Path(meta.path) / "weights").read_text())

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version


class Writing:
    """A save in the background, of the value there was when it began."""

    held = False  # while set, nothing comes of it unless it is waited for

    def __init__(self, weights: Weights, meta: Any) -> None:
        self.copy, self.meta = Weights(), meta
        self.copy.value = weights.value

    def is_done(self) -> bool:
        return not Writing.held

    def finish(self) -> None:
        self.copy.save(self.meta)


class Start:
    """One start of a run, up to where its loop begins."""

    def __init__(self, cfg: BaseConfig, now: float = 0.0) -> None:
        self.now = now
        self.lock = claim(cfg)

        def find_damage(path: Path) -> str | None:
            try:
                check_contents(path)
            except ValueError as e:
                return str(e)
            return None

        resumed = newest_checkpoint(cfg, lambda fn, *args: fn(*args), find_damage)
        run = Path(cfg.fileroot) / "e" / "t"
        ranks = SimpleNamespace(from_zero=lambda fn, *args: fn(*args))
        self.ctx: Any = SimpleNamespace(
            cfg=cfg, run_dir=run, resumed=resumed, ranks=ranks,
            clock=lambda: self.now, elapsed=lambda: self.now,
        )  # fmt: skip
        self.state = {"place": 0}
        self.clock = Frequency(FrequencyConfig(freq_secs=50), lambda: self.now)
        self.models = {name: Weights() for name in saved_engines(cfg)}
        self.saver = Saver(
            SaverConfig(),
            models=[
                Saved(model=self.models[name], base_model_path="", home=run / name if i else run)
                for i, name in enumerate(trained_engines(cfg))
            ],
            clock=self.ctx.clock,
            is_zero=True,
        )
        self.recovery = Recovery(self.ctx, self.models, {"other": self.clock})
        self.step = self.recovery.restore(self.state.update)

    @property
    def file(self) -> Path:
        return self.ctx.run_dir / "SAVE"

    def train(self, steps: int, *, last: bool = False) -> None:
        for _ in range(steps):
            self.step += 1
            self.now += 10
            self.state["place"] = self.step
            for i, weights in enumerate(self.models.values()):
                weights.value, weights.version = self.step + 5 * i, self.step
            self.recovery.maybe_save(
                lambda: self.state,
                step=self.step,
                epoch=1,
                epoch_ended=False,
                last=last and self.step == steps,
                asked=self.file.is_file(),
            )

    @property
    def weights(self) -> Weights:
        return next(iter(self.models.values()))

    def saved(self) -> list[int]:
        return [c.step for c in checkpoints(self.ctx.run_dir)[0]]


def test_a_run_continues_where_its_newest_checkpoint_is(tmp_path, model):
    cfg = sft(tmp_path, model, "recover.freq_steps=2", "recover.keep_last=2")
    first = Start(cfg)
    assert first.step == 0
    first.train(7)
    assert first.saved() == [4, 6]
    second = Start(cfg, now=1000.0)
    assert (second.step, second.weights.value, second.weights.version) == (6, 6, 6)
    assert second.state == {"place": 6}
    # the other clock had waited for all the 60 s, and goes on from there
    assert second.clock.due(step=7, epoch=1, epoch_ended=False)
    second.train(1)
    assert second.saved() == [4, 6]


def test_a_checkpoint_is_finished_at_a_later_step(tmp_path, model, monkeypatch):
    """It holds what there was when it began; the next one, or the end, waits for it."""
    cfg = sft(tmp_path, model, "recover.freq_steps=3", "recover.keep_last=9")
    monkeypatch.setattr(Writing, "held", True)
    start = Start(cfg)
    start.train(4)
    assert start.saved() == []
    monkeypatch.setattr(Writing, "held", False)
    start.train(1)
    assert start.saved() == [3]
    monkeypatch.setattr(Writing, "held", True)
    start.train(3)
    assert start.step == 8 and start.saved() == [3]
    left = [p.name for p in (tmp_path / "e" / "t" / "recover").glob(".*")]
    assert len(left) == 1 and left[0].startswith(".step_000006.tmp-")
    again = Start(cfg)  # as after a kill: the older one is whole, the newer one gone
    assert (again.step, again.weights.value, again.state) == (3, 3, {"place": 3})
    again.train(6)
    assert again.saved() == [3, 6]  # step 9's waited for it
    fresh = Start(sft(tmp_path / "b", model))
    fresh.train(2, last=True)
    assert fresh.saved() == [2]
    off = Start(sft(tmp_path / "c", model, "recover.freq_steps=2", "recover.async_save=false"))
    off.train(2)
    assert off.saved() == [2]


def test_a_file_asks_for_a_checkpoint_and_goes_when_that_is_whole(tmp_path, model, monkeypatch):
    cfg = sft(tmp_path, model, "recover.freq_steps=5", "recover.keep_last=9")
    start = Start(cfg)
    start.train(1)
    start.file.touch()
    monkeypatch.setattr(Writing, "held", True)
    start.train(2)  # the checkpoint of step 2 is under way, and no other is begun for the file
    assert start.file.exists() and start.saved() == []
    monkeypatch.setattr(Writing, "held", False)
    start.train(1)
    assert not start.file.exists() and start.saved() == [2]
    again = Start(cfg)
    assert (again.step, again.weights.value, again.state) == (2, 2, {"place": 2})
    again.train(2)  # the steps in which others are due are as before
    assert again.saved() == [2]
    again.file.touch()
    again.train(1)  # the one of step 5 is due, and the file's
    assert again.saved() == [2, 5] and not again.file.exists()
    again.train(1)
    again.file.touch()
    again.recovery.save_now(lambda: again.state, step=6, epoch=1)  # as at a signal
    assert again.saved() == [2, 5, 6] and not again.file.exists()


@pytest.mark.parametrize("mode", ["auto", "disabled"])
def test_a_file_that_cannot_be_removed_is_a_warning_once(
    tmp_path, model, monkeypatch, caplog, mode
):
    cfg = sft(
        tmp_path, model, f"recover.mode={mode}", "recover.freq_steps=4", "recover.keep_last=9"
    )
    start = Start(cfg)
    start.file.touch()

    def refused(self, missing_ok=False):
        raise PermissionError(1, "Operation not permitted", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        start.train(5)
    assert start.saved() == ([1, 4] if mode == "auto" else [])
    assert caplog.text.count("Operation not permitted") == 1


def test_a_file_is_answered_where_there_are_no_checkpoints(tmp_path, model, caplog):
    start = Start(sft(tmp_path, model, "recover.mode=disabled"))
    start.file.touch()
    start.train(2)
    assert start.saved() == [] and not start.file.exists()
    assert caplog.text.count("recover.mode=disabled") == 1


def ppo(root: Path, model: Path, *more: str) -> BaseConfig:
    run = [f"fileroot={root}", "experiment_name=e", "trial_name=t", f"actor.path={model}"]
    return load_config(None, ["recipe=ppo", *run, "ref.dtype=auto", *more])


def test_every_trained_model_continues(tmp_path, model):
    cfg = ppo(tmp_path, model, "recover.freq_steps=1", "recover.keep_last=2")
    Start(cfg).train(2)
    start = Start(cfg)
    assert list(start.models) == ["actor", "critic"]
    assert [(m.value, m.version) for m in start.models.values()] == [(2, 2), (7, 2)]
    assert start.recovery.ended_already(start.saver, total=2, over=True)
    run = tmp_path / "e" / "t"
    assert (run / "final").exists() and (run / "critic" / "final").exists()

    with pytest.raises(ConfigError, match=r"critic\.path=.*other: it was"):
        check_run_dir(ppo(tmp_path, model, f"critic.path={write_stub(tmp_path / 'other')}"))
    (run / "recover" / "step_000002" / "critic" / "weights").write_text("")
    (run / "critic" / ".final.tmp-0123abcd").mkdir()
    for name in (
        ".stats.jsonl",
        "episodes/.index.jsonl",
        "record/batches/.step_000001.safetensors",
    ):
        half = run / f"{name}.tmp-0123abcd"
        half.parent.mkdir(parents=True, exist_ok=True)
        half.touch()
    start = Start(cfg)
    assert start.step == 1 and [m.value for m in start.models.values()] == [1, 6]
    assert not list(run.rglob(".*.tmp-*"))


def test_a_reference_that_follows_the_policy_continues(tmp_path, model):
    more = ["recover.freq_steps=1", "recover.keep_last=9"]
    frozen, follows = ppo(tmp_path, model, *more), ppo(tmp_path, model, *more, "ref.ema=0.9")
    Start(frozen).train(2)
    begun = Start(follows)  # until now it was what its path says, which is loaded
    assert list(begun.models) == ["actor", "critic", "ref"]
    assert [m.value for m in begun.models.values()] == [2, 7, 0]
    begun.train(1)
    again = Start(ppo(tmp_path, model, *more, "ref.refresh_every=100"))
    assert [m.value for m in again.models.values()] == [3, 8, 13]
    with pytest.raises(ConfigError, match=r"ref\.refresh_every=null: the reference of this run"):
        check_run_dir(frozen)
    other = write_stub(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"ref\.path=.*other: it was"):
        check_run_dir(ppo(tmp_path, model, "ref.ema=0.9", f"ref.path={other}"))


def test_a_checkpoint_every_so_many_seconds_also_over_starts(tmp_path, model):
    cfg = sft(tmp_path, model, "recover.freq_secs=35", "recover.keep_last=9")
    first = Start(cfg)
    first.train(6)
    assert first.saved() == [4]
    second = Start(cfg, now=500.0)
    second.train(4)
    assert second.saved() == [4, 8]


def test_the_last_step_is_always_saved_and_disabled_saves_nothing(tmp_path, model):
    cfg = sft(tmp_path, model)
    start = Start(cfg)
    start.train(3, last=True)
    assert start.saved() == [3]
    off = Start(sft(tmp_path / "off", model, "recover.mode=disabled", "recover.freq_steps=1"))
    off.train(2, last=True)
    assert off.saved() == []


def test_incomplete_and_damaged_checkpoints_are_skipped(tmp_path, model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megarl"), "propagate", True)
    cfg = sft(tmp_path, model, "recover.freq_steps=1", "recover.keep_last=4")
    Start(cfg).train(4)
    recover = tmp_path / "e" / "t" / "recover"
    (recover / "step_000004" / "trainer.json").unlink()
    (recover / "step_000003" / "model" / "weights").write_text("")
    shutil.rmtree(recover / "step_000002" / "model")
    (recover / ".step_000009.tmp-0123abcd").mkdir()
    start = Start(cfg)
    assert start.step == 1 and not list(recover.glob(".step*"))
    for step, why in (
        (4, "marker is missing"),
        (3, "is damaged"),
        (2, "holds no whole checkpoint"),
    ):
        assert any(f"step_00000{step} is not whole" in m and why in m for m in caplog.messages)
    assert start.saved() == [1]  # the others do not count as the newest again
    start.train(1)
    assert Start(cfg).step == 2


def damage(file: Path) -> None:
    content = file.read_bytes()
    at = len(content) // 3
    file.write_bytes(content[:at] + bytes(b ^ 0x11 for b in content[at : at + 64])
                     + content[at + 64 :])  # fmt: skip


@pytest.mark.parametrize(
    "name", ["trainer.json", "trainer.pt", "model/megarl.json", "model/weights"]
)
def test_flipped_bytes_fall_back_to_the_checkpoint_before(
    tmp_path, model, caplog, monkeypatch, name
):
    """Two are kept by default."""
    monkeypatch.setattr(logging.getLogger("megarl"), "propagate", True)
    cfg = sft(tmp_path, model, "recover.freq_steps=1")
    Start(cfg).train(4)
    recover = tmp_path / "e" / "t" / "recover"
    assert sorted(p.name for p in recover.iterdir()) == ["step_000003", "step_000004"]
    damage(recover / "step_000004" / name)
    check_run_dir(cfg)  # every rank's and the launcher's first look
    start = Start(cfg)
    assert (start.step, start.weights.value, start.state) == (3, 3, {"place": 3})
    assert any("step_000004 is not whole" in m for m in caplog.messages)
    start.train(1)
    assert Start(cfg).step == 4


def test_the_trainers_state_is_plain_data(tmp_path, model):
    """What else stands there is not run, and not written."""
    cfg = sft(tmp_path, model, "recover.freq_steps=1")
    start = Start(cfg)
    start.train(1)
    path = tmp_path / "e" / "t" / "recover" / "step_000001"
    plain = torch.load(path / "trainer.pt", weights_only=True)
    marker = json.loads((path / "trainer.json").read_text())

    def replace_state(state: dict[str, Any]) -> None:
        """Replaces the state together with its checksums, which are no protection."""
        torch.save(state, path / "trainer.pt")
        found = {k: v for k, v in marker.items() if k != "checksum"}
        found[CHECKSUM] = file_digest(path / "trainer.pt")
        (path / "trainer.json").write_text(json.dumps(seal(found)))

    replace_state(plain | {"evil": Hostile(tmp_path / "ran")})
    with pytest.raises(RuntimeError, match=r"more than plain data .*mkdir"):
        Start(cfg)
    assert not (tmp_path / "ran").exists()
    replace_state(plain)
    start = Start(cfg)
    assert start.step == 1
    start.state["row"] = Hostile(tmp_path / "ran")
    with pytest.raises(ValueError, match=r"rows of train_dataset .*mkdir"):
        start.train(1)


def test_a_full_disk_is_one_line_and_the_older_checkpoint_stays(tmp_path, model, monkeypatch):
    cfg = sft(tmp_path, model, "recover.freq_steps=1", "recover.async_save=false")
    start = Start(cfg)
    start.train(1)
    real = Path.write_bytes

    def write(self: Path, content: bytes) -> int:
        if self.name == "trainer.pt":
            raise OSError(28, "No space left on device", str(self))
        return real(self, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(DiskFull, match=r"step_000002: No space left on device: .* free .*fileroot"):
        start.train(1)
    monkeypatch.undo()
    assert start.saved() == [1] and Start(cfg).step == 1


def test_final_model_of_a_run_that_ended(tmp_path, model):
    """Written if it is missing or older than the checkpoint, left alone otherwise."""
    cfg = sft(tmp_path, model)
    Start(cfg).train(2, last=True)
    start = Start(cfg)
    assert not start.recovery.ended_already(start.saver, total=4, over=False)
    final = start.saver.final
    assert not final.exists()
    assert start.recovery.ended_already(start.saver, total=2, over=True) and final.exists()
    assert start.recovery.ended_already(start.saver, total=2, over=True)  # Weights cannot save over
    os.utime(final, (time.time() - 3600,) * 2)
    with pytest.raises(FileExistsError):
        start.recovery.ended_already(start.saver, total=2, over=True)


def test_disabled_refuses_a_directory_that_holds_a_run(tmp_path, model):
    off = sft(tmp_path, model, "recover.mode=disabled")
    check_run_dir(off)
    (tmp_path / "e" / "t").mkdir(parents=True)
    (tmp_path / "e" / "t" / "stats.jsonl").touch()
    with pytest.raises(ConfigError, match="holds a run already") as e:
        check_run_dir(off)
    assert str(tmp_path / "e" / "t") in str(e.value) and "trial_name" in str(e.value)
    check_run_dir(sft(tmp_path, model))


def test_files_that_an_older_megarl_wrote_are_refused_together(tmp_path, model):
    cfg = sft(tmp_path, model)
    run = tmp_path / "e" / "t"
    for name in ("episodes/index.jsonl", "record/fingerprints.jsonl", "samples.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text('{"kind": "start", "after": 0}\n{"step": 1}\n')
    (run / "samples.jsonl").write_text('{"when": "before", "prompt": "as ever"}\n')
    with pytest.raises(ConfigError) as e:
        newest_checkpoint(cfg, lambda fn, *args: fn(*args))
    (line,) = e.value.problems
    named = f"{run}/record/fingerprints.jsonl and {run}/episodes/index.jsonl"
    assert line.partition(":")[0] == named
    with pytest.raises(ConfigError) as early:
        check_recipe(cfg, 1)  # a launcher's look, before there are servers
    assert early.value.problems == e.value.problems
    for name in ("episodes", "record"):
        (run / name).rename(run / f"older_{name}")
    assert newest_checkpoint(cfg, lambda fn, *args: fn(*args)) is None


def test_what_cannot_continue_is_refused(tmp_path, model):
    cfg = sft(tmp_path, model)
    Start(cfg).train(1, last=True)
    other = write_stub(tmp_path / "other")
    grpo = load_config(
        None, [f"fileroot={tmp_path}", "experiment_name=e", "trial_name=t", f"actor.path={model}"]
    )
    for changed, message in (
        (sft(tmp_path, other), f"model.path={other}: it was {model}"),
        (grpo, "recipe=grpo: it was sft"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_run_dir(changed)
    check_run_dir(sft(tmp_path, Path(os.path.relpath(model))))  # the same place
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    check_run_dir(cfg)
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    with pytest.raises(ConfigError, match=r"config.json has changed since \(rope_theta .* -> 5.0"):
        check_run_dir(cfg)
    check_run_dir(sft(tmp_path, model, "model.override_config={rope_theta: null}"))


def test_changes_of_the_configuration_are_told_and_kept(tmp_path, model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megarl"), "propagate", True)
    run = tmp_path / "e" / "t"
    Start(sft(tmp_path, model)).lock.close()
    longer = sft(tmp_path, model, "total_train_steps=9", "+train_dataset.options.level=3")
    changes = ["total_train_steps: None -> 9", "train_dataset.options.level: None -> 3"]
    assert config_changes(longer) == changes
    assert config_changes(sft(tmp_path, model)) == []
    Start(longer).lock.close()
    assert changes[0] in caplog.text
    assert load_config(run / "config.yaml") == longer
    assert load_config(run / "config.1.yaml") == sft(tmp_path, model)
    Start(longer).lock.close()
    assert len(list(run.glob("config*.yaml"))) == 2


def test_a_launchers_new_addresses_are_no_change(tmp_path, model):
    base = [f"actor.path={model}", f"fileroot={tmp_path}", "rollout.addresses=[h:1]"]
    cfg = load_config(None, base)
    save_config(cfg, tmp_path / "megarl" / "trial0" / "config.yaml")
    assert config_changes(load_config(None, [*base, "rollout.addresses=[h:2]"])) == []


def test_one_run_at_a_time(tmp_path, model, monkeypatch):
    monkeypatch.setattr(claims, "LOCK_TIMEOUT", 0.1)
    monkeypatch.setattr(claims, "LOCK_POLL", 0.1)
    cfg = sft(tmp_path, model)
    lock = claim(cfg)
    if (pid := os.fork()) == 0:
        try:
            claim(cfg)
        except RuntimeError as e:
            os._exit(7 if f"pid {os.getppid()} on" in str(e) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    lock.close()
    claim(cfg).close()


def test_run_py_checks_the_directory_on_rank_0_alone(tmp_path, model, monkeypatch, capsys):
    (tmp_path / "e" / "t").mkdir(parents=True)
    (tmp_path / "e" / "t" / "stats.jsonl").touch()
    command = ["--check", *arguments(tmp_path, model), "recover.mode=disabled"]
    monkeypatch.delenv("RANK", raising=False)
    assert entry.main(command) == 2
    assert "holds a run already" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert entry.main(command) == 0


def test_restarts_need_something_to_continue_from(tmp_path, model):
    check_config(sft(tmp_path, model, "recover.restarts=2"), 1)
    for bad in (["recover.restarts=-1"], ["recover.restarts=1", "recover.mode=disabled"]):
        with pytest.raises(ConfigError, match=r"recover\.restarts"):
            check_config(sft(tmp_path, model, *bad), 1)


def test_other_training_data_begins_anew(tmp_path, model):
    before = data_of(sft(tmp_path, model), 100)
    for same in (sft(tmp_path, model, "train_dataset.reward=a:b", "total_train_steps=3"),):
        assert same_data(before, data_of(same, 100))
    for key in ("seed=2", "train_dataset.batch_size=3", "+train_dataset.options.level=3"):
        assert not same_data(before, data_of(sft(tmp_path, model, key), 100))
    assert not same_data(before, data_of(sft(tmp_path, model), 99))


def test_data_that_another_megarl_describes_with_other_keys_is_the_same(tmp_path, model):
    """A curriculum's rarer keys came and went; its values count, and whether there is one."""
    base = [f"actor.path={model}", f"fileroot={tmp_path}", "train_dataset.type=mix"]
    base += ["train_dataset.parts.a.size=9", "train_dataset.parts.b.size=9"]
    curriculum = "train_dataset.curriculum.low=0.2"
    now = data_of(load_config(None, [*base, curriculum]), 18)
    before = now | {"curriculum": now["curriculum"] | {"newest": 0.5}, "gone": 1}
    assert same_data(before, now)
    written_out = [*base, curriculum, "train_dataset.curriculum.high=0.9"]
    assert same_data(before, data_of(load_config(None, written_out), 18))
    for other in (
        [*base, "train_dataset.curriculum.low=0.3"],
        base,
        [*base, curriculum, "train_dataset.parts.b.size=8"],
        [*base, curriculum, "train_dataset.parts.c.size=8"],
        [*base, curriculum, "+train_dataset.parts.a.options.level=1"],
    ):
        assert not same_data(before, data_of(load_config(None, other), 18)), other


def test_trainer_state_survives_the_disk(tmp_path, model):
    """What a data loader and an executor answer: tensors, nested rows, None."""
    cfg = sft(tmp_path, model)
    start = Start(cfg)
    state = {"loader": {"generator": torch.arange(3)}, "rows": [{"row_id": 3, "x": None, "y": [1]}]}
    start.state |= state
    start.train(1, last=True)
    again = Start(cfg).state
    assert torch.equal(again["loader"]["generator"], torch.arange(3))
    assert again["rows"] == state["rows"]


def ended(what: str) -> None:
    """Waits for the thread of a job."""
    for thread in threading.enumerate():
        if thread.name == f"megarl {what}":
            thread.join(60)


def test_whatever_ends_a_writer_its_save_ends_too(tmp_path):
    def write() -> None:
        raise SystemExit("the writer's end")

    pending = background.PendingSave("saving", tmp_path, write, lambda written: None)
    ends: list[BaseException] = []

    def finish() -> None:
        try:
            pending.finish()
        except BaseException as e:
            ends.append(e)

    finishing = threading.Thread(target=finish, daemon=True)
    finishing.start()
    finishing.join(20)
    assert list(map(str, ends)) == ["the writer's end"]


def test_a_writer_that_hangs_is_an_error_and_no_wait_without_end(monkeypatch, tmp_path):
    monkeypatch.setattr(background, "collective_timeout", lambda: 0.1)
    storage_answers = threading.Event()
    jobs = [
        background.PendingSave(
            f"saving {i}",
            tmp_path / "staging",
            lambda: storage_answers.wait(60),
            lambda written: None,
        )
        for i in range(2)
    ]
    try:
        with pytest.raises(TimeoutError, match="saving 0 has not ended within"):
            jobs[0].finish()
        with pytest.raises(TimeoutError, match="saving 0 has not ended"):  # it waits for that one
            ended("saving 1")
            jobs[1].finish()
    finally:
        storage_answers.set()
        ended("saving 0")
