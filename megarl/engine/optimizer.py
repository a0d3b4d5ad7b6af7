"""Makes data-parallel wrappers, optimizer and learning-rate schedule, and steps without NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from megarl.api.records import FinetuneSpec
from megarl.config.check_parts import optimizer_problems
from megarl.config.engine import OptimizerConfig
from megarl.config.errors import raise_if_any
from megarl.parallel import mcore
from megarl.utils.extras import install_hint

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from megatron.core.utils import get_model_config, is_te_min_version

# a constant schedule never looks at its end, but megatron-core asks for one
_ENDLESS = 1 << 40
# float16: the loss is multiplied by a scale before backward; an overflow halves it and skips the
# update, and it doubles after a window without one. optimizer_cpu_offload offloads all weights
_DEFAULTS = {"initial_loss_scale": 2.0**16, "hysteresis": 1, "optimizer_offload_fraction": 1.0}


def check(cfg: OptimizerConfig, dtype: torch.dtype) -> None:
    """Raises ValueError for settings that this machine or the weights' dtype cannot do."""
    raise_if_any(optimizer_problems("optimizer", cfg))
    fused = mcore.on_cuda() and find_spec("transformer_engine")
    if cfg.options.get("use_precision_aware_optimizer") and not fused:
        raise ValueError(
            "optimizer.options.use_precision_aware_optimizer=True needs a GPU and Transformer "
            f"Engine's FusedAdam ({install_hint('gpu')}); leave it out"
        )
    if cfg.options.get("optimizer_cpu_offload") and dtype != torch.bfloat16:
        raise ValueError(
            "optimizer.options.optimizer_cpu_offload=True: the CPU copies bfloat16 weights, and "
            f"these are {str(dtype).removeprefix('torch.')}; set dtype='bfloat16', or leave it out"
        )


