"""Turns a ModelConfig into megatron-core's TransformerConfig and GPTModel chunks.

Here is also how keys and values travel between context-parallel ranks, and which matrix products
Transformer Engine makes in FP8: weights, gradients, the LM head and everything outside of the
layers' linear maps keep their dtype.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megarl.config.engine import ParallelConfig
from megarl.models.attention import SDPACoreAttention, SinkAttention, te_attention_with_tries
from megarl.models.families import family_of
from megarl.models.layers import GroupLimited, RMSNorm, ValueHead, ZeroCentredRMSNorm, tell_factor
from megarl.models.options import EngineOptions
from megarl.models.params import init_params, mark_params, named_params
from megarl.models.piece_table import VOCAB_DIVISIBLE_BY, PieceTable, build_piece_table
from megarl.models.shapes import ModelConfig
from megarl.models.trie_params import rotate_by_depth
from megarl.parallel import mcore
from megarl.parallel.layout import Layout
from megarl.utils.extras import install_hint

from megatron.core import parallel_state as ps
from megatron.core import transformer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_te_version, is_te_min_version

# the first Transformer Engine that takes packed sequences by each way
_PACKED_SINCE = {"p2p": "1.7", "all_gather": "2.18", "a2a": "2.18"}


def cp_comm_type(asked: str, model: ModelConfig, parallel: ParallelConfig, attention: str) -> str:
    """Returns options.cp_comm_type, `asked`, with "auto" resolved, for `attention` "te" or "sdpa".

    Raises ValueError, naming value and fix, where the attention, the model or the installed
    Transformer Engine cannot do it.
    """
    slides = model.attention.window is not None and parallel.cp > 1
    # under context parallelism every rank gets the sinks' whole gradient, and the sum is too large
    te_with_sinks = attention == "te" and model.attention.sinks
    if te_with_sinks and (parallel.cp > 1 or not is_te_min_version("2.8")):
        raise ValueError(
            f"attention='te' with parallel.cp={parallel.cp}: {model.family} has attention sinks, "
            "which Transformer Engine trains from 2.8 on and with parallel.cp=1 alone "
            f"({get_te_version()} is installed); use attention='sdpa'"
        )
    if asked == "auto":
        if attention == "te" and not slides:
            return "p2p"
        asked = "all_gather"
    if attention == "te":
        _check_te(model, asked, parallel, slides)
    elif asked != "all_gather":
        raise ValueError(
            f"options.cp_comm_type={asked!r} needs Transformer Engine's attention; use 'auto'"
        )
    return asked


def _check_te(model: ModelConfig, asked: str, parallel: ParallelConfig, slides: bool) -> None:
    """Raises ValueError where the installed Transformer Engine cannot do this for the model.
    slides: it has a sliding window, and cp > 1."""
    if asked == "p2p" and slides:
        raise ValueError(
            f"options.cp_comm_type='p2p': Transformer Engine takes a sliding window (of "
            f"{model.attention.window} tokens in {model.family}) by 'all_gather' and 'a2a' only; "
            "use 'auto'"
        )
    if model.attention.head_dim != model.attention.v_head_dim and asked != "p2p":
        raise ValueError(
            f"options.cp_comm_type={asked!r}: Transformer Engine takes keys and values of unlike "
            f"sizes ({model.family}'s) by 'p2p' only; use 'p2p'"
        )
    if not is_te_min_version(_PACKED_SINCE[asked]):
        raise ValueError(
            f"options.cp_comm_type={asked!r} takes packed sequences from Transformer Engine "
            f"{_PACKED_SINCE[asked]} on, and {get_te_version()} is installed; use "
            + ("parallel.cp=1" if slides else "'p2p'")
        )
    heads, kv = model.attention.heads, model.attention.kv_heads
    tp, cp = parallel.tp, parallel.cp
    if asked == "a2a" and (heads % (tp * cp) or kv % (tp * cp)):
        raise ValueError(
            f"options.cp_comm_type='a2a' shares heads out: tp*cp = {tp}*{cp} must divide "
            f"num_attention_heads={heads} and num_key_value_heads={kv}; use 'p2p'"
        )


# recipe -> (format, smallest compute capability, sizes of matrix products are multiples of)
_RECIPES = {
    "delayed": ("hybrid", (8, 9), 16),
    "tensorwise": ("hybrid", (8, 9), 16),
    "blockwise": ("e4m3", (9, 0), 16),
    "mxfp8": ("e4m3", (10, 0), 32),
}
_NO_MXFP8_FROM = (12, 0)  # Transformer Engine has not all layouts of its products there


def fp8_fields(
    recipe: str, model: ModelConfig, layout: Layout, *, dtype: torch.dtype, attention: str
) -> dict[str, Any]:
    """Returns the fields of the TransformerConfig for an FP8 `recipe`, none for "none". Raises
    ValueError where these layers, this dtype, this GPU or these sizes cannot do it."""
    if recipe == "none":
        return {}
    form, least, unit = _RECIPES[recipe]
    if attention != "te":
        raise ValueError(
            f"fp8={recipe!r} needs Transformer Engine's layers, that is a GPU, Transformer Engine "
            f"({install_hint('gpu')}) and attention='te' or 'auto'; use fp8='none'"
        )
    if dtype != torch.bfloat16:
        raise ValueError(
            f"fp8={recipe!r} needs dtype='bfloat16' (it is {str(dtype).removeprefix('torch.')})"
        )
    if not runs_on(recipe, found := torch.cuda.get_device_capability()):
        bound = f" to below {_dotted(_NO_MXFP8_FROM)}" if recipe == "mxfp8" else ""
        fits = " or ".join([*(repr(r) for r in _RECIPES if runs_on(r, found)), "'none'"])
        raise ValueError(
            f"fp8={recipe!r} needs a GPU of compute capability {_dotted(least)}{bound}, this one "
            f"has {_dotted(found)}; use {fits}"
        )
    linear = {p.op: p for p, _ in family_of(model).params(model) if p.op.linear}
    for op, p in linear.items():
        shape = op.local_shape(model, layout.tp if p.expert is None else layout.etp, 0)
        if any(size % unit for size in shape):
            raise ValueError(
                f"fp8={recipe!r} needs sizes that are multiples of {unit}, but a rank's {p.name} "
                f"is {list(shape)}; lower parallel.tp or use fp8='none'"
            )
    return {"fp8": form, "fp8_recipe": recipe}


def drop_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Drops the quantised weights that Transformer Engine's layers keep between micro-batches:
    about two bytes a parameter. The next pass makes them anew, as after every update."""
    for chunk in chunks:
        for module in chunk.modules():
            copies = getattr(module, "_fp8_workspaces", None)
            if copies:
                copies.clear()


