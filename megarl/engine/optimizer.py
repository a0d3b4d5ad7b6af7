"""Data-parallel wrappers, optimizer, learning-rate schedule, and a step that refuses NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megarl.api.records import FinetuneSpec
from megarl.config.engine import OptimizerConfig
from megarl.parallel import mcore

from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.distributed import finalize_model_grads  # isort: skip
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig  # isort: skip
from megatron.core.optimizer import get_megatron_optimizer  # isort: skip
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip

# a constant schedule never looks at its end, but megatron-core asks for one
_ENDLESS = 1 << 40


def wrap_chunks(
    config: Any, chunks: Sequence[torch.nn.Module], *, distributed: bool
) -> list[torch.nn.Module]:
    """The chunks in data-parallel wrappers: gradients accumulate and reduce in fp32.

    NaN is not the wrapper's business (it would raise); `step` skips such an update.
    """
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    if not mcore.on_cuda():  # linear layers add to the buffers themselves, which exist only now
        for module in (m for chunk in wrapped for m in chunk.modules()):
            if hasattr(module, "gradient_accumulation_fusion"):
                module.gradient_accumulation_fusion = True  # type: ignore[assignment]
    return wrapped


def build_optimizer(
    cfg: OptimizerConfig, chunks: Sequence[torch.nn.Module], dtype: torch.dtype
) -> Any:
    """megatron-core's optimizer over wrapped chunks. Vectors (norms, biases) do not decay."""
    return get_megatron_optimizer(
        McoreOptimizerConfig(
            optimizer=cfg.type,
            lr=cfg.lr,
            min_lr=cfg.lr * cfg.min_lr_ratio,
            weight_decay=cfg.weight_decay,
            adam_beta1=cfg.beta1,
            adam_beta2=cfg.beta2,
            adam_eps=cfg.eps,
            clip_grad=cfg.gradient_clipping,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=cfg.distributed,
        ),
        list(chunks),
    )


def build_schedule(
    cfg: OptimizerConfig, optimizer: Any, ft_spec: FinetuneSpec | None
) -> OptimizerParamScheduler:
    """The schedule of n = ft_spec.total_train_steps steps, standing at the first.

    Step k (from 0) has lr * (k+1)/w during the w warm-up steps, so that none is wasted at 0; then
    it falls towards the minimum, which would be reached at step n, one after the last.
    """
    if ft_spec is None:
        if cfg.lr_scheduler_type != "constant":
            raise ValueError(
                f"optimizer.lr_scheduler_type={cfg.lr_scheduler_type!r} needs to know the run's "
                "length: pass ft_spec to initialize(), or use 'constant'"
            )
        steps, warmup = _ENDLESS, 0
    else:
        steps = max(1, ft_spec.total_train_steps)
        warmup = math.ceil(cfg.warmup_steps_proportion * steps - 1e-9)  # 0.1 * 30 is above 3
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.lr * cfg.min_lr_ratio,
        lr_warmup_steps=min(steps, warmup),
        lr_decay_steps=steps + 1,
        lr_decay_style=cfg.lr_scheduler_type,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
    schedule.step(1)
    return schedule


def current_lr(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"])


def step(optimizer: Any, loss: float) -> tuple[bool, float]:
    """(updated, gradient norm before clipping). A loss or a norm that is not finite changes
    nothing: neither weights nor moments. Both are the same on every rank, and so is the decision.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not (math.isfinite(norm) and math.isfinite(loss)):
        return False, norm
    # the rest of optimizer.step(), which would compute the norm again
    for part in _parts(optimizer):
        if part.config.clip_grad > 0 and (params := part.get_parameters()):
            clip_grad_by_total_norm_fp32(params, part.config.clip_grad, norm)
    return bool(optimizer.step_with_ready_grads()), norm


def _parts(optimizer: Any) -> Sequence[Any]:
    """megatron-core chains one optimizer per kind of parameter (dense, experts)."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def kind(optimizer: Any) -> str:
    """ "distributed" (ZeRO-1) or "plain": how checkpoints lay out the state."""
    sharded = any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))
    return "distributed" if sharded else "plain"


def materialize_state(optimizer: Any) -> None:
    """Moments exist from the first step on; megatron-core cannot save without, so zeros do."""
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """What config says about each parameter group: everything but its parameters and progress."""
    own = ("params", "step")
    return [{k: v for k, v in g.items() if k not in own} for g in optimizer.param_groups]


def set_hyperparameters(optimizer: Any, values: Sequence[dict[str, Any]]) -> None:
    for group, value in zip(optimizer.param_groups, values, strict=True):
        group.update(value)


def set_position(schedule: OptimizerParamScheduler, steps: int) -> None:
    """As after `steps` steps of the schedule (its own load_state_dict adds them to those taken)."""
    schedule.num_steps = steps
    schedule.step(0)
