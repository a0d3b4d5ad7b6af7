"""SelfCheck over real engines: every rank decides alike, and a skipped update changes no bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.api.batch import Batch, Tokens
from megarl.api.records import FinetuneSpec
from megarl.config.algo import PPOActorConfig
from megarl.config.engine import MicroBatchSpec, OptimizerConfig, ParallelConfig, TrainEngineConfig
from megarl.config.recipes import GRPOConfig
from megarl.parallel.packing import split_minibatches
from tests.dist.engine_jobs import save_model
from tests.tiny import random_batch
from tests.tiny_tokenizer import save_tokenizer

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2-zero": ({}, {}),
    "dp2-bf16": ({}, dict(dtype="bfloat16")),
    "tp2-replicated": (dict(tp=2), dict(zero=False)),
    "pp2": (dict(pp=2), {}),
}
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=80, train_batch_size=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_model(tmp_path_factory.mktemp("models"), "qwen3", True)
    save_tokenizer(Path(path))
    return path


class Run:
    """An actor, its self check and a batch, combined as in the recipe."""

    def __init__(
        self, path: str, out: str, parallel: dict[str, Any], *, zero: bool = True,
        dtype: str = "float32", temperature: float = 0.8, **check: Any,
    ) -> None:  # fmt: skip
        from transformers import AutoTokenizer

        from megarl.parallel.ranks import Ranks
        from megarl.trainer.roles import MegatronActor
        from megarl.trainer.self_check import SelfCheck

        config = PPOActorConfig(
            path=path, dtype=dtype, parallel=ParallelConfig(**parallel), ppo_n_minibatches=2,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=40),
            optimizer=OptimizerConfig(lr=1e-2, distributed=zero, lr_scheduler_type="linear"),
        )  # fmt: skip
        self.config, self.temperature = config, temperature
        self.actor = MegatronActor(config, temperature=temperature)
        self.actor.initialize(None, SPEC)
        tokenizer = AutoTokenizer.from_pretrained(path)
        ctx: Any = SimpleNamespace(run_dir=Path(out), ranks=Ranks.of(), tokenizer=tokenizer)
        self.check = SelfCheck(GRPOConfig(self_check=check), ctx)
        self.check.watch(self.actor, first_ratio_to="prox_logp")
        self.check.begin_step(3)

    def batch(self) -> dict[str, torch.Tensor]:
        b = dict(random_batch(n=8, seed=3))
        b["rewards"] = torch.arange(8.0)
        b["group_ids"] = torch.arange(8) // 4
        self.actor.compute_prox_logp(b)
        b["logprobs"] = b["prox_logp"] * b["loss_mask"]
        self.actor.compute_advantages(b)
        return b

    def bits(self) -> list[torch.Tensor]:
        """Returns this rank's weights, main weights, moments and step counts."""
        from megarl.engine.offload import optimizer_tensors

        engine = self.actor.engine
        tensors = (*engine.state.params.values(), *optimizer_tensors(engine.state.optimizer))
        return [t.detach().clone() for t in tensors]

    def error_of(self, fn: Callable[[], Any]) -> str:
        from megarl.trainer.self_check import SelfCheckError

        try:
            fn()
        except SelfCheckError as e:
            return str(e)
        return "no error"

    def close(self) -> None:
        self.actor.destroy()


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def nan_where(loss: Any, token: int | None, outputs: Any, b: Any) -> Any:
    """Returns the loss; it and its gradient are NaN at trained tokens `token` (None: at all)."""
    hit = b["loss_mask"] if token is None else (b["input_ids"] == token) & b["loss_mask"]
    logprobs = outputs["logprobs"] * torch.where(hit, math.nan, 1.0)
    return loss(outputs | {"logprobs": logprobs}, b)


def plus(loss: Any, constant: float, outputs: Any, b: Any) -> Any:
    """Returns the loss plus `constant`, which may be infinite; the gradient stays finite."""
    value, stats = loss(outputs, b)
    return value + constant, stats