def wrap_chunks(
    config: Any, chunks: Sequence[torch.nn.Module], cfg: OptimizerConfig
) -> list[torch.nn.Module]:
    """Returns the chunks in data-parallel wrappers: gradients accumulate and reduce in fp32.

    The wrapper does not look for NaN (it would raise); `step` skips such an update."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=cfg.distributed,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
        overlap_grad_reduce=cfg.overlap_grad_reduce,
        overlap_param_gather=cfg.overlap_param_gather,
    )
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    _accumulate_in_products(wrapped, cfg.overlap_grad_reduce)
    if cfg.overlap_grad_reduce:  # only the last micro-batch's backward pass reduces
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def _accumulate_in_products(wrapped: Iterable[torch.nn.Module], overlap: bool) -> None:
    """Has the matrix products of linear layers add weight gradients to the wrappers' fp32 buffers,
    which exist only now: those of Transformer Engine, and on a CPU megatron-core's own.

    Before Transformer Engine 2.15 some layers then return no gradient at all (quantised experts,
    weights that hooks of autograd unpacked), which an overlapping wrapper refuses."""
    for module in (m for chunk in wrapped for m in chunk.modules()):
        if hasattr(module, "fuse_wgrad_accumulation"):
            buffers = any(hasattr(p, "main_grad") for p in module.parameters(recurse=False))
            module.fuse_wgrad_accumulation = buffers and (  # type: ignore[assignment]
                not overlap or is_te_min_version("2.15")
            )
        elif hasattr(module, "gradient_accumulation_fusion") and not mcore.on_cuda():
            module.gradient_accumulation_fusion = True  # type: ignore[assignment]


def wrappers(chunks: Iterable[Any]) -> list[Any]:
    """Returns the data-parallel wrappers among chunks; a frozen model has none."""
    return [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]


def gather_params(chunks: Sequence[Any], *, loaded: bool = False) -> None:
    """Gathers the weights that the last step left to the next pass.

    loaded: gathers all weights, because each rank has loaded its range of the fp32 parameters.

    Collective.
    """
    for chunk in wrappers(chunks):
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            ddp = group.ddp_config
            left = ddp.overlap_param_gather and not group.param_gather_dispatched
            if left or (loaded and ddp.use_distributed_optimizer):
                group.start_param_sync(force_sync=True)


def zero_grad(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Zeroes the wrappers' gradient buffers, and what the optimizer keeps of them."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def build_optimizer(
    cfg: OptimizerConfig, chunks: Sequence[torch.nn.Module], dtype: torch.dtype
) -> Any:
    """Makes megatron-core's optimizer over wrapped chunks. Vectors (norms, biases) have no weight
    decay.

    Its fused Adam is Transformer Engine's, else apex's, else ours. In float16 the loss is scaled on
    its way back, and `step` takes the scale out of the gradients.
    """
    optimizer = get_megatron_optimizer(_mcore_config(cfg, dtype), list(chunks))
    for part in parts(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _settle_hybrid(part.optimizer)
        for i, fp32 in enumerate(getattr(part, "fp32_from_fp32_groups", ())):
            _add_mains(part, i, fp32)
    if dtype == torch.float16:
        get_model_config(chunks[0]).grad_scale_func = optimizer.scale_loss
    return optimizer


def _add_mains(part: Any, i: int, fp32: list[torch.Tensor]) -> None:
    """Makes main weights of the fp32 parameters of group i. The plain optimizer of a 16-bit model
    saves and loads the state of main weights only."""
    for param in fp32:
        main: Any = param.detach().clone()
        copy_tensor_model_parallel_attributes(main, param)
        main.shared = getattr(param, "shared", False)
        part.fp32_from_float16_groups[i].append(main)
    part.float16_groups[i] += fp32
    part.optimizer.param_groups[i]["params"] = [*part.fp32_from_float16_groups[i]]
    fp32.clear()


def _mcore_config(cfg: OptimizerConfig, dtype: torch.dtype) -> McoreOptimizerConfig:
    options = _DEFAULTS | {
        name: getattr(torch, value) if name.endswith("_dtype") else value
        for name, value in cfg.options.items()
    }
    config = McoreOptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        min_lr=cfg.lr * cfg.min_lr_ratio,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.beta1,
        adam_beta2=cfg.beta2,
        adam_eps=cfg.eps,
        clip_grad=cfg.gradient_clipping,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=cfg.distributed,
        overlap_param_gather=cfg.overlap_param_gather,
        store_param_remainders=False,
        overlap_cpu_optimizer_d2h_h2d=mcore.on_cuda(),
        **options,
    )
    if config.optimizer_cpu_offload:
        # The hybrid optimizer takes gradients the way the precision-aware one does. Said after the
        # fact: asked for from the start, it would want Transformer Engine, which it does not use.
        config.use_precision_aware_optimizer = True
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return config


def build_schedule(
    cfg: OptimizerConfig, optimizer: Any, ft_spec: FinetuneSpec | None
) -> OptimizerParamScheduler:
    """Makes the learning-rate schedule of n = ft_spec.total_train_steps steps, standing at the
    first. Raises ValueError without `ft_spec`, unless the rate is constant.

    Step k (from 0) has lr * (k+1)/w during the w warm-up steps, so that none is wasted at 0 and the
    last of them has lr. Then it falls towards the minimum, which would be reached at step n, one
    after the last. Without warm-up the first step has lr, just as with a warm-up of one step. If
    the length is unknown, a fraction of it is no warm-up.
    """
    if ft_spec is None and cfg.lr_scheduler_type != "constant":
        raise ValueError(
            f"optimizer.lr_scheduler_type={cfg.lr_scheduler_type!r} needs to know the run's "
            "length: pass ft_spec to initialize(), or use 'constant'"
        )
    steps = _ENDLESS if ft_spec is None else max(1, ft_spec.total_train_steps)
    warmup = cfg.warmup_steps
    if warmup < 1:
        warmup = 1 if ft_spec is None else math.ceil(warmup * steps - 1e-9)  # 0.1 * 30 > 3
    warmup = max(1, int(warmup))
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.lr * cfg.min_lr_ratio,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(steps, warmup) + 1,
        lr_decay_style=cfg.lr_scheduler_type,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    schedule.step(1)
    return schedule


def current_lr(optimizer: Any) -> float:
    """Returns the learning rate of the next step (of the first parameter group)."""
    return float(optimizer.param_groups[0]["lr"])


def step(optimizer: Any, loss: float, *, spike_norm: float | None = None) -> dict[str, float]:
    """Updates the weights; returns grad_norm (before clipping) and update_successful, the same on
    every rank. A loss or a norm that is not finite, or a norm above `spike_norm`, changes nothing:
    neither weights nor moments.

    In float16 it also returns loss_scale, that of this step, and overflow: 1 where the gradients
    were too large for it, which the next step's smaller scale may mend."""
    scale = float(optimizer.get_loss_scale()) if optimizer.config.fp16 else 1.0
    overflow = _prepare_grads(optimizer, rescale=math.isfinite(loss))
    norm = float(optimizer.get_grad_norm())
    updated = not overflow and math.isfinite(norm) and math.isfinite(loss)
    updated = updated and (spike_norm is None or norm <= spike_norm)
    if updated:
        # the rest of optimizer.step(), which would compute the norm again
        for part in parts(optimizer):
            if part.config.clip_grad > 0 and (params := part.get_parameters()):
                clip_grad_by_total_norm_fp32(params, part.config.clip_grad, norm, decoupled(part))
        updated = bool(optimizer.step_with_ready_grads())
    metrics = {"grad_norm": norm, "update_successful": float(updated)}
    if optimizer.config.fp16:
        mendable = overflow and math.isfinite(loss) and scale > optimizer.config.min_loss_scale
        metrics |= {"loss_scale": scale, "overflow": float(mendable)}
    return metrics


