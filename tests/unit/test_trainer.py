"""The small parts around the loops: frequencies, figures, the saver, rank 0's voice."""

from __future__ import annotations

import gc
import json
import math
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.api.records import FinetuneSpec
from megarl.config.algo import PPOActorConfig
from megarl.config.recipes import SFTConfig
from megarl.config.run import EvaluatorConfig, FrequencyConfig, SaverConfig
from megarl.trainer.evaluation import EvaluationTimes
from megarl.trainer.offline import DPOTrainer, OfflineTrainer, RMTrainer, SFTTrainer
from megarl.trainer.rl import PPOTrainer
from megarl.trainer.rollout_metrics import completions, rollout_metrics
from megarl.trainer.saver import Frequency, Saved, Saver


def due_steps(config: FrequencyConfig, steps: int, per_epoch: int, clock=None) -> list[int]:
    freq = Frequency(config, **({"clock": clock} if clock else {}))
    return [
        s
        for s in range(1, steps + 1)
        if freq.due(step=s, epoch=-(-s // per_epoch), epoch_ended=s % per_epoch == 0)
    ]


def test_frequencies():
    assert due_steps(FrequencyConfig(), 9, 3) == []
    assert due_steps(FrequencyConfig(freq_steps=4), 9, 3) == [4, 8]
    assert due_steps(FrequencyConfig(freq_epochs=2), 9, 3) == [6]
    now = iter(range(0, 100, 10))  # ten seconds a step
    assert due_steps(FrequencyConfig(freq_secs=25), 8, 3, clock=lambda: next(now)) == [3, 6]


def a_batch() -> dict[str, torch.Tensor]:
    """Two groups of two: one all wrong, one half right. Prompt of one token."""
    mask = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 1, 1]]).bool()
    return {
        "input_ids": torch.tensor([[9, 1, 2], [9, 1, 0], [8, 3, 4], [8, 5, 6]]),
        "attention_mask": mask | torch.tensor([True, False, False]),
        "loss_mask": mask,
        "rewards": torch.tensor([0.0, 0.0, 1.0, 0.0]),
        "group_ids": torch.tensor([7, 7, 3, 3]),
        "versions": torch.where(mask, 4, -1).int(),
        "truncated": torch.tensor([True, False, False, False]),
    }


def test_rollout_figures():
    figures = rollout_metrics(a_batch(), version=6)
    assert figures["reward/mean"] == 0.25
    assert figures["reward/pass_at_group"] == 0.5
    assert figures["reward/groups_all_equal"] == 0.5
    assert figures["response_len/mean"] == 7 / 4
    assert figures["response_len/max"] == 2
    assert figures["response_len/truncated"] == 0.25
    assert figures["tokens/sequences"] == 4
    assert figures["tokens/trained"] == 7
    assert figures["tokens/total"] == 11
    assert figures["staleness/max"] == figures["staleness/mean"] == 2
    assert [figures[f"staleness/age_{k}"] for k in range(3)] == [0, 0, 1]
    assert figures["reward/pass_rate"] == 0.25 and figures["reward/groups_all_right"] == 0
    lengths = {name: figures[f"response_len/{name}"] for name in ("right", "wrong", "cut")}
    assert lengths == {"right": 2, "wrong": pytest.approx(5 / 3), "cut": 2}
    assert figures["reward/clipped"] == 0
    high = a_batch() | {"rewards": torch.tensor([5.0, 6.0, 7.0, 0.0])}
    clipped = rollout_metrics(high, version=6, limits=PPOActorConfig(reward_clip=5).reward_limits)
    assert clipped["reward/clipped"] == 0.5 and clipped["reward/groups_all_equal"] == 0.5
    assert clipped["reward/mean"] == 4.5  # of the rewards as they were given
    none_right = rollout_metrics(a_batch() | {"rewards": torch.zeros(4)}, version=6)
    assert "response_len/right" not in none_right and none_right["response_len/wrong"] == 7 / 4


