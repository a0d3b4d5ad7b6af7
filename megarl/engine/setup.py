"""Makes a model in memory of a TrainEngineConfig: finds what the config means for this model,
machine and world (`resolve`), then makes modules, weights, adapters, optimizer (`build`)."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megarl.api.records import FinetuneSpec
from megarl.ckpt.hf import load_hf
from megarl.ckpt.peft import load_peft
from megarl.config.check_parts import section_problems
from megarl.config.engine import TrainEngineConfig
from megarl.config.errors import raise_if_any
from megarl.config.rules import ENGINE, rule_problems
from megarl.engine import optimizer
from megarl.engine.lm_head import LMHead
from megarl.engine.micro_batch import Sharing, alignment
from megarl.engine.routing import Routing
from megarl.models.adapters import Adapters, base_params
from megarl.models.build import (
    BuiltModel,
    build_model,
    cp_comm_type,
    fp8_fields,
    resolve_attention,
    token_unit,
)
from megarl.models.flops import sequence_cost
from megarl.models.hf_config import ModelConfig, check_layout, read_hf_config
from megarl.models.lora import lora_fields
from megarl.models.options import EngineOptions, recompute_fields
from megarl.models.params import named_params
from megarl.models.piece_table import PieceTable
from megarl.observability.logging import get_logger
from megarl.parallel import mcore
from megarl.parallel.groups import ProcessGroups, model_scope
from megarl.parallel.layout import Layout
from megarl.parallel.packing import Alignment, Cost
from megarl.utils.env import attention_problems

from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
)
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.module import Float16Module

log = get_logger(__name__)
# from which ratio of work on tries pay: beside our attention, and beside Transformer Engine's,
# which on whole sequences is the faster of the two
_PAYS = {"sdpa": 1.05, "te": 1.25}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Says what a config means for this model, machine and world; nothing is allocated yet.
    `fields`: of megatron-core's TransformerConfig. `sharing`: when prefixes are shared."""

    model: ModelConfig
    layout: Layout
    dtype: torch.dtype
    fields: dict[str, Any]
    sharing: Sharing | None


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Holds all that an engine has. Without an optimizer the model is frozen, and there is no
    schedule either.

    table:    where every HF tensor lives.
    models:   this rank's modules, one per virtual pipeline stage.
    chunks:   the same in their wrappers.
    params:   canonical name -> local parameter, adapters among them.
    routing:  of a mixture-of-experts model.
    adapters: of a model trained with LoRA.
    average:  of a model that is a moving average of another, its weights in fp32 by the names of
              the parameters that are of another dtype (see copying.py); else empty.
    cost:     work of a sequence by its length.
    align:    the multiples that sequences and micro-batches are filled up to.
    replays:  whether updates repeat the routes of a batch.
    sharing:  when a pass computes shared prefixes once; None is never.
    """

    config: TrainEngineConfig
    seed: int
    model: ModelConfig
    dtype: torch.dtype
    groups: ProcessGroups
    layout: Layout
    table: PieceTable
    models: list[Any]
    chunks: list[torch.nn.Module]
    params: dict[str, torch.Tensor]
    routing: Routing | None
    adapters: Adapters | None
    optimizer: Any
    schedule: Any
    cost: Cost
    align: Alignment
    replays: bool
    sharing: Sharing | None
    average: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def trained_table(self) -> PieceTable:
        """Returns where every trained tensor lives: of adapters, where there are any."""
        return self.adapters.table if self.adapters else self.table.trained

    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        """Returns the model's weights by name; adapters are merged in as they are asked for."""
        return self.adapters.merged(self.params) if self.adapters else self.params


# ---- what the config means ---------------------------------------------------------------------