@torch.no_grad()
def _prepare_grads(optimizer: Any, *, rescale: bool) -> bool:
    """Makes the main gradients, without the loss scale; returns, in float16, whether one of them is
    not finite.

    There megatron-core lets every part judge its own gradients, so that the scales of dense weights
    and experts would come apart. Here all parts go by what any of them found; without `rescale`
    (the loss itself is broken) the scale stays.
    """
    if not optimizer.config.fp16:
        return bool(optimizer.prepare_grads())
    chained = parts(optimizer)
    for part in chained:
        if not part.is_stub_optimizer:
            part._copy_model_grads_to_main_grads()
    # each is a collective, so all are called
    overflows = [part._unscale_main_grads_and_check_for_nan() for part in chained]
    overflow = any(overflows)
    if rescale:
        for part in chained:
            part.grad_scaler.update(overflow)
    return overflow


def decoupled(part: Any) -> bool:
    """Returns whether gradients stand in `decoupled_grad`, since their dtype is not the
    parameter's."""
    return bool(part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)


def reload_main_params(optimizer: Any) -> None:
    """Sets the main weights of an optimizer, if there is one, from the model's, after those were
    loaded."""
    if optimizer is None:
        return
    optimizer.reload_model_params()
    for part in parts(optimizer):
        if not decoupled(part) or isinstance(part.optimizer, HybridDeviceOptimizer):
            continue
        for param in part.get_parameters():  # FusedAdam's own, which megatron-core leaves alone
            if param in part.optimizer.state:
                value = param.detach().to(torch.float32, copy=True)
                part.optimizer.set_scaled_state(param, "master_param", value)


def parts(optimizer: Any) -> Sequence[Any]:
    """Returns the optimizers that megatron-core chains, one per kind of parameter (dense, ...);
    none of a frozen model, whose optimizer is None."""
    if optimizer is None:
        return []
    return getattr(optimizer, "chained_optimizers", [optimizer])


def kind(optimizer: Any) -> str:
    """Returns "distributed" (ZeRO-1) or "plain": how checkpoints lay out the state."""
    sharded = any(isinstance(part, DistributedOptimizer) for part in parts(optimizer))
    return "distributed" if sharded else "plain"


def materialize_state(optimizer: Any) -> None:
    """Makes moments of zero where no step has made any: megatron-core cannot save without them."""
    for part in parts(optimizer):
        # the hybrid one has them from the start; None is where a rank trains nothing of that kind
        if isinstance(part.optimizer, HybridDeviceOptimizer | None):
            continue
        if not decoupled(part):
            part.init_state_fn(part.optimizer, part.config)
            continue
        for param in part.get_parameters():
            if not part.optimizer.state[param]:
                # FusedAdam wants to know of store_param_remainders, which megatron-core leaves out
                part.optimizer.initialize_state(param, part.config.store_param_remainders)


def _settle_hybrid(hybrid: HybridDeviceOptimizer) -> None:
    """Gives the hybrid optimizer moments of zero, which megatron-core would make by a step along
    random gradients, and takes the classes out of its groups, which a checkpoint would refuse to
    read."""
    for group in hybrid.param_groups:
        for key in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
            group.pop(key, None)
    for inner in hybrid.sub_optimizers:
        for param in (p for group in inner.param_groups for p in group["params"]):
            state = {k: torch.zeros_like(param) for k in ("exp_avg", "exp_avg_sq")}
            if isinstance(inner, torch.optim.AdamW):
                state["step"] = torch.zeros(())
            inner.state[param] = state
    hybrid._sync_sub_optimizers_state_to_hdo()


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Returns each parameter group's settings: all but its parameters and progress."""
    own = ("params", "step")
    return [{k: v for k, v in g.items() if k not in own} for g in optimizer.param_groups]


def set_hyperparameters(optimizer: Any, values: Sequence[dict[str, Any]]) -> None:
    """Sets what `hyperparameters` returned, in place of what a checkpoint has brought."""
    for group, value in zip(optimizer.param_groups, values, strict=True):
        group.update(value)
    for part in parts(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            # a loaded count of steps is with the optimizers inside; left here, megatron-core would
            # set theirs back to it at every step
            for group in part.optimizer.param_groups:
                group.pop("step", None)


def set_position(schedule: OptimizerParamScheduler, steps: int) -> None:
    """Puts the schedule where it is after `steps` steps (its own load_state_dict adds them to those
    taken)."""
    schedule.num_steps = steps
    schedule.step(0)
