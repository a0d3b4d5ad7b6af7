"""Overlapped communication, the optimizer on the CPU, float16: the same steps as without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.api.records import SaveLoadMeta
from megarl.config.engine import OptimizerConfig
from megarl.engine import optimizer as engine_optimizer
from tests.dist.engine_jobs import (
    TEMPERATURE,
    batch,
    loss_fn,
    make_engine,
    save_model,
    state,
    weight_fn,
)
from tests.dist.self_keeping_adam import SelfKeepingAdam
from tests.tiny import save_tiny

OUT: dict[str, Any] = dict(outputs=("logprobs", "entropy"), temperature=TEMPERATURE)
OVERLAP = dict(overlap_grad_reduce=True)
OVERLAP_ALL = dict(overlap_grad_reduce=True, overlap_param_gather=True)


def steps(path: str, parallel: dict[str, Any], n: int = 3, **over: Any) -> dict[str, Any]:
    """Returns the metrics of n steps, and the logprobs and weights after them."""
    engine = make_engine(path, parallel, **over)
    figures = [engine.train_batch(batch(), loss_fn, weight_fn, **OUT) for _ in range(n)]
    weights = state(engine)  # before any further pass, which would gather them
    result = dict(figures=figures, weights=weights, logprobs=engine.forward(batch()))
    engine.destroy()
    return result


def assert_same(got: dict[str, Any], want: dict[str, Any], bound: float) -> None:
    for a, b in zip(got["figures"], want["figures"], strict=True):
        assert a == pytest.approx(b, rel=bound, abs=bound)
    for name, value in want["weights"].items():
        ratio = (got["weights"][name].float() - value.float()).norm() / value.float().norm()
        assert ratio <= bound, (name, ratio)
    assert (got["logprobs"] - want["logprobs"]).abs().max() <= 10 * bound


@pytest.mark.parametrize(
    ("kind", "parallel", "overlap"),
    [
        ("qwen2", {}, OVERLAP_ALL),
        ("llama", dict(pp=2), OVERLAP_ALL),
        ("qwen3", dict(pp=2, vpp=2), OVERLAP_ALL),
        ("qwen3_moe", dict(ep=2), OVERLAP_ALL),
        ("llama", dict(cp=2), OVERLAP | dict(distributed=False)),
    ],
    ids=["dp", "pp", "vpp", "ep", "plain"],
)
def test_overlapped_communication_changes_no_bit(world2, models, kind, parallel, overlap):
    path = save_model(models, kind, kind == "qwen2")
    plain = {k: v for k, v in overlap.items() if not k.startswith("overlap")}
    want = world2.run(steps, path, parallel, optimizer=plain)[0]
    got = world2.run(steps, path, parallel, optimizer=overlap)[0]
    assert_same(got, want, 0.0)


@pytest.mark.parametrize(
    ("kind", "parallel", "over"),
    [
        ("qwen2_moe", {}, {}),
        ("deepseek_v3", dict(pp=2), dict(recompute_granularity="full")),
        ("qwen2_moe", dict(ep=2), {}),
        ("deepseek_v3", dict(tp=2, sequence_parallel=True, ep=2), {}),
    ],
    ids=["dp", "pp", "ep", "tp"],
)
def test_shared_experts_beside_the_exchange_take_the_same_steps(
    world2, models, kind, parallel, over
):
    """The gradients of router, experts and shared expert are added up in another order where the
    three begin, which is rounding in fp32."""
    path = save_model(models, kind, False)
    beside = dict(options=dict(moe_shared_expert_overlap=True))
    want = world2.run(steps, path, parallel, **over)[0]
    got = world2.run(steps, path, parallel, **over, **beside)[0]
    assert got["figures"][0]["loss"] == want["figures"][0]["loss"], "forward is the same to the bit"
    assert_same(got, want, 1e-6)


def test_the_optimizer_on_the_cpu_takes_the_same_steps(world2, models):
    path = save_model(models, "qwen2", True)
    want = world2.run(steps, path, {}, dtype="bfloat16")[0]
    for fraction, overlap in ((1.0, OVERLAP_ALL), (0.4, {})):
        options = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
        moved = dict(options=options, **overlap)
        got = world2.run(steps, path, {}, dtype="bfloat16", optimizer=moved)[0]
        assert_same(got, want, 1e-6)


def resumed(path: str, out: str, over: dict[str, Any]) -> list[Any]:
    """Takes two steps, saves, takes two more; repeats these in a new engine that has loaded."""
    engine = make_engine(path, {}, **over)
    for _ in range(2):
        engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
    engine.save(SaveLoadMeta(path=out, weight_format="dist", with_optim=True))
    ends = []
    for again in (False, True):
        if again:
            engine = make_engine(path, {}, **over)
            engine.load(SaveLoadMeta(path=out, weight_format="dist", with_optim=True))
        figures = [engine.train_batch(batch(), loss_fn, weight_fn, **OUT) for _ in range(2)]
        ends.append((figures, state(engine)))
        engine.destroy()
    return ends


@pytest.mark.parametrize(
    "over",
    [
        dict(
            dtype="bfloat16",
            optimizer=dict(
                options=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.4)
            ),
        ),
        # a loss scale that changes
        dict(dtype="float16", optimizer=dict(options=dict(loss_scale_window=1))),
    ],
    ids=["cpu_offload", "float16"],
)
def test_training_resumes_bit_for_bit(world2, models, tmp_path, over):
    path = save_model(models, "llama", False)
    (figures, weights), (figures_again, weights_again) = world2.run(
        resumed, path, str(tmp_path / "ck"), over
    )[0]
    assert figures == figures_again
    assert all(torch.equal(weights_again[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("kind", "parallel", "zero"),
    [("qwen2", dict(tp=2), False), ("qwen3_moe", dict(ep=2), True), ("llama", dict(pp=2), True)],
    ids=["tp", "experts", "pp"],
)
def test_float16_takes_the_steps_of_float32(world2, models, kind, parallel, zero):
    """The loss scale is in the backward pass and in none of the metrics."""
    path = save_model(models, kind, False)
    optimizer = dict(distributed=zero, options=dict(initial_loss_scale=2.0**10))
    want = world2.run(steps, path, parallel, n=1, optimizer=optimizer)[0]
    got = world2.run(steps, path, parallel, n=1, dtype="float16", optimizer=optimizer)[0]
    (a,), (b,) = got["figures"], want["figures"]
    assert (a["loss_scale"], a["overflow"], a["update_successful"]) == (2.0**10, 0.0, 1.0)
    assert a["loss"] == pytest.approx(b["loss"], rel=2e-2, abs=1e-3)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
    for name, value in want["weights"].items():
        ratio = (got["weights"][name].float() - value).norm() / value.norm()
        assert ratio < 1e-2, (name, ratio)


def overflowing(path: str, parallel: dict[str, Any], zero: bool) -> dict[str, Any]:
    """Steps from a loss scale beyond float16 until a step succeeds; then uses a broken loss."""
    scale = dict(distributed=zero, options=dict(initial_loss_scale=2.0**24, loss_scale_window=2))
    engine = make_engine(path, parallel, dtype="float16", optimizer=scale)
    before, figures = state(engine), []
    while not figures or (not figures[-1]["update_successful"] and len(figures) < 30):
        untouched = state(engine)
        figures.append(engine.train_batch(batch(), loss_fn, weight_fn, **OUT))
    after = state(engine)

    def broken(outputs: Any, b: Any) -> Any:
        loss, stats = loss_fn(outputs, b)
        return loss + torch.inf, stats

    last = [engine.train_batch(batch(), fn, weight_fn, **OUT) for fn in (broken, loss_fn, loss_fn)]
    engine.destroy()
    return dict(before=before, untouched=untouched, after=after, figures=figures, last=last)


@pytest.mark.parametrize(
    ("kind", "parallel", "zero"),
    [("llama", dict(tp=2), False), ("qwen3_moe", {}, True)],
    ids=["plain", "experts"],
)
def test_an_overflow_skips_the_update_and_halves_the_scale(world2, models, kind, parallel, zero):
    ranks = world2.run(overflowing, save_model(models, kind, False), parallel, zero)
    r = ranks[0]
    assert ranks[1]["figures"][-1] == r["figures"][-1], "all ranks agree"
    skipped, good = r["figures"][:-1], r["figures"][-1]
    assert skipped and good["update_successful"] == 1.0 and good["overflow"] == 0.0
    assert all(f["overflow"] == 1.0 and f["update_successful"] == 0.0 for f in skipped)
    scales = [f["loss_scale"] for f in r["figures"]]
    assert scales == [2.0**24 / 2**i for i in range(len(scales))]
    for name, value in r["before"].items():
        assert torch.equal(r["untouched"][name], value), name
    assert any(not torch.equal(r["after"][n], v) for n, v in r["before"].items())
    broken, first, second = r["last"]
    assert broken["update_successful"] == broken["overflow"] == 0.0
    assert first["loss_scale"] == good["loss_scale"], "a broken loss says nothing about the scale"
    # two updates without overflow (the window), then it doubles
    assert second["loss_scale"] == 2 * good["loss_scale"]


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        (
            dict(options=dict(use_precision_aware_optimizer=True)),
            "bfloat16",
            "Transformer Engine's FusedAdam",
        ),
        (
            dict(options=dict(optimizer_cpu_offload=True)),
            "float32",
            "these are float32; set dtype='bfloat16'",
        ),
        (dict(overlap_param_gather=True), "float32", "needs optimizer.overlap_grad_reduce=true"),
        (
            dict(options=dict(exp_avg_dtype="float16")),
            "float32",
            "needs optimizer.options.use_precision_aware_optimizer=true",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, dtype, message):
    with pytest.raises(ValueError, match=message):
        engine_optimizer.check(OptimizerConfig(**options), getattr(torch, dtype))


@contextmanager
def self_keeping_adam() -> Iterator[None]:
    """Makes megatron-core find a Transformer Engine that has only the optimizer."""
    import megarl.parallel.mcore  # noqa: F401  before megatron

    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    te = SimpleNamespace(FusedAdam=SelfKeepingAdam)
    names = ("", ".pytorch", ".pytorch.optimizers")
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict("sys.modules", {f"transformer_engine{n}": te for n in names})
        )
        for module, name, value in (
            (mcore_optimizer, "Adam", SelfKeepingAdam),
            (distrib_optimizer, "Adam", SelfKeepingAdam),
            (mcore_optimizer, "is_te_min_version", lambda *_: True),
            (optimizer_config, "is_te_min_version", lambda *_: True),
            (engine_optimizer, "check", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def precision_aware(path: str, other: str, out: str, **options: Any) -> dict[str, Any]:
    """Runs `steps`. Another engine saves a checkpoint before its first step; after training, it
    loads other weights and takes a step from them."""
    precise = dict(use_precision_aware_optimizer=True, **options)
    over = dict(dtype="bfloat16", optimizer=dict(options=precise))
    with self_keeping_adam():
        result = steps(path, {}, **over)
        engine = make_engine(path, {}, **over)
        engine.save(SaveLoadMeta(path=out, weight_format="dist", with_optim=True))
        (part,) = engine.state.optimizer.chained_optimizers
        result |= dict(saved=[set(state) for state in part.optimizer.state.values()])
        engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
        engine.load(SaveLoadMeta(path=other))
        loaded = state(engine)
        engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
        result |= dict(loaded=loaded, stepped=state(engine), lr=engine.config.optimizer.lr)
        dtypes = {v.dtype for v in engine_optimizer_state(engine)}
        engine.destroy()
    return result | dict(dtypes=dtypes)


def engine_optimizer_state(engine: Any) -> list[torch.Tensor]:
    (part,) = engine.state.optimizer.chained_optimizers
    return [v for per_param in part.optimizer.state.values() for v in per_param.values()]


def test_the_precision_aware_optimizer_clips_and_reloads_what_it_keeps(world2, models, tmp_path):
    path = save_model(models, "llama", False)
    other = str(save_tiny(tmp_path / "other", "llama", seed=1))
    want = world2.run(steps, path, {}, dtype="bfloat16")[0]
    assert want["figures"][0]["grad_norm"] > 1.0, "or nothing is clipped"
    got = world2.run(precision_aware, path, other, str(tmp_path / "ck"))[0]
    assert_same(got, want, 1e-6)
    assert got["saved"] and all(
        s == {"master_param", "exp_avg", "exp_avg_sq"} for s in got["saved"]
    ), "a checkpoint before the first step makes the state"
    assert got["dtypes"] == {torch.float32}
    for name, value in got["loaded"].items():
        moved = (got["stepped"][name].float() - value.float()).abs().max()
        assert 0 < moved < 4 * got["lr"] + 0.01 * value.float().abs().max(), name
    small = dict(main_params_dtype="float16", exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    rough = world2.run(precision_aware, path, other, str(tmp_path / "ck"), **small)[0]
    assert rough["dtypes"] == {torch.float16, torch.bfloat16}
    assert_same(rough, want, 3e-2)


def steps_with_activations_on_host(
    path: str, parallel: dict[str, Any], **over: Any
) -> tuple[dict[str, Any], int]:
    """Runs `steps` with every activation offloaded; also returns the number of offloads."""
    from megarl.engine import activations

    gone, hooks = 0, activations.saved_tensors_hooks

    def counting(pack: Any, unpack: Any) -> Any:
        def counted(tensor: torch.Tensor) -> Any:
            nonlocal gone
            packed = pack(tensor)
            gone += not isinstance(packed, torch.Tensor)
            return packed

        return hooks(counted, unpack)

    with mock.patch.multiple(activations, MIN_BYTES=0, saved_tensors_hooks=counting):
        return steps(path, parallel, n=2, options=dict(offload_activations=True), **over), gone


@pytest.mark.parametrize(
    ("kind", "parallel", "granularity"),
    [
        ("qwen3", dict(tp=2), "none"),
        ("qwen3", {}, "full"),
        ("llama", dict(pp=2), "full"),
        ("qwen3", dict(pp=2, vpp=2), "full"),
        ("qwen3_moe", dict(ep=2), "full"),
    ],
    ids=["tp", "dp", "pp", "vpp", "ep"],
)
def test_activations_on_the_host_change_no_bit(world2, models, kind, parallel, granularity) -> None:
    path = save_model(models, kind, False)
    over = dict(recompute_granularity=granularity)
    plain = world2.run(steps, path, parallel, n=2, **over)[0]
    ranks = world2.run(steps_with_activations_on_host, path, parallel, **over)
    assert all(gone > 0 for _, gone in ranks)
    assert_same(ranks[0][0], plain, 0.0)  # weights are whole on rank 0
