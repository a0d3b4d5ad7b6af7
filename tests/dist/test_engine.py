"""The engine around the numbers: odd batches, errors, several engines, save and load."""

from __future__ import annotations

import gc
import os
import time
import weakref
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.api.records import FinetuneSpec, SaveLoadMeta
from tests.dist.engine_jobs import SP, batch, loss_fn, make_engine, save_model, state, weight_fn
from tests.dist.world import World
from tests.tiny import VOCAB, tiny_hf

OUT = dict(outputs=("logprobs", "entropy"))


def what_is_left(path: str, parallel: dict[str, Any], engines: int) -> list[tuple[bool, int]]:
    """Trains and destroys several engines; returns after each whether its model still exists, and
    the number of this process's threads (a gloo group has three)."""
    found = []
    for _ in range(engines):
        engine = make_engine(path, parallel)
        engine.forward(batch(), outputs=("logprobs",))
        engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
        model = weakref.ref(engine.state.chunks[0])
        engine.destroy()
        del engine
        gc.collect()
        found.append((model() is not None, threads()))
    return found


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    ("kind", "parallel"), [("qwen3_moe", {"ep": 2}), ("deepseek_v3", {"cp": 2})]
)
def test_destroy_gives_everything_back(world2, models, kind, parallel):
    path = save_model(models, kind, False)
    for found in world2.run(what_is_left, path, parallel, 2):
        assert not any(left for left, _ in found)
        assert found[0][1] == found[1][1]


def sharded_vocabulary(vocab: int, rows: int) -> dict[str, Any]:
    """Returns values and gradients of token_outputs on this rank's shard of `rows` rows."""
    from megarl.parallel.vocab_parallel import VocabShard, token_outputs

    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 5, generator=g, dtype=torch.float64, requires_grad=True)
    full = torch.randn(2 * rows, 5, generator=g, dtype=torch.float64)
    labels = torch.randint(0, vocab, (9,), generator=g)
    labels[0] = (hidden[0].detach() @ full[:vocab].T).argmax()
    rank = dist.get_rank()
    weight = full[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    shard = VocabShard(start=rank * rows, rows=rows, vocab_size=vocab, group=dist.group.WORLD)
    out = token_outputs(
        hidden, weight, labels, shard=shard, outputs=("logprobs", "entropy", "greedy_match"),
        temperature=0.7, chunk_tokens=4,
    )  # fmt: skip
    (out[:, 0].sum() + 2 * out[:, 1].sum()).backward()
    top = token_outputs(
        hidden.detach(), weight.detach(), labels, shard=shard, topk=5, chunk_tokens=4,
        outputs=("topk_logprobs", "topk_ids", "logprobs", "topk_tail"), temperature=0.7,
    )  # fmt: skip
    given = torch.stack([torch.randperm(vocab, generator=g)[:4] for _ in range(9)])
    given_hidden, given_weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    about = token_outputs(
        given_hidden, given_weight, labels, shard=shard, outputs=("given_logprobs", "given_tail"),
        given=given, temperature=0.7, chunk_tokens=4,
    )  # fmt: skip
    (about * torch.arange(1.0, 6.0)).sum().backward()

    dense_hidden = hidden.detach().requires_grad_()
    dense_weight = full[:vocab].clone().requires_grad_()
    logp = torch.log_softmax(dense_hidden @ dense_weight.T / 0.7, -1)
    want = torch.stack([
        logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1),
        (logp.argmax(-1) == labels).double(),
    ], -1)  # fmt: skip
    (want[:, 0].sum() + 2 * want[:, 1].sum()).backward(retain_graph=True)
    asked = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, given, True)
    others = logp.masked_fill(asked, -torch.inf).logsumexp(-1, keepdim=True)
    want_about = torch.cat([logp.gather(-1, given), others], -1)
    want_grads = torch.autograd.grad(
        (want_about * torch.arange(1.0, 6.0)).sum(), (dense_hidden, dense_weight)
    )
    return dict(
        about=about.detach(), want_about=want_about.detach(), want_grads=want_grads,
        about_grads=(given_hidden.grad, given_weight.grad),
        out=out.detach(), hidden=hidden.grad, weight=weight.grad, top=top,
        want_top=logp.detach().sort(-1, descending=True),
        want=want.detach(), want_hidden=dense_hidden.grad, want_weight=dense_weight.grad,
    )  # fmt: skip