def runs_on(recipe: str, capability: tuple[int, int]) -> bool:
    """Returns whether a GPU of this compute capability (major, minor) can run the recipe."""
    if recipe == "mxfp8" and capability >= _NO_MXFP8_FROM:
        return False
    return _RECIPES[recipe][1] <= capability


def token_unit(recipe: str) -> int:
    """Returns the number of tokens that a rank's tokens are padded to a multiple of."""
    return 1 if recipe == "none" else _RECIPES[recipe][2]


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@dataclass(frozen=True)
class BuiltModel:
    """Holds this rank's part of a model: `chunks`, one module per virtual pipeline chunk, with
    their config and the piece table of the whole model."""

    config: TransformerConfig
    chunks: list[GPTModel]
    table: PieceTable


def build_model(
    model: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    attention: str = "auto",
    seed: int | None = None,
    vocab_divisible_by: int = VOCAB_DIVISIBLE_BY,
    options: EngineOptions | None = None,
    share_prefixes: bool = False,
    **overrides: Any,
) -> BuiltModel:
    """Builds this rank's chunks of `model`. Collective over the layout's ranks.

    megatron-core's parallel_state must hold the groups of `layout`. Parameters have `dtype`; they
    are random by `seed` (the same model for every layout), or, when it is None, uninitialised until
    load_hf fills them. `share_prefixes`: the model takes TrieParams too, over which this project's
    attention attends also in Transformer Engine's layers. `overrides` go to the
    TransformerConfig. Raises ValueError where `attention` or the experts' token dispatcher is not
    available here.
    """
    device = torch.device(device) if device is not None else mcore.device()
    table = build_piece_table(model, layout, vocab_divisible_by=vocab_divisible_by)
    use_te = resolve_attention(attention, device) == "te"
    config = transformer_config(
        model, layout, dtype=dtype, device=device, use_te=use_te, options=options, **overrides
    )
    make = partial(_chunk, model, config, table.padded_vocab_size, use_te, share_prefixes)
    chunks = [make(i if layout.vpp > 1 else None) for i in range(layout.vpp)]
    for chunk in chunks:
        _settle_routers(chunk, model, device)
        if share_prefixes:
            rotate_by_depth(chunk)
    coords, params = layout.coords(torch.distributed.get_rank()), named_params(chunks)
    mark_params(table, coords, params)
    if seed is not None:
        init_params(table, coords, params, seed=seed)
    return BuiltModel(config, chunks, table)


