"""Built models against Hugging Face: logits, packed and padded, tensor and context parallel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.models.build import resolve_attention
from megarl.models.params import named_params
from megarl.parallel.packing import zigzag_index
from megarl.transfer.gather import BucketGatherer, plan_buckets
from tests.dist.models_util import all_gather_dim, built_model, positions, thd
from tests.dist.world import World
from tests.tiny import GLM_KINDS, KINDS, VOCAB, save_tiny, tiny_hf

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16, rope_theta=500.0,
)  # fmt: skip
LINEAR = dict(rope_type="linear", factor=2.5, rope_theta=10000.0)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{k: (k, {}) for k in (*KINDS, *GLM_KINDS)},
    "llama-tied": ("llama", dict(tie=True)),
    "llama-llama3-rope": ("llama", dict(rope_parameters=LLAMA3)),
    "qwen3-linear-rope": ("qwen3", dict(rope_parameters=LINEAR)),
    "qwen2-one-kv-head": ("qwen2", dict(num_key_value_heads=1)),  # fewer than tp=2
    "qwen3-one-kv-head": ("qwen3", dict(num_key_value_heads=1)),
}
LENGTHS = [5, 33, 1, 17, 40, 12, 12, 90]


def ids_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def run_logits(path: Path, parallel: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (sbhd logits of two sequences [2, 48, V], thd logits of LENGTHS [T, V])."""
    with built_model(path, parallel) as (model, groups), torch.no_grad():
        chunk = model.chunks[0].eval()
        ids = ids_of(96).view(2, 48)
        padded = all_gather_dim(chunk(ids, positions(ids), None), groups.tp, -1)
        packed_ids = ids_of(sum(LENGTHS), seed=1)[None]
        out = chunk(packed_ids, positions(packed_ids), None, packed_seq_params=thd(LENGTHS))
        packed = all_gather_dim(out, groups.tp, -1)[0]
        return padded[..., :VOCAB], packed[..., :VOCAB]


def run_requires_grad(path: Path) -> list[bool]:
    """Returns requires_grad of every layer's output in a pass under no_grad."""
    found: list[bool] = []
    with built_model(path, {}) as (model, _), torch.no_grad():
        for layer in model.chunks[0].decoder.layers:
            layer.register_forward_hook(lambda m, args, out: found.append(out[0].requires_grad))
        model.chunks[0](ids_of(8)[None], positions(ids_of(8)[None]), None)
    return found


@pytest.mark.parametrize("kind", ("qwen3", "glm4"))
def test_layers_keep_no_graph_without_gradients(world1: World, kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, kind, layers=2)
    assert world1.run(run_requires_grad, tmp_path) == [[False, False]]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_hf(world1: World, world2: World, name: str, tmp_path: Path) -> None:
    kind, over = MODELS[name]
    hf = tiny_hf(kind, layers=2, **over)
    hf.save_pretrained(tmp_path)
    with torch.no_grad():
        want = hf(ids_of(96).view(2, 48)).logits
        parts = ids_of(sum(LENGTHS), seed=1).split(LENGTHS)
        want_packed = torch.cat([hf(p[None]).logits[0] for p in parts])
    assert want.std() > 0.3
    for world, parallel in (
        (world1, dict()),
        (world2, dict(tp=2, sequence_parallel=kind == "qwen3")),
    ):
        for padded, packed in world.run(run_logits, tmp_path, parallel):
            assert (padded - want).abs().max() < 1e-4
            assert (packed - want_packed).abs().max() < 1e-4


def run_gradients(path: Path) -> list[dict[str, torch.Tensor]]:
    """Returns gradients of a sum over packed tokens, without and with recomputation."""
    grads = []
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    for over in ({}, full, dict(recompute_granularity="selective")):
        with built_model(path, {}, **over) as (model, _):
            chunk = model.chunks[0].train()
            ids = ids_of(sum(LENGTHS), seed=1)[None]
            out = chunk(ids, positions(ids), None, packed_seq_params=thd(LENGTHS))
            out[..., :VOCAB].logsumexp(-1).sum().backward()
            grads.append({n: p.grad for n, p in chunk.named_parameters()})
    return grads