def test_completions_are_the_first_sample_of_each_row():
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    rows = [{"prompt": "p", "answer": 12}, {"prompt": "q", "answer": 34}]
    batch = a_batch() | {"group_ids": torch.tensor([0, 0, 1, 1])}
    assert completions(batch, tokenizer, rows) == [
        {"prompt": "p", "completion": "1 2", "answer": "12", "reward": 0.0},
        {"prompt": "q", "completion": "3 4", "answer": "34", "reward": 1.0},
    ]
    # row 0 was rejected, and row 1 has one sample more than row 2
    batch["group_ids"] = torch.tensor([1, 1, 1, 2])
    rejected = [{"prompt": "r", "answer": 0}, *rows]
    assert completions(batch, tokenizer, rejected) == [
        {"prompt": "p", "completion": "1 2", "answer": "12", "reward": 0.0},
        {"prompt": "q", "completion": "5 6", "answer": "34", "reward": 0.0},
    ]


def test_figures_of_a_batch_without_a_trained_token_are_numbers():
    figures = rollout_metrics(a_batch() | {"loss_mask": torch.zeros(4, 3).bool()}, version=6)
    assert all(math.isfinite(v) for v in figures.values())
    assert figures["tokens/trained"] == 0


class Recorder:
    def save(self, meta):
        from pathlib import Path

        Path(meta.path).mkdir(parents=True)


def a_saver(config, home, *others):
    models = [
        Saved(model=Recorder(), base_model_path="base", home=h)
        for h in (home, *(home / o for o in others))
    ]
    return Saver(config, models=models, clock=lambda: 0.0, is_zero=True)


def test_saver_keeps_the_newest_of_every_model(tmp_path):
    saver = a_saver(SaverConfig(freq_steps=2, keep_last=2), tmp_path, "critic")
    for step in range(1, 9):
        saver.maybe_save(step=step, epoch=1, epoch_ended=False)
    for home in (tmp_path, tmp_path / "critic"):
        assert sorted(p.name for p in (home / "hf").iterdir()) == ["step_000006", "step_000008"]
    assert saver.save_final() == tmp_path / "final"
    assert (tmp_path / "critic" / "final").exists()


@pytest.mark.parametrize("metric, kept", [("eval/x", [4, 10, 12]), ("-eval/x", [2, 8, 12])])
def test_saver_keeps_the_best(tmp_path, metric, kept):
    """By the figure of the step, which is logged after the save; step 6 was not evaluated."""
    scores = {2: 0.1, 3: 9.0, 4: 0.7, 8: 0.2, 10: 0.9, 12: 0.0}
    config = SaverConfig(freq_steps=2, keep_last=1, keep_best=2, metric=metric)
    for step in range(1, 13):
        saver = a_saver(config, tmp_path, "critic")  # also over starts
        saver.maybe_save(step=step, epoch=1, epoch_ended=False)
        row = {"step": step} | ({"eval/x": scores[step]} if step in scores else {})
        with (tmp_path / "stats.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")
    for home in (tmp_path, tmp_path / "critic"):
        assert sorted(p.name for p in (home / "hf").iterdir()) == [f"step_{s:06d}" for s in kept]


def test_saver_without_final(tmp_path):
    assert a_saver(SaverConfig(final=False), tmp_path).save_final() is None
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize(
    ("cls", "old", "new"),
    [
        (OfflineTrainer, "state", "state_dict"),
        (SFTTrainer, "load_state", "load_state_dict"),
        (DPOTrainer, "evaluated", "evaluate"),
        (RMTrainer, "evaluate_otherwise", "evaluate"),
        (PPOTrainer, "reads_prox_logp", "compute_prox_logp"),
    ],
)
def test_a_trainer_that_overrides_an_old_name_is_refused_with_the_new_one(cls, old, new):
    with pytest.raises(TypeError, match=rf"Mine\.{old} .*{new}"):
        type("Mine", (cls,), {old: lambda self: {}})
    type("Mine", (cls,), {"step": lambda self, step: {}})