def resolve_attention(attention: str, device: torch.device) -> str:
    """Returns "te" or "sdpa" for `attention`, which may also be "auto". Raises ValueError if
    Transformer Engine is asked for where it cannot run."""
    have_te = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if have_te and attention != "sdpa":
        # megatron-core takes a broken installation for none; here its own error shows
        importlib.import_module("transformer_engine.pytorch")
    if attention == "auto":
        return "te" if have_te else "sdpa"
    if attention == "te" and not have_te:
        raise ValueError(
            f"attention='te' needs a GPU and Transformer Engine ({install_hint('gpu')}); "
            "use attention='auto' or 'sdpa'"
        )
    if attention not in ("te", "sdpa"):
        raise ValueError(f"attention={attention!r}: use 'auto', 'te' or 'sdpa'")
    return attention


def transformer_config(
    model: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    use_te: bool,
    options: EngineOptions | None = None,
    **overrides: Any,
) -> TransformerConfig:
    """Returns megatron-core's TransformerConfig of `model` cut as `layout` says; `overrides`
    replace any field. Raises ValueError where the experts' token dispatcher needs DeepEP and there
    is none."""
    family = family_of(model)
    fields = {
        **_architecture(model),
        **_parallel(layout),
        **_kernels(device, use_te),
        **_experts(model, options or EngineOptions(), use_te),
        **family.transformer_fields(model),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }
    kind = getattr(transformer, family.config_class)
    config: TransformerConfig = kind(**{**fields, **overrides})
    if not config.multi_latent_attention:
        tell_factor(config, model.rope_scaling)
    return config


def _architecture(m: ModelConfig) -> dict[str, Any]:
    return dict(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.intermediate_size,
        num_attention_heads=m.attention.heads,
        num_query_groups=m.attention.kv_heads,
        kv_channels=m.attention.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=m.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # weights are filled from the piece table: no numbers need be drawn for them
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
    )


def _leave(weight: torch.Tensor) -> None:
    """Leaves the weight as it is, as an initialisation."""


def _experts(m: ModelConfig, options: EngineOptions, use_te: bool) -> dict[str, Any]:
    if m.moe is None:
        return {}
    if options.moe_token_dispatcher_type == "flex" and (why := mcore.deep_ep_problem()):
        raise ValueError(f"moe_token_dispatcher_type='flex' needs DeepEP: {why}; use 'alltoall'")
    if options.moe_shared_expert_overlap and not m.moe.shared_intermediate_size:
        raise ValueError(
            f"options.moe_shared_expert_overlap=True: {m.family} has no shared expert; leave it out"
        )
    return dict(
        num_moe_experts=m.moe.num_experts,
        moe_router_topk=m.moe.top_k,
        moe_ffn_hidden_size=m.moe.intermediate_size,
        moe_layer_freq=[int(i not in m.moe.dense_layers) for i in range(m.num_layers)],
        # softmax over the chosen experts is softmax over all, made to sum to 1 over the chosen
        moe_router_pre_softmax=not m.moe.norm_topk_prob,
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid" if m.moe.sigmoid else "softmax",
        moe_router_topk_scaling_factor=m.moe.scale if m.moe.scale != 1 else None,
        moe_router_enable_expert_bias=m.moe.score_bias,
        moe_shared_expert_intermediate_size=m.moe.shared_intermediate_size or None,
        moe_shared_expert_gate=m.moe.shared_gate,
        moe_router_load_balancing_type="aux_loss" if options.moe_aux_loss_coeff else "none",
        **{name: value for name, value in vars(options).items() if name.startswith("moe_")},
        moe_grouped_gemm=use_te,
        moe_permute_fusion=use_te and moe_utils.fused_permute_with_probs is not None,
    )