def test_packed_gradients_do_not_change_under_recomputation(world1: World, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", layers=2)
    plain, *recomputed = world1.run(run_gradients, tmp_path)[0]
    assert len(recomputed) == 2
    for name, grad in plain.items():
        assert all(torch.equal(grad, other[name]) for other in recomputed), name


def run_context_parallel(path: Path) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns thd logits of this rank's zigzag share, their positions, and a gradient norm."""
    lengths = [8, 40, 4, 64]
    with built_model(path, dict(cp=2)) as (model, groups):
        chunk = model.chunks[0].train()
        index = zigzag_index(lengths, 2, groups.coords.cp)
        ids = ids_of(sum(lengths), seed=2)[index][None]
        out = chunk(ids, positions(ids), None, packed_seq_params=thd(lengths))[0, :, :VOCAB]
        out.logsumexp(-1).sum().backward()
        grad = chunk.decoder.layers[0].self_attention.linear_qkv.weight.grad
        torch.distributed.all_reduce(grad, group=groups.cp)
        return out.detach(), index, float(grad.norm())


def test_context_parallel_equals_hf(world2: World, tmp_path: Path) -> None:
    """The first layer attends to all earlier tokens, the second one through a window."""
    window = dict(use_sliding_window=True, sliding_window=11, max_window_layers=1)
    hf = tiny_hf("qwen2", layers=2, **window)
    hf.save_pretrained(tmp_path)
    lengths = [8, 40, 4, 64]
    want = torch.cat([hf(p[None]).logits[0] for p in ids_of(116, seed=2).split(lengths)])
    want.logsumexp(-1).sum().backward()
    attention = hf.model.layers[0].self_attn
    norm = torch.cat([getattr(attention, f"{x}_proj").weight.grad.flatten() for x in "qkv"]).norm()
    for logits, index, grad_norm in world2.run(run_context_parallel, tmp_path):
        assert (logits - want[index]).abs().max() < 1e-4
        assert abs(grad_norm / norm - 1) < 1e-4


def run_random(path: Path, parallel: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    with built_model(path, parallel, load=False, seed=7) as (model, groups):
        params = named_params(model.chunks)
        buckets = plan_buckets(model.table, torch.float32, 1 << 14)
        gatherer = BucketGatherer(model.table, groups.rank, params, buckets)
        out: list[tuple[str, torch.Tensor]] = []
        for bucket in buckets:
            if (flat := gatherer.gather(bucket)) is not None:
                out.extend(bucket.views(flat))
        return out


def test_random_weights_depend_on_the_seed_alone(world2: World, tmp_path: Path) -> None:
    """tp2, pp2 and dp2 have the same model, drawn as HF draws it."""
    save_tiny(tmp_path, "qwen2", layers=2)
    layouts: tuple[dict[str, Any], ...] = (dict(tp=2), dict(pp=2), dict())
    runs = [dict(world2.run(run_random, tmp_path, p)[0]) for p in layouts]
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]) and torch.equal(tensor, runs[2][name]), name
        if "norm" in name:
            assert tensor.eq(1).all()
        elif name.endswith("bias"):
            assert tensor.eq(0).all()
        else:
            assert 0.018 < tensor.std() < 0.022


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_norm_has_hf_numerics(dtype: torch.dtype) -> None:
    """The norm scales after the cast: in bfloat16 few roundings differ, each by one step."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from megarl.models.layers import RMSNorm

    config = SimpleNamespace(
        params_dtype=dtype, use_cpu_initialization=True, sequence_parallel=True
    )
    ours, theirs = RMSNorm(config, 96, eps=1e-6), Qwen3RMSNorm(96, eps=1e-6).to(dtype)
    g = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, generator=g).to(dtype), torch.randn(500, 96, generator=g).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
        a, b = ours(x), theirs(x)
    assert a.dtype == dtype and vars(ours.weight)["sequence_parallel"]
    assert (a - b).abs().max() <= 2 * torch.finfo(dtype).eps * b.abs().max()
    assert dtype == torch.float32 or a.eq(b).float().mean() > 0.999


def test_attention_that_cannot_run_is_refused() -> None:
    cpu = torch.device("cpu")
    assert resolve_attention("auto", cpu) == resolve_attention("sdpa", cpu) == "sdpa"
    with pytest.raises(ValueError, match="needs a GPU and Transformer Engine"):
        resolve_attention("te", cpu)
    with pytest.raises(ValueError, match="'flash'"):
        resolve_attention("flash", cpu)