def resolve(cfg: TrainEngineConfig, world_size: int) -> Resolved:
    """Finds what the config means here. Raises ValueError, naming value and fix, for what model,
    machine or world cannot do."""
    raise_if_any([*attention_problems(os.environ), *section_problems(cfg)])
    options = EngineOptions(**cfg.options)
    model = read_hf_config(
        cfg.path, head=cfg.head, override=cfg.override_config, new_bias=cfg.value_head_bias
    )
    check_layout(model, cfg.parallel)
    if cfg.lm_head_topk > model.vocab_size:
        raise ValueError(
            f"lm_head_topk={cfg.lm_head_topk} exceeds the vocabulary of {model.vocab_size}: "
            "lower it"
        )
    layout = Layout.from_config(cfg.parallel, world_size)
    attention = resolve_attention(cfg.attention, mcore.device())
    sharing = _sharing(cfg, model, attention)
    auto = "bfloat16" if mcore.on_cuda() else "float32"
    dtype = _DTYPES[auto if cfg.dtype == "auto" else cfg.dtype]
    fields = {
        "cp_comm_type": cp_comm_type(options.cp_comm_type, model, cfg.parallel, attention),
        **recompute_fields(cfg.recompute_granularity, options, layout, model, attention=attention),
        **fp8_fields(cfg.fp8, model, layout, dtype=dtype, attention=attention),
        **lora_fields(model, cfg.lora),
    }
    if cfg.optimizer is not None:
        optimizer.check(cfg.optimizer, dtype)
        if cfg.offload:
            raise ValueError(
                "offload=True is for frozen models, and this one has an optimizer; use "
                "engine.offload() and onload(), or optimizer_cpu_offload"
            )
    return Resolved(model=model, layout=layout, dtype=dtype, fields=fields, sharing=sharing)


def _sharing(cfg: TrainEngineConfig, model: ModelConfig, attention: str) -> Sharing | None:
    """Returns when passes share prefixes; None if never. Raises ConfigError, naming key and fix,
    where they are asked to, and layout or model does not allow it."""
    choice = cfg.mb_spec.share_prefixes
    if choice == "false":
        return None
    always = replace(cfg, mb_spec=replace(cfg.mb_spec, share_prefixes="true"))
    problems = list(rule_problems(ENGINE, always))
    if model.attention.window is not None:
        problems.append(
            f"mb_spec.share_prefixes=true: {model.family} attends through a sliding window of "
            f"{model.attention.window} tokens, which attention over a trie does not have; use "
            "mb_spec.share_prefixes=false"
        )
    if model.recurrent is not None:
        problems.append(
            f"mb_spec.share_prefixes=true: layers {list(model.recurrent.layers)} of {model.family} "
            "have a state, which cannot branch where sequences part; use "
            "mb_spec.share_prefixes=false"
        )
    if model.attention.sinks:
        problems.append(
            f"mb_spec.share_prefixes=true: {model.family} has attention sinks, which attention "
            "over a trie does not have; use mb_spec.share_prefixes=false"
        )
    if choice == "true":
        raise_if_any(problems)
        return Sharing(0.0, logged=True)
    options = EngineOptions(**cfg.options)
    if (
        options.moe_aux_loss_coeff
        or options.moe_z_loss_coeff
        or options.moe_router_bias_update_rate
    ):
        problems.append("routers are trained and balanced by their tokens, of which tries have few")
    if problems:
        log.info("mb_spec.share_prefixes=auto: whole sequences, since %s", "; ".join(problems))
        return None
    # a frozen model of the run would log the same
    return Sharing(_PAYS[attention], logged=cfg.optimizer is None)


# ---- making it ---------------------------------------------------------------------------------


def build(
    cfg: TrainEngineConfig,
    what: Resolved,
    groups: ProcessGroups,
    seed: int,
    ft_spec: FinetuneSpec | None,
) -> EngineState:
    """Makes modules, weights, adapters and optimizer, in the scope of `groups`. Collective.

    The order is precision, weights, adapters, data parallelism: converting makes new buffers, and
    data parallelism moves the weights."""
    built = make_modules(cfg, what, groups, seed)
    # what follows looks at the bare modules, so before they are wrapped
    routing = Routing(built.chunks, what.model, cfg, groups) if what.model.moe else None
    chunks: list[torch.nn.Module] = list(built.chunks)
    if what.dtype != torch.float32:
        chunks = [Float16Module(built.config, chunk) for chunk in chunks]
        for name, param in named_params(chunks).items():
            if name in built.table.fp32 and what.dtype == torch.bfloat16:
                param.data = param.data.float()
    if not cfg.init_from_scratch:
        weights = base_params(named_params(chunks))
        seeded = head_seed(cfg, seed)
        load_hf(cfg.path, built.table, what.layout, groups.rank, weights, head_seed=seeded)
    adapters = _adapters(built, cfg, what, seed)
    params = named_params(chunks)
    trainer, schedule = None, None
    if cfg.optimizer is None:
        for param in params.values():
            param.requires_grad_(False)
    else:
        chunks = optimizer.wrap_chunks(built.config, chunks, cfg.optimizer)
        trainer = optimizer.build_optimizer(cfg.optimizer, chunks, what.dtype)
        schedule = optimizer.build_schedule(cfg.optimizer, trainer, ft_spec)
    return EngineState(
        config=cfg,
        seed=seed,
        model=what.model,
        dtype=what.dtype,
        groups=groups,
        layout=what.layout,
        table=built.table,
        models=built.chunks,
        chunks=chunks,
        params=params,
        routing=routing,
        adapters=adapters,
        optimizer=trainer,
        schedule=schedule,
        cost=sequence_cost(what.model),
        align=alignment(what.layout, token_unit(cfg.fp8)),
        replays=cfg.replays,
        sharing=what.sharing,
    )