@pytest.mark.parametrize("vocab", [13, 16, 7], ids=["padded", "exact", "one shard all padding"])
def test_vocabulary_shards_equal_the_dense_formula(world2, vocab):
    a, b = world2.run(sharded_vocabulary, vocab, 8)
    torch.testing.assert_close(a["out"], a["want"], rtol=0, atol=1e-12)
    assert torch.equal(a["out"], b["out"]) and a["out"][0, 2] == 1.0
    assert torch.equal(a["top"], b["top"])
    torch.testing.assert_close(a["top"][:, :5], a["want_top"].values[:, :5], rtol=0, atol=1e-6)
    assert torch.equal(a["top"][:, 5:10].long(), a["want_top"].indices[:, :5])
    assert torch.equal(a["top"][:, 10], a["out"][:, 0])
    rest = a["want_top"].values[:, 5:].logsumexp(-1)
    torch.testing.assert_close(a["top"][:, 11], rest, rtol=0, atol=1e-12)
    torch.testing.assert_close(a["about"], a["want_about"], rtol=0, atol=1e-12)
    assert torch.equal(a["about"], b["about"])
    (ah, aw), (bh, bw) = a["about_grads"], b["about_grads"]
    torch.testing.assert_close(ah + bh, a["want_grads"][0], rtol=0, atol=1e-12)
    given_weight = torch.cat([aw, bw])
    torch.testing.assert_close(given_weight[:vocab], a["want_grads"][1], rtol=0, atol=1e-12)
    assert given_weight[vocab:].abs().sum() == 0
    torch.testing.assert_close(a["hidden"] + b["hidden"], a["want_hidden"], rtol=0, atol=1e-12)
    weight = torch.cat([a["weight"], b["weight"]])
    torch.testing.assert_close(weight[:vocab], a["want_weight"], rtol=0, atol=1e-12)
    assert weight[vocab:].abs().sum() == 0


def two_engines(path: str) -> dict[str, Any]:
    """Uses a tp2 actor and a frozen dp2 reference on the same ranks in turns."""
    from megatron.core import parallel_state

    actor, ref = make_engine(path, dict(tp=2)), make_engine(path, {}, trained=False)
    a0, r0 = actor.forward(batch()), ref.forward(batch())
    stats = actor.train_batch(batch(), loss_fn, weight_fn, **OUT)
    r1, a1 = ref.forward(batch()), actor.forward(batch())
    assert not parallel_state.is_initialized(), "globals leaked out of the engines' scopes"
    params = [p.requires_grad for p in ref.state.params.values()]
    actor.destroy()
    r2 = ref.forward(batch())
    ref.destroy()
    again = make_engine(path, dict(tp=2), trained=False)
    a2 = again.forward(batch())
    again.destroy()
    return dict(a0=a0, r0=r0, a1=a1, r1=r1, r2=r2, a2=a2, stats=stats, grads=params)


def test_engines_of_different_layouts_share_the_ranks(world2, models):
    r = world2.run(two_engines, save_model(models, "qwen3", True))[0]
    torch.testing.assert_close(r["a0"], r["r0"], rtol=0, atol=1e-5)
    assert torch.equal(r["r0"], r["r1"]) and torch.equal(r["r0"], r["r2"])
    torch.testing.assert_close(r["a0"], r["a2"], rtol=0, atol=1e-5)
    assert (r["a1"] - r["a0"]).abs().max() > 1e-3
    assert not any(r["grads"])


