"""Makes megatron-core's own code call Transformer Engine as it does while it trains. Transformer
Engine's functions keep their signatures and do nothing.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from megarl.parallel.layout import Layout
from tests.te.cases import SP

T, H = 8, 64  # tokens, hidden size of the tiny models
FP8_RECIPES = {"delayed": "2.2", "tensorwise": "2.2", "blockwise": "2.3", "mxfp8": "2.2"}


def call_all() -> dict[str, str | None]:
    """Returns what is wrong with each call, None where Transformer Engine takes it."""
    from megatron.core.utils import is_te_min_version

    calls = {f.__name__: f for f in (layers, rope, permute, gemm, checkpoint, adam, clip)}
    named: dict[str, Callable[[], Any]] = dict(calls)
    for recipe, since in FP8_RECIPES.items():
        if is_te_min_version(since):
            named[f"fp8 {recipe}"] = lambda recipe=recipe: fp8(recipe)  # type: ignore[misc]
    return {name: _wrong(call) for name, call in named.items()}


def _wrong(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


@contextmanager
def _inert(owner: Any, **results: Any) -> Iterator[None]:
    """Makes functions of `owner` mocks of the same signature that return `results`."""
    with ExitStack() as stack:
        for name, result in results.items():
            double = mock.create_autospec(getattr(owner, name), return_value=result)
            stack.enter_context(mock.patch.object(owner, name, double))
        yield


def layers() -> None:
    import transformer_engine.pytorch as te

    from tests.te.ranks import built_model, tiny

    from megatron.core.extensions import transformer_engine as ext
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    x = torch.empty(T, 1, H)
    heads = torch.empty(T, 2, 16)
    cu = torch.tensor([0, T], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu, max_seqlen_q=T, max_seqlen_kv=T,
    )  # fmt: skip
    of_linear = (ext.TELinear, ext.TELayerNormColumnParallelLinear)
    met = set()
    with ExitStack() as stack:
        for layer in (te.Linear, te.LayerNormLinear, te.GroupedLinear, te.DotProductAttention):
            stack.enter_context(mock.patch.object(layer, "forward", autospec=True))
        model = built_model(tiny("qwen3_moe", "lm"), Layout(**SP, ep=2), 1, "te")
        made, _ = stack.enter_context(model)
        for module in made.chunks[0].modules():
            met.add(type(module).__name__)
            if isinstance(module, of_linear):
                module.forward(x)
            elif isinstance(module, ext.TEGroupedLinear):
                module.forward(x, [T, 0])
            elif isinstance(module, ext.TEDotProductAttention):
                module.forward(
                    heads, heads, heads, None, AttnMaskType.padding_causal,
                    packed_seq_params=packed,
                )  # fmt: skip
    expected = {
        "TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention",
        "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear",
    }  # fmt: skip
    if not expected <= met:
        raise LookupError(f"no {sorted(expected - met)} in the model")


def rope() -> None:
    from megatron.core.extensions import transformer_engine as ext

    t, freqs, cu = torch.empty(T, 1, 2, 16), torch.empty(T, 1, 1, 16), torch.tensor([0, T])
    with _inert(ext, apply_rotary_pos_emb=t):
        ext.fused_apply_rotary_pos_emb(t, freqs, interleaved=False)
        ext.fused_apply_rotary_pos_emb_thd(t[:, 0], cu, freqs, cp_size=2, cp_rank=1)


def permute() -> None:
    from megatron.core.transformer.moe import moe_utils

    tokens, probs = torch.empty(T, H), torch.empty(T, 4)
    routing, order, sizes = torch.ones(T, 4).bool(), torch.arange(4), torch.full((4,), 2)
    with _inert(
        moe_utils, fused_permute=(tokens, order), fused_permute_with_probs=(tokens, probs, order),
        fused_unpermute=tokens, fused_sort_chunks_by_index=tokens,
        fused_sort_chunks_by_index_with_probs=(tokens, probs),
    ):  # fmt: skip
        moe_utils.permute(tokens, routing, num_out_tokens=T, fused=True)
        moe_utils.permute(tokens, routing, probs=probs, num_out_tokens=T, fused=True)
        moe_utils.unpermute(tokens, order, tokens.shape, routing_map=routing, fused=True)
        moe_utils.sort_chunks_by_idxs(tokens, sizes, order, fused=True)
        moe_utils.sort_chunks_by_idxs(tokens, sizes, order, probs=probs, fused=True)


def gemm() -> None:
    """Calls the router's product, which megatron-core does without where it finds none."""
    from megatron.core.extensions import transformer_engine as ext

    if ext.te_general_gemm is None:
        return
    weight, x = torch.empty(4, H), torch.empty(T, H)
    with _inert(ext, general_gemm=[x], get_workspace=x):
        ext.te_general_gemm(weight, x, torch.float32, layout="TN", bias=None)
        ext.te_general_gemm(weight, x, torch.float32, layout="NN", grad=True)


def checkpoint() -> None:
    import transformer_engine.pytorch.distributed as te

    from megatron.core.extensions import transformer_engine as ext

    x = torch.empty(T, 1, H)
    with _inert(te, checkpoint=x):
        ext.te_checkpoint(lambda *_: x, False, lambda: None, None, x, None, None, None, None, None)


def adam() -> None:
    """Binds the arguments that _get_megatron_optimizer_based_on_param_groups gives it."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    from megatron.core.optimizer import Adam

    if Adam is not FusedAdam:
        raise LookupError(f"megatron-core's Adam is {Adam}")
    inspect.signature(FusedAdam).bind(
        params=[], lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, adam_w_mode=True,
        exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32, master_weights=True,
        use_decoupled_grad=True, master_weight_dtype=torch.float32, store_param_remainders=False,
    )  # fmt: skip


def clip() -> None:
    from megatron.core.optimizer import clip_grads

    buffer, grads = torch.zeros(1), [torch.empty(3)]
    applier = inspect.signature(clip_grads.multi_tensor_applier)
    applier.bind(clip_grads.l2_norm_impl, buffer, [grads], False)
    applier.bind(clip_grads.multi_tensor_scale_impl, buffer, [grads, grads], 0.5)


def fp8(recipe: str) -> None:
    from tests.te.ranks import built_model, tiny

    from megatron.core import fp8_utils
    from megatron.core.enums import Fp8Recipe

    layout = Layout(**SP, ep=2)
    form = "e4m3" if recipe in ("blockwise", "mxfp8") else "hybrid"
    fields = {"fp8": form, "fp8_recipe": recipe}
    with built_model(tiny("qwen3_moe", "lm"), layout, 1, "te", **fields) as (made, _):
        config = copy.copy(made.config)
        config.fp8_recipe = Fp8Recipe(recipe)
        fp8_utils.get_fp8_context(config, 0)