def set_loss(actor: Any, fn: Any) -> None:
    actor.loss = replace(actor.loss, fn=fn)


def skipped_updates(
    path: str, out: str, parallel: dict[str, Any], over: dict[str, Any]
) -> dict[str, Any]:
    run = Run(path, out, parallel, max_skips=100, **over)
    actor, healthy = run.actor, run.actor.loss.fn
    first = actor.ppo_update(run.batch())  # so that there are moments to spoil
    before, batch = run.bits(), run.batch()

    run.check.begin_step(4)
    skipped, untouched = [], []
    for fault in (
        partial(nan_where, healthy, None),
        partial(plus, healthy, math.inf),
        partial(plus, healthy, math.nan),
    ):
        set_loss(actor, fault)
        skipped.append(actor.ppo_update(batch)["skipped_updates"])
        untouched.append(same_bits(before, run.bits()))
    set_loss(actor, healthy)
    spoilt = batch["advantages"].where(~batch["loss_mask"], math.nan)
    skipped.append(actor.ppo_update(batch | {"advantages": spoilt})["skipped_updates"])
    untouched.append(same_bits(before, run.bits()))

    token = int(batch["input_ids"][5][batch["loss_mask"][5]][0])
    set_loss(actor, partial(nan_where, healthy, token))
    partly = actor.ppo_update(batch)
    actor.step_lr_scheduler()
    set_loss(actor, healthy)
    last = actor.ppo_update(run.batch())
    trained = not same_bits(before, run.bits())
    run.close()
    return dict(
        first=first, skipped=skipped, untouched=untouched, partly=partly, last=last, trained=trained
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_skipped_update_changes_no_bit_on_any_rank(worlds, model, tmp_path, layout):
    a, b = worlds(2).run(skipped_updates, model, str(tmp_path), *LAYOUTS[layout])
    assert a["first"]["skipped_updates"] == 0
    for r in (a, b):
        assert r["skipped"] == [2, 2, 2, 2] and r["untouched"] == [True] * 4
        assert r["partly"]["n_updates"] == r["partly"]["skipped_updates"] == 1
        assert all(math.isfinite(v) for v in r["partly"].values())
        assert r["last"]["n_updates"] == 2 and r["trained"]
        assert r["last"]["lr"] < r["first"]["lr"]  # the schedule counts steps, also skipped ones
    assert a["partly"] == b["partly"] and a["last"] == b["last"]

    files = sorted((tmp_path / "nonfinite").iterdir())
    assert [f.name for f in files[:8]] == [f"step_000004_mb{i}.pt" for i in range(8)]
    assert len(files) == 9
    findings = [torch.load(f)["finding"] for f in files]
    assert "loss = nan, grad_norm = nan" in findings[0] and "in 4 of 4" in findings[0]
    assert "loss = inf, grad_norm = 1." in findings[2]  # the gradient alone would have passed
    assert "loss = nan, grad_norm = 1." in findings[4]
    assert "advantages: " in findings[6]
    assert "not finite in 1 of 4 sequences, rows" in findings[8]


def spikes(path: str, out: str) -> dict[str, Any]:
    """Updates with a bound on the norm of the gradient that no update keeps, then with one that
    all keep."""
    run = Run(path, out, {}, max_skips=100)
    b, before = run.batch(), run.bits()
    run.config.optimizer.spike_norm = 1e-9
    refused = run.actor.ppo_update(dict(b))
    untouched = same_bits(before, run.bits())
    run.config.optimizer.spike_norm = 1e9
    made = run.actor.ppo_update(dict(b))
    run.close()
    return dict(refused=refused, untouched=untouched, made=made)


def test_a_spike_of_the_gradient_is_refused_and_its_batch_saved(worlds, model, tmp_path):
    for r in worlds(2).run(spikes, model, str(tmp_path)):
        assert r["refused"]["skipped_updates"] == 2 and r["untouched"]
        assert r["made"]["skipped_updates"] == 0 and r["made"]["grad_norm"] > 0
    files = sorted(f for f in (tmp_path / "nonfinite").iterdir() if ".rank" not in f.name)
    finding = torch.load(files[0])["finding"]
    assert len(files) == 2 and "larger than optimizer.spike_norm allows: loss = " in finding
    assert "finite" not in finding.replace("nonfinite", "")


def holders(path: str, out: str) -> dict[str, Any]:
    """Updates on a Batch over two ranks with a fault in one row of rank 1, then in all its rows."""
    run = Run(path, out, {}, max_skips=100)
    b = run.batch()
    batch = Batch.from_local(b if dist.get_rank() == 0 else None)
    batch.minibatches = split_minibatches(batch.unit_ids, 2, seed=0)
    run.actor.engine.place(batch)
    theirs = int((batch.home.of_row == 1).nonzero()[0])
    healthy, token = run.actor.loss.fn, int(b["input_ids"][theirs][b["loss_mask"][theirs]][0])
    set_loss(run.actor, partial(nan_where, healthy, token))
    stats = run.actor.ppo_update(batch)
    set_loss(run.actor, healthy)
    spoilt = batch.select(range(8))
    values = spoilt["advantages"].values.clone()
    if dist.get_rank() == 1:
        values[spoilt["loss_mask"].values] = math.inf
    spoilt["advantages"] = Tokens(values, spoilt["advantages"].lengths)
    run.check.begin_step(4)
    more = run.actor.ppo_update(spoilt)
    run.actor.temperature = 1.0
    run.check.watch(run.actor, first_ratio_to="prox_logp")
    said = run.error_of(lambda: run.actor.ppo_update(batch))
    run.close()
    return dict(stats=stats, more=more, row=theirs, said=said, skipped=batch["skipped"].tolist())


def test_holders_save_and_show_their_own_rows(worlds, model, tmp_path):
    zero, one = worlds(2).run(holders, model, str(tmp_path))
    assert zero["stats"] == one["stats"] and zero["skipped"] == one["skipped"]
    assert zero["stats"]["skipped_updates"] >= 1 and zero["skipped"][zero["row"]]
    assert zero["more"]["skipped_updates"] == 2
    for step, words in ((3, "sequences, rows"), (4, "advantages: ")):
        mains = sorted((tmp_path / "nonfinite").glob(f"step_00000{step}_mb?.pt"))
        assert mains
        for path in mains:
            own, theirs = torch.load(path), torch.load(path.with_suffix(".rank1.pt"))
            assert words in own["finding"] and own["rows"] and theirs["rows"]
            assert not set(own["rows"]) & set(theirs["rows"])
            assert len(theirs["batch"]["input_ids"]) == len(theirs["rows"])
    assert "step 4: the first update does not start from ratio 1" in zero["said"]
    assert "»" in zero["said"] and one["said"] == zero["said"].splitlines()[0]


def stops(path: str, out: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Returns this rank's errors for faults that stop a run, each in its own run."""
    said = {}

    def fresh(**check: Any) -> Run:
        nonlocal run
        run.close()
        run = Run(path, out, parallel, **check)
        return run

    run = Run(path, out, parallel, on_nonfinite="stop")
    set_loss(run.actor, partial(nan_where, run.actor.loss.fn, None))
    said["nan"] = run.error_of(lambda: run.actor.ppo_update(run.batch()))

    batch = fresh().batch()
    run.actor.temperature = 1.0
    said["temperature"] = run.error_of(lambda: run.actor.ppo_update(batch))

    batch = fresh().batch()
    for chunk in run.actor.engine.state.chunks:
        for module in chunk.modules():
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = 0.1
    said["dropout"] = run.error_of(lambda: run.actor.ppo_update(batch))

    fresh()
    if dist.get_rank() == 1:  # only in rank 1's shard
        name, param = next(
            (n, p) for n, p in run.actor.engine.state.params.items() if "linear_fc2" in n
        )
        param.data[3, 3] = math.nan
        said["param"] = name
    said["weights"] = run.error_of(lambda: run.actor.ppo_update(run.batch()))

    batch, ref = fresh().batch(), make_ref(run)
    batch["ref_logp"] = ref.compute_logp(batch)
    said["equal"] = run.error_of(lambda: run.check.actor_equals_ref(batch, run.actor, ref))
    next(p for n, p in ref.engine.state.params.items() if "linear_fc2" in n).data.mul_(1.02)
    batch["ref_logp"] = ref.compute_logp(batch)
    said["other"] = run.error_of(lambda: run.check.actor_equals_ref(batch, run.actor, ref))
    ref.destroy()
    run.close()
    return said


def make_ref(run: Run) -> Any:
    """Makes a reference with the same weights in another layout than the actor's."""
    from megarl.trainer.roles import MegatronRef

    config = TrainEngineConfig(path=run.config.path, mb_spec=MicroBatchSpec(max_tokens_per_mb=64))
    ref = MegatronRef(config, temperature=run.temperature)
    ref.initialize(None, None)
    return ref


@pytest.mark.parametrize("parallel", [dict(tp=2), dict(pp=2)], ids=["tp2", "pp2"])
def test_every_rank_stops_with_the_same_error(worlds, model, tmp_path, parallel):
    zero, one = worlds(2).run(stops, model, str(tmp_path), parallel)
    for fault in ("nan", "temperature", "dropout", "weights", "other"):
        assert one[fault] == zero[fault].splitlines()[0], fault  # only rank 0 gives the details
    assert "step 3, mini-batch 0: the update is not finite: loss = nan" in zero["nan"]
    for fault in ("temperature", "dropout"):
        assert "step 3: the first update does not start from ratio 1" in zero[fault]
        assert "mean |log ratio| = 0." in zero[fault] and "»" in zero[fault]
    assert "the weights themselves are not finite: model.layers." in zero["weights"]
    assert "mlp.down_proj.weight" in zero["weights"]
    assert zero["equal"] == one["equal"] == "no error"
    assert "actor and reference disagree" in zero["other"]


def detached(outputs: Any, b: Any) -> Any:
    return outputs["logprobs"].detach().sum(), {}


def where_something_is_trained(loss: Any, outputs: Any, b: Any) -> Any:
    """Returns the loss; of a micro-batch without trained tokens a constant without a gradient."""
    value, stats = loss(outputs, b)
    return (value if b["loss_mask"].any() else value.detach()), stats


def losses_without_gradient(path: str, out: str, parallel: dict[str, Any]) -> dict[str, Any]:
    from megarl.api.engine import NoGradient

    run = Run(path, out, parallel)
    actor, healthy, errors = run.actor, run.actor.loss.fn, []
    batch = run.batch()
    before = run.bits()
    set_loss(actor, detached)
    try:
        actor.ppo_update(batch)
    except NoGradient as e:
        errors.append(str(e))
    untouched = same_bits(before, run.bits())
    actor.loss = replace(actor.loss, fn=partial(where_something_is_trained, healthy))
    batch["loss_mask"][1:] = False
    stats = actor.ppo_update(batch)
    run.close()
    return dict(errors=errors, untouched=untouched, stats=stats)


@pytest.mark.parametrize("parallel", [{}, dict(pp=2), dict(tp=2)], ids=["dp2", "pp2", "tp2"])
def test_a_loss_without_a_gradient_is_an_error_on_every_rank(world2, model, tmp_path, parallel):
    for found in world2.run(losses_without_gradient, model, str(tmp_path), parallel):
        (error,) = found["errors"]
        assert "actor.loss=policy" in error and found["untouched"]
        assert found["stats"]["n_updates"] == 1 and found["stats"]["grad_norm"] > 0