def make_modules(
    cfg: TrainEngineConfig, what: Resolved, groups: ProcessGroups, seed: int
) -> BuiltModel:
    """Makes this rank's modules, in the scope of `groups`; weights are not loaded."""
    options = EngineOptions(**cfg.options)
    # the caller's random numbers stay its own
    devices = [torch.cuda.current_device()] if mcore.on_cuda() else []
    with torch.random.fork_rng(devices=devices):
        model_parallel_cuda_manual_seed(seed)
        built = build_model(
            what.model,
            what.layout,
            dtype=what.dtype,
            device=mcore.device(),
            attention=cfg.attention,
            seed=seed if cfg.init_from_scratch else None,
            options=options,
            share_prefixes=what.sharing is not None,
            **what.fields,
        )
    for chunk in built.chunks:
        if cfg.head == "lm" and chunk.post_process:
            chunk.output_layer = LMHead(
                chunk.output_layer,
                vocab_size=what.model.vocab_size,
                tp_group=groups.tp,
                sequence_parallel=what.layout.sequence_parallel,
                chunk_tokens=options.lm_head_chunk_tokens,
                keep_bytes=options.lm_head_keep_mb << 20,
                topk=cfg.lm_head_topk,
            )
    return built


def _adapters(
    built: BuiltModel, cfg: TrainEngineConfig, what: Resolved, seed: int
) -> Adapters | None:
    if cfg.lora is None:
        return None
    adapters = Adapters(
        built.chunks,
        what.model,
        what.layout,
        cfg.lora,
        dtype=what.dtype,
        device=mcore.device(),
        seed=seed,
    )
    if cfg.lora.adapter_path:
        load_peft(cfg.lora.adapter_path, adapters)
    return adapters


def head_seed(cfg: TrainEngineConfig, seed: int) -> int | None:
    """Returns the seed of a value head that the files do not have; None if they must have one."""
    return seed if cfg.options.get("value_head_init") == "random" else None


def release(state: EngineState) -> None:
    """Lets the garbage collector free the model: clears the references that megatron-core keeps.

    A token dispatcher keeps tensors of a pass that failed, with their graph. The graph leads to the
    hooks of data parallelism and to the whole model, by references that the collector does not see.
    The caches of rotary angles belong to the classes, and have this model's groups in their keys.
    """
    for module in (m for chunk in state.chunks for m in chunk.modules()):
        if (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
            mcore.drop_pass(dispatcher)
    for cached in (RotaryEmbedding, YarnRotaryEmbedding):
        cached.forward.cache_clear()


def construct_rank(cfg: TrainEngineConfig, world_size: int, rank: int) -> int:
    """Builds the modules of `rank` among `world_size` ranks from fake tensors and a fake process
    group; returns how many parameters the rank has. `cfg.path` needs no more than a config.json.

    Raises ValueError for what model, layout or world cannot do, AssertionError where a parameter is
    not as the piece table has it, and RuntimeError where a process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # needs no process group

    if dist.is_initialized():
        raise RuntimeError("a process group exists: construct ranks in a process of their own")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        what = resolve(cfg, world_size)
        groups = ProcessGroups(what.layout)
        with FakeTensorMode(allow_non_fake_inputs=True), model_scope(groups):
            built = make_modules(cfg, what, groups, seed=0)
            params = named_params(built.chunks)
            built.table.check_params(groups.coords, {n: p.shape for n, p in params.items()})
        return sum(p.numel() for p in params.values())
    finally:
        dist.destroy_process_group()


# ---- random states -----------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Returns the state of everything that draws numbers on this rank. The engine must be in scope,
    for its tracker."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }
    if mcore.on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` gave, on the same kind of device."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if mcore.on_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def reseed(seed: int) -> None:
    """Seeds all of them, as at a start: alike on every rank, the tracker's by coordinates."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