class Learns(SFTTrainer):
    """Is right about one row more of four with every two steps; its roles are fakes."""

    def __init__(self, cfg: Any, home: Path, *, state: dict[str, Any] | None = None) -> None:
        self.cfg, self.generation, self.exact_match = cfg, None, 0.0
        self.spec = FinetuneSpec(total_train_epochs=1, dataset_size=20, train_batch_size=2)
        self.held_out = {"": {"input_ids": [[1]] * 4}}
        self.check = SimpleNamespace(begin_step=lambda step: None, end=lambda: None)
        self.rows: dict[int, dict[str, float]] = {}
        self.checkpoints: list[tuple[int, bool]] = []
        self.ctx = SimpleNamespace(
            run_dir=home, elapsed=lambda: 0.0,
            profiler=SimpleNamespace(step=lambda n: nullcontext()),
            wishes=lambda: (False, False), gathered=dict,
            log_stats=lambda step, stats, **more: self.rows.update({step: stats}),
        )  # fmt: skip
        self.saver = a_saver(cfg.saver, home)
        self.eval_times = EvaluationTimes(cfg.evaluator, lambda: 0.0)
        self.recovery = SimpleNamespace(
            ended_already=lambda saver, *, total, over: over,
            maybe_save=lambda state, *, step, last, **more: self.checkpoints.append((step, last)),
        )
        self.steps_done = 0 if state is None else 4
        self.exact_match = state["exact_match"] if state else 0.0

    def step(self, step: int) -> dict[str, float]:
        self.done = step + 1
        return {"loss": 1.0 / self.done}

    def by_loss(self, held_out: Any) -> dict[str, float]:
        return {"exact_match": min(1.0, self.done / 8)}


class Cycle:
    itself: Any


class LeavesCycles(Learns):
    """Leaves an object in a cycle behind in each step."""

    def __init__(self, cfg: Any, home: Path) -> None:
        super().__init__(cfg, home)
        self.left: list[weakref.ref[Any]] = []

    def step(self, step: int) -> dict[str, float]:
        assert not gc.isenabled()
        assert not any(ref() for ref in self.left)  # of the steps before
        cycle = Cycle()
        cycle.itself = cycle
        self.left.append(weakref.ref(cycle))
        return super().step(step)


@pytest.mark.parametrize("enabled", (True, False))
def test_garbage_is_collected_between_steps_alone(tmp_path: Path, enabled: bool) -> None:
    cfg = SFTConfig(evaluator=EvaluatorConfig(freq_steps=2, at_start=False))
    trainer = LeavesCycles(cfg, tmp_path)
    if not enabled:
        gc.disable()
    try:
        trainer.fit()
        assert len(trainer.left) == 10 and not any(ref() for ref in trainer.left)
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(("bound", "last"), [(0.5, 4), (0.6, 6), (None, 10)])
def test_sft_ends_at_the_evaluation_that_is_good_enough(tmp_path, bound, last):
    cfg = SFTConfig(
        stop_at_exact_match=bound,
        evaluator=EvaluatorConfig(freq_steps=2, at_start=False),
        saver=SaverConfig(freq_steps=4),
    )
    trainer = Learns(cfg, tmp_path)
    trainer.fit()
    assert list(trainer.rows) == list(range(1, last + 1))
    assert trainer.rows[last]["eval/exact_match"] == min(1.0, last / 8)
    assert [step for step, end in trainer.checkpoints if end] == [last] == [trainer.done]
    assert (tmp_path / "final").exists() and (tmp_path / "hf" / "step_000004").exists()
    if bound == 0.5:  # a start that goes on from there makes no further step
        again = Learns(cfg, tmp_path, state={"exact_match": trainer.exact_match})
        again.fit()
        assert not again.rows and not again.checkpoints


def test_a_start_says_which_bound_ends_it_and_which_rows_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = SFTConfig(evaluator=EvaluatorConfig(freq_steps=2, at_start=False))
    sizes = dict(total_train_epochs=1, train_batch_size=8)
    for said, spec in (
        ("2 steps, not total_train_steps=4: then total_train_epochs=1 of 20 rows are over",
         FinetuneSpec(dataset_size=20, max_steps=4, **sizes)),
        ("4 of 20 rows are left out of every epoch, as they fill no batch of 8",
         FinetuneSpec(dataset_size=20, **sizes)),
        ("", FinetuneSpec(dataset_size=16, max_steps=2, **sizes)),
        ("", FinetuneSpec(dataset_size=20, max_steps=3, drop_last=False, **sizes)),
    ):  # fmt: skip
        trainer = Learns(cfg, tmp_path / str(spec))
        trainer.spec = spec
        caplog.clear()
        with caplog.at_level("INFO"):
            trainer.fit()
        lines = [r.message for r in caplog.records if "rows are" in r.message]
        assert any(said in line for line in lines) if said else not lines
        assert len(trainer.rows) == spec.total_train_steps