def _parallel(layout: Layout) -> dict[str, Any]:
    interleaved = layout.vpp > 1
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        pipeline_model_parallel_layout=_pipeline_layout(layout),
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        # packed micro-batches differ in length; megatron asks for this dispatcher even when dense
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # batched p2p pairs the two directions of an interleaved pp=2 wrongly on gloo
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,  # stops the device, for a fault that torch had before 2.6
        # what was sent on only waits for its backward; chunks send theirs behind the computation,
        # and a tensor given up then may be written anew before it has left
        deallocate_pipeline_outputs=not interleaved,
    )


def _pipeline_layout(layout: Layout) -> list[list[str]] | None:
    """Returns the parts of each chunk of an uneven split by megatron-core's names, or None."""
    if layout.split is None:
        return None
    chunks = [["decoder"] * n for n in layout.split]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]


def _kernels(device: torch.device, use_te: bool) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    wgrad = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None  # apex
    return dict(
        use_cpu_initialization=not on_gpu,
        apply_rope_fusion=use_te or not on_gpu,
        bias_activation_fusion=True,
        bias_dropout_fusion=on_gpu,
        gradient_accumulation_fusion=on_gpu and wgrad,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def _chunk(
    model: ModelConfig,
    config: TransformerConfig,
    vocab_rows: int,
    use_te: bool,
    share_prefixes: bool,
    vp_stage: int | None,
) -> GPTModel:
    ignore_virtual = vp_stage is None
    chunk = GPTModel(
        config,
        _block_spec(model, config, vp_stage, use_te, share_prefixes),
        vocab_size=vocab_rows,
        max_sequence_length=model.max_position_embeddings,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    if model.head == "value" and chunk.post_process:
        group = ps.get_tensor_model_parallel_group()
        chunk.output_layer = ValueHead(config, bias=model.score_bias, tp_group=group)
    family_of(model).patch(chunk, model)
    return chunk


def _settle_routers(chunk: GPTModel, model: ModelConfig, device: torch.device) -> None:
    for param in chunk.parameters():
        param.data = param.data.to(device)  # routers and their like are made on the host
    for router in (m for m in chunk.modules() if isinstance(m, TopKRouter)):
        if router.local_tokens_per_expert is not None:
            # Integers, because Float16Module would count in bfloat16, which ends at 256.
            router.local_tokens_per_expert = router.local_tokens_per_expert.long()
        if model.moe is not None and model.moe.groups > 1:
            router.router_replay = GroupLimited(model.moe)


def _block_spec(
    model: ModelConfig,
    config: TransformerConfig,
    vp_stage: int | None,
    use_te: bool,
    share_prefixes: bool,
) -> Any:
    """Returns megatron-core's spec; the local one gets our norm and attention, Transformer Engine's
    our attention over tries where prefixes are shared."""
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    if not use_te:
        _use_own_norm(spec, config)
    if not use_te or share_prefixes:
        own = SinkAttention if model.attention.sinks else SDPACoreAttention
        attention = te_attention_with_tries() if use_te else own
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = attention
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    family_of(model).patch_spec(spec, model, first)
    return spec


def _use_own_norm(spec: Any, config: TransformerConfig) -> None:
    zero_centred = config.layernorm_zero_centered_gamma
    norm: Callable[..., Any] = ZeroCentredRMSNorm if zero_centred else RMSNorm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, name, IdentityOp) is not IdentityOp:
                setattr(attention, name, norm)
    spec.layer_norm = norm