def few_sequences(path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Runs a single sequence on `parallel`'s ranks, also where two of them are data-parallel."""
    engine = make_engine(path, parallel)
    one = {k: v[2:3] for k, v in batch().items()}
    result = dict(
        logp=engine.forward(one),
        stats=engine.train_batch(one, loss_fn, weight_fn, **OUT),
        weights=state(engine),
    )
    engine.destroy()
    return result


def test_fewer_sequences_than_data_parallel_ranks(world2, models):
    path = save_model(models, "llama", False)
    dp2, tp2 = (world2.run(few_sequences, path, p)[0] for p in (dict(), dict(tp=2)))
    torch.testing.assert_close(dp2["logp"], tp2["logp"], rtol=0, atol=1e-5)
    # rel allows the last bit in fp32, which is 1.5e-5 at a gradient norm of 187
    assert dp2["stats"] == pytest.approx(tp2["stats"], rel=1.2e-7, abs=1e-5)
    for name, value in tp2["weights"].items():
        torch.testing.assert_close(dp2["weights"][name], value, rtol=0, atol=1e-5)


def drift_loss(outputs: Any, b: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    drift = (outputs["logprobs"] - b["before"]).abs().detach()
    return outputs["logprobs"].sum(), {"drift": (drift.sum(), 1.0)}


def drift(path: str, parallel: dict[str, Any], dtype: str) -> float:
    """Returns sum |logprobs of the training pass - logprobs of forward| with equal weights."""
    engine = make_engine(path, parallel, dtype=dtype, recompute_granularity="full")
    b = batch()
    b["before"] = engine.forward(b)
    value: float = engine.backward_batch(b, drift_loss, weight_fn)["drift"]
    engine.destroy()
    return value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_and_forward_passes_agree_to_the_bit(world2, models, dtype):
    path = save_model(models, "qwen3", True)
    assert world2.run(drift, path, dict(tp=2, sequence_parallel=True), dtype) == [0.0, 0.0]
    assert world2.run(drift, path, dict(pp=2), dtype) == [0.0, 0.0]


def top_tokens(path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(path, parallel, lm_head_topk=3)
    names = ("topk_ids", "logprobs", "logits", "topk_logprobs")
    got: dict[str, Any] = engine.forward(batch(), outputs=names, temperature=0.7)
    got["one"] = engine.forward(batch(), outputs=("topk_logprobs",), temperature=0.7)
    got["error"] = error_of(
        engine.train_batch, batch(), loss_fn, weight_fn, outputs=("logprobs", "topk_ids")
    )
    engine.destroy()
    return got


@pytest.mark.parametrize(
    "parallel", [dict(tp=2, sequence_parallel=True), dict(pp=2), dict(cp=2), dict()],
    ids=["sp2", "pp2", "cp2", "dp2"],
)  # fmt: skip
def test_top_k_stands_beside_the_token_it_speaks_of(world2, models, parallel):
    for got in world2.run(top_tokens, save_model(models, "qwen3", True), parallel):
        b, ids = batch(), got["topk_ids"]
        assert ids.shape == (*b["input_ids"].shape, 3) and ids.dtype == torch.long
        said = b["attention_mask"].clone()
        said[:, 0] = False
        logp = got["logits"][said].log_softmax(-1)
        want = logp.topk(3).values
        torch.testing.assert_close(got["topk_logprobs"][said], want, rtol=0, atol=1e-5)
        torch.testing.assert_close(logp.gather(-1, ids[said]), want, rtol=0, atol=1e-5)
        assert not ids[~said].any() and not got["topk_logprobs"][~said].any()
        assert torch.equal(got["one"], got["topk_logprobs"])
        assert "'topk_ids' has no gradient" in got["error"]


def drawn_to(path: str, parallel: dict[str, Any], k: int) -> dict[str, Any]:
    """Returns loss and gradients of a student drawn to a teacher, the same model at another
    temperature, that names its k likeliest tokens."""
    from megarl.algos.distillation import Distillation
    from megarl.algos.roles import Teacher
    from megarl.config.engine import TrainEngineConfig

    frozen = make_engine(path, parallel, trained=False, lm_head_topk=k)
    b = batch()
    b["logprobs"] = torch.zeros(b["input_ids"].shape)
    Teacher(TrainEngineConfig(), frozen, temperature=2.5).teach(b)
    logits = frozen.forward(b, outputs=("logits",), temperature=1.0)
    frozen.destroy()
    engine = make_engine(path, parallel, optimizer={"distributed": False})
    outputs = ("logprobs", "given_tail", "given_logprobs")
    found: Any = engine.backward_batch(
        b, Distillation(kind="jsd", beta=0.3), weight_fn, outputs=outputs, temperature=0.8,
        keep=("given_logprobs",),
    )  # fmt: skip
    again = engine.eval_batch(
        b, Distillation(kind="jsd", beta=0.3), weight_fn, outputs=outputs, temperature=0.8
    )
    grads = state(engine, grads=True)
    errors = [
        error_of(engine.forward, b, outputs=("given_tail",)),
        error_of(engine.eval_batch, batch(), loss_fn, weight_fn, outputs=("given_tail",)),
        error_of(
            engine.eval_batch, b | {"given_ids": b["input_ids"]}, loss_fn, weight_fn,
            outputs=("given_tail",),
        ),
    ]  # fmt: skip
    engine.destroy()
    return dict(
        found=found, kept=found.kept["given_logprobs"], ids=b["given_ids"], again=again["loss"],
        grads=grads, logits=logits, errors=errors,
    )  # fmt: skip


def exact_divergence(path: str, logits: torch.Tensor) -> tuple[float, dict[str, Any]]:
    """Returns loss and gradients of drawn_to by whole logits, of transformers' model."""
    from transformers import AutoModelForCausalLM

    from megarl.algos.distillation import divergence

    b, model = batch(), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    mask = b["loss_mask"].bool() & b["attention_mask"]
    mask[:, 0] = False
    said = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits
    student = (said[:, :-1] / 0.8).log_softmax(-1)
    teacher = (logits[:, 1:] / 2.5).log_softmax(-1)
    loss = divergence(student, teacher, "jsd", 0.3)[mask[:, 1:]].sum() / weight_fn(b)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "parallel", [dict(tp=2, sequence_parallel=True), dict(tp=2), dict(pp=2), dict(cp=2), dict()],
    ids=["sp2", "tp2", "pp2", "cp2", "dp2"],
)  # fmt: skip
def test_a_teacher_that_names_the_whole_vocabulary_gives_the_exact_divergence(
    world2, models, parallel
):
    path = save_model(models, "qwen3", False)
    got, other = world2.run(drawn_to, path, parallel, VOCAB)
    loss, grads = exact_divergence(path, got["logits"])
    assert loss > 1e-3 and got["found"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert got["again"] == pytest.approx(loss, rel=1e-4) == other["again"]
    assert got["found"]["student_tail_mass"] == got["found"]["teacher_tail_mass"] == 0
    for name, want in grads.items():
        close = 1e-5 + 1e-4 * want.abs().max()
        torch.testing.assert_close(got["grads"][name], want, rtol=0, atol=close, msg=name)
    said = batch()["attention_mask"].clone()
    said[:, 0] = False
    logp = (got["logits"] / 0.8).log_softmax(-1).gather(-1, got["ids"].long())
    torch.testing.assert_close(got["kept"][said], logp[said], rtol=0, atol=1e-5)
    forward, missing, shape = got["errors"]
    assert "for the losses" in forward and "no 'given_ids'" in missing and "[B,S,n]" in shape


def test_fewer_tokens_of_the_teacher_bound_the_divergence_from_below(world2, models):
    path = save_model(models, "qwen3", False)
    losses = [world2.run(drawn_to, path, SP, k)[0]["found"]["loss"] for k in (1, 8, VOCAB)]
    assert 0 < losses[0] < losses[1] < losses[2]


def nan_loss(outputs: Any, b: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    loss, stats = loss_fn(outputs, b)
    return loss * float("nan"), stats


def constant_loss(outputs: Any, b: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return torch.zeros((), device=outputs["logprobs"].device), {}


def sometimes_constant_loss(outputs: Any, b: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A constant but for the micro-batch with the longest row, where it is 0 with a gradient."""
    if b["input_ids"].shape[1] < batch()["input_ids"].shape[1]:
        return constant_loss(outputs, b)
    return outputs["logprobs"].sum() * 0.0, {}


def detached_loss(outputs: Any, b: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return outputs["logprobs"].detach().sum(), {}


def vector_loss(outputs: Any, b: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return outputs["logprobs"].sum(1), {}


def error_of(fn: Any, *args: Any, **kw: Any) -> str:
    try:
        fn(*args, **kw)
    except ValueError as e:
        return str(e)
    return "no error"


def odd_steps(path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(path, parallel, optimizer=dict(weight_decay=0.0))
    before = state(engine)
    nan = engine.train_batch(batch(), nan_loss, weight_fn, **OUT)
    detached = error_of(engine.train_batch, batch(), detached_loss, weight_fn, **OUT)
    untouched = state(engine)
    still = engine.train_batch(batch(), sometimes_constant_loss, weight_fn, **OUT)
    good = engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
    after = state(engine)
    lefts = batch()
    lefts["attention_mask"] = lefts["attention_mask"].flip(1)
    errors = dict(
        weight=error_of(engine.train_batch, batch(), loss_fn, lambda b: 0.0, **OUT),
        vector=error_of(engine.train_batch, batch(), vector_loss, weight_fn)
        if engine.layout.pp == 1 else "",
        constant=error_of(engine.train_batch, batch(), constant_loss, weight_fn, **OUT),
        detached=detached,
        outputs=error_of(engine.forward, batch(), outputs=("logprob",)),
        values=error_of(engine.forward, batch(), outputs=("values",)),
        temperature=error_of(engine.forward, batch(), temperature=0.0),
        padding=error_of(engine.forward, lefts),
        pickle=error_of(engine.save, SaveLoadMeta(path=path, weight_format="pickle")),
        optim=error_of(engine.save, SaveLoadMeta(path=path, with_optim=True)),
        twice=error_of(engine.initialize),
    )  # fmt: skip
    engine.destroy()
    return dict(
        nan=nan, good=good, still=still, errors=errors, before=before, untouched=untouched,
        after=after,
    )  # fmt: skip


@pytest.mark.parametrize("parallel", [dict(), dict(pp=2)], ids=["dp2", "pp2"])
def test_nan_gradients_skip_the_step_and_bad_input_is_named(world2, models, parallel):
    for r in world2.run(odd_steps, save_model(models, "qwen2", True), parallel):
        assert r["nan"]["update_successful"] == 0.0
        assert r["still"]["grad_norm"] == 0.0 and r["still"]["loss"] == 0.0
        assert r["good"]["update_successful"] == 1.0
        for name, value in r["before"].items():
            assert torch.equal(r["untouched"][name], value), name
            assert not torch.equal(r["after"][name], value), name
        e = r["errors"]
        assert "loss_mask all False" in e["weight"]
        assert "loss_fn" in e["constant"] and "loss_fn" in e["detached"]
        assert "'logprob' does not exist" in e["outputs"] and "logprobs" in e["outputs"]
        assert "'values' needs another head" in e["values"]
        assert "temperature=0.0" in e["temperature"]
        assert "not right-padded" in e["padding"]
        assert "'pickle'" in e["pickle"] and "'hf'" in e["pickle"]
        assert "with_optim" in e["optim"] and "twice" in e["twice"]
        assert r["errors"]["vector"] == "" or "must be a sum, a scalar" in e["vector"]


def watching_entropy(path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Returns the gradients of losses that do not ask for the entropy, watch it, or train by it,
    and how many tensors over this rank's vocabulary each makes after its losses, and how often it
    looks at a number there, for which a GPU would wait."""

    class Counting(TorchDispatchMode):
        wide, looks, on = 0, 0, False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            self.wide += self.on and torch.is_tensor(out) and out.shape[1:] == (columns,)
            self.looks += self.on and func is torch.ops.aten._local_scalar_dense.default
            return out

    engine = make_engine(path, parallel, max_tokens=1000, optimizer={"distributed": False})
    columns, found = min(len(engine.state.models[-1].output_layer.weight), VOCAB), {}
    for name, outputs in (("absent", ("logprobs",)), ("watched", None), ("trained", None)):

        def loss(out: Any, b: Any, trains: bool = name == "trained") -> tuple[Any, dict[str, Any]]:
            counting.on = True
            stats = {"entropy": (out["entropy"].sum(), 1.0)} if "entropy" in out else {}
            bonus = out["entropy"].sum() if trains else 0.0
            return out["logprobs"].square().sum() + bonus, stats

        with Counting() as counting:
            engine.backward_batch(batch(), loss, weight_fn, outputs=outputs or OUT["outputs"])
        found[name] = state(engine, grads=True), counting.wide, counting.looks
    engine.destroy()
    return found


@pytest.mark.parametrize("parallel", [dict(tp=2), dict(cp=2)])
def test_an_entropy_that_is_only_watched_costs_backward_nothing(world2, models, parallel):
    path = save_model(models, "qwen3", False)
    found = world2.run(watching_entropy, path, parallel)
    each = (found[0][name] for name in ("absent", "watched", "trained"))
    (absent, watched, trained), wide, looks = zip(*each, strict=True)
    for name, grad in absent.items():
        assert torch.equal(grad, watched[name]), name
    assert any(not torch.equal(grad, trained[name]) for name, grad in absent.items())
    assert wide[0] == wide[1] < wide[2] and looks[0] == looks[1] == looks[2]


def save_and_load(
    path: str, out: str, changed: str, parallel: dict[str, Any], dtype: str, zero: bool
) -> dict[str, Any]:
    """Loads and saves HF's format; then loads other weights and trains them for a step."""
    engine = make_engine(path, parallel, dtype=dtype, optimizer=dict(distributed=zero))
    engine.save(SaveLoadMeta(path=out))
    engine.load(SaveLoadMeta(path=changed))
    loaded = state(engine)
    frozen = dict(engine.config.optimizer.__dict__)
    engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
    stepped = state(engine)
    engine.destroy()
    return dict(loaded=loaded, stepped=stepped, lr=frozen["lr"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel", [dict(tp=2), dict(pp=2), dict()], ids=["tp2", "pp2", "zero"])
def test_hf_to_engine_to_hf_is_bit_exact(world2, tmp_path, dtype, parallel):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch_dtype = getattr(torch, dtype)
    hf = tiny_hf("qwen2", tie=True, dtype=torch_dtype)
    hf.save_pretrained(tmp_path / "in")
    other = tiny_hf("qwen2", tie=True, dtype=torch_dtype, seed=1)
    other.save_pretrained(tmp_path / "other")
    r = world2.run(
        save_and_load, str(tmp_path / "in"), str(tmp_path / "out"), str(tmp_path / "other"),
        parallel, dtype, not parallel,
    )[0]  # fmt: skip
    a, b = (load_file(tmp_path / d / "model.safetensors") for d in ("in", "out"))
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype == torch_dtype and torch.equal(value, b[name]), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch_dtype)
    for name, value in hf.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    for name, value in other.state_dict().items():
        if name == "lm_head.weight":
            continue
        assert torch.equal(r["loaded"][name], value), name
        # the step starts from the loaded weights, also where an fp32 master copy is kept
        moved = (r["stepped"][name].float() - value.float()).abs().max()
        assert 0 < moved < 4 * r["lr"] + 0.01 * value.float().abs().max(), name


def schedule_of(path: str, kind: str, steps: int, warmup: float) -> list[float]:
    from megarl.config.engine import OptimizerConfig, TrainEngineConfig
    from megarl.engine import MegatronEngine

    opt = OptimizerConfig(lr=1.0, lr_scheduler_type=kind, warmup_steps=warmup, min_lr_ratio=0.1)
    engine = MegatronEngine(TrainEngineConfig(path=path, optimizer=opt))
    engine.initialize(
        None, FinetuneSpec(total_train_epochs=2, dataset_size=steps // 2, train_batch_size=1)
    )
    lrs = []
    for _ in range(steps + 2):
        lrs.append(engine.state.optimizer.param_groups[0]["lr"])
        engine.step_lr_scheduler()
    engine.destroy()
    return lrs


def test_learning_rate_schedules(world2, models):
    path = save_model(models, "llama", False)
    constant = world2.run(schedule_of, path, "constant", 10, 0.3)[0]
    assert constant == pytest.approx([1 / 3, 2 / 3] + [1.0] * 10)
    linear = world2.run(schedule_of, path, "linear", 10, 0.0)[0]
    assert linear == pytest.approx([1 - 0.9 * k / 10 for k in range(11)] + [0.1])
    cosine = world2.run(schedule_of, path, "cosine", 10, 0.1)[0]
    assert cosine[0] == 1.0 and cosine[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(cosine[:-1]))


def by_sequence(path: str) -> dict[str, Any]:
    engine = make_engine(path, dict(tp=2), trained=False)
    b = batch()
    lens = b["attention_mask"].sum(1).tolist()
    result = dict(
        padded=engine.forward(b),
        packed=engine.forward(b, output_seqlens=lens),
        hooked=engine.forward(
            b, post_hook=lambda o, row: o["logprobs"].sum() * row["advantages"],
            aggregate_fn=torch.stack,
        ),
        dense=engine.forward(b, outputs=("logprobs", "greedy_match")),
        lens=lens,
        untrained=error_of(engine.train_batch, b, loss_fn, weight_fn),
        wrong=error_of(engine.forward, b, output_seqlens=[1]),
    )  # fmt: skip
    engine.destroy()
    return result


def test_forward_by_sequence(world2, models):
    r = world2.run(by_sequence, save_model(models, "qwen2", False))[1]
    rows = [row[:n] for row, n in zip(r["padded"], r["lens"], strict=True)]
    assert torch.equal(r["packed"], torch.cat(rows))
    want = torch.stack([row.sum() for row in rows]) * batch()["advantages"]
    torch.testing.assert_close(r["hooked"], want)
    assert torch.equal(r["dense"]["logprobs"], r["padded"])
    assert (r["padded"][:, 0] == 0).all()
    assert "no optimizer" in r["untrained"] and "1 entries for 7" in r["wrong"]


def test_ways_of_context_parallelism_that_are_not_there_are_refused(world2, models):
    path = save_model(models, "llama", False)
    p2p = dict(cp_comm_type="p2p")
    (message, _) = world2.run(error_of, make_engine, path, dict(cp=2), options=p2p)
    assert "options.cp_comm_type='p2p' needs Transformer Engine" in message and "'auto'" in message


def scratch(path: str, parallel: dict[str, Any], seed: int) -> dict[str, Any]:
    from megarl.config.engine import ParallelConfig, TrainEngineConfig
    from megarl.engine import MegatronEngine

    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    cfg = TrainEngineConfig(path=path, init_from_scratch=True, parallel=ParallelConfig(**parallel))
    engine = MegatronEngine(cfg, seed=seed)
    engine.initialize()
    result = dict(weights=state(engine), undisturbed=torch.equal(torch.rand(3), drawn))
    engine.destroy()
    return result


def test_weights_from_scratch_depend_on_the_seed_only(world2, models):
    path = save_model(models, "qwen3", False)
    a, b, c = (
        world2.run(scratch, path, p, s)[0] for p, s in ((dict(tp=2), 1), (dict(pp=2), 1), ({}, 2))
    )
    assert a["undisturbed"], "initialize() must not touch the caller's random numbers"
    name = "model.layers.1.mlp.down_proj.weight"
    assert a["weights"]["model.embed_tokens.weight"].shape == (VOCAB, 64)
    for key, value in a["weights"].items():
        assert torch.equal(b["weights"][key], value), key
    assert not torch.equal(c["weights"][name], a["weights"][name])


def abandoned(path: str) -> str:
    """Keeps rank 1 away from a forward pass; rank 0's error says what it waited for."""
    engine = make_engine(path, {}, trained=False)
    if dist.get_rank() == 1:
        time.sleep(3.0)  # rank 0 must meet the timeout, not a closed connection
        return ""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    try:
        engine.forward(batch())
    except RuntimeError as e:
        return str(e)
    return "no error"


def test_a_wait_for_nobody_says_who_waited_for_what(models):
    with World(2) as w:
        message = w.run(abandoned, save_model(models, "llama", False))[0]
        w.close(kill=True)
    assert "rank 0 (Coords(tp=0" in message and "waiting for other ranks in forward" in message


def dtypes_between_stages(path: str, parallel: dict[str, Any]) -> set[torch.dtype]:
    """Trains a step of ragged micro-batches; returns the dtypes of what stages send each other."""
    sent: set[torch.dtype] = set()

    def batched(ops: list[Any]) -> Any:
        sent.update(op.tensor.dtype for op in ops)
        return at_once(ops)

    def alone(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.add(tensor.dtype)
        return one(tensor, *args, **kwargs)

    at_once, one = dist.batch_isend_irecv, dist.isend
    calls: dict[str, Any] = {"batch_isend_irecv": batched}
    if parallel.get("vpp", 1) > 1:  # chunks send one by one; batches know isend by its identity
        calls["isend"] = alone
    engine = make_engine(path, parallel)
    with mock.patch.multiple(dist, **calls):
        engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
        engine.forward(batch(), outputs=("logprobs",))
    engine.destroy()
    return sent


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 4}, {**SP, "pp": 2}])
def test_stages_send_no_shapes_before_tensors(worlds, models, parallel):
    """A rank would stop its device to read them; layouts equal one rank's in test_invariance."""
    world = worlds(2 if parallel in ({"pp": 2}, {"pp": 2, "vpp": 2}) else 4)
    path = save_model(models, "qwen3", False)
    for sent in world.run(dtypes_between_stages, path, parallel):
        assert sent == {torch.float32}
