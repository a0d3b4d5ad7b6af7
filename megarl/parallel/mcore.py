"""Opens the door to megatron-core: every module that imports `megatron` imports this one first.

Importing it decides the device (CUDA where there is one, unless MEGARL_DEVICE=cpu) and installs the
CPU backend (cpu_patches.py) where that is the CPU, and the patches here, which a GPU needs too,
above all where Transformer Engine is missing. Versions of megatron-core differ in numbered patches,
and nowhere else; one that only one version needs names it.

  P7   te_general_gemm (0.16)                 exists although Transformer Engine does not
  P10  Adam                                   has Transformer Engine's state, so checkpoints agree
  P11  gradient and parameter collectives     of a single rank are skipped: gloo would copy, and
                                              NCCL make a communicator with buffers of its own
  P19  latent attention (0.19)                is made of the modules that its spec names
  P20  rotary embedding that is not fused     finds packed tokens' angles without asking the device
  P21  pipeline stages                        send no shapes where a pass knows them
  P22  DeepEP 2                               has the names that megatron-core imports
  P23  outputs recomputed before their use    need no Transformer Engine
  P24  norm of the gradients                  stays on the device until it is one number
  P25  token dispatchers                      keep no tensors of a micro-batch after its layer
  P26  counts of routers with a bias          take a mask of padding tokens
  P27  optimizer state of fp32 parameters     has the number of its parameter in a 16-bit model
  P28  optimizer on the CPU                   keeps a main weight of fp32 parameters, too
  P29  routers with fp32 weights              multiply in fp32, also with Transformer Engine
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel import cpu_patches
from megarl.parallel.cpu_kernels import CpuFusedAdam
from megarl.parallel.cpu_patches import patch
from megarl.parallel.worlds import comm_backend, device, on_cuda, pinned, to_device

__all__ = ["comm_backend", "device", "on_cuda", "pinned", "to_device"]


def p7_te_general_gemm() -> None:
    """0.16 only: the MoE router reads a name that is bound only when Transformer Engine imports, on
    a GPU without it as on a CPU. 0.19 binds it to None itself.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        patch(moe_utils, te_general_gemm=None)


def p10_adam() -> None:
    """Without Transformer Engine and apex, megatron-core falls back to torch.optim.AdamW, whose
    distributed-optimizer (de)serialisation is broken: a fresh state fails an assertion, and one
    step tensor is shared by all parameters.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if optimizer.USING_PYTORCH_OPTIMIZER:
        patch(optimizer, Adam=CpuFusedAdam, USING_PYTORCH_OPTIMIZER=False)
        patch(distrib_optimizer, Adam=CpuFusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


def p11_one_rank_collectives() -> None:
    """The data-parallel wrapper reduces and gathers its buffers in place. For a group of one there
    is nothing to do. But gloo takes all bytes through a buffer of its own, and NCCL makes a
    communicator of the one rank, for which it may take 512 MiB
    (https://github.com/NVIDIA/nccl/issues/2363).
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: torch.Tensor, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs["group"].size() == 1 and output.data_ptr() == input_.data_ptr():
                return None
            return collective(output, input_, *args, **kwargs)

        return call

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        patch(buffers, **{name: unless_alone(getattr(buffers, name))})
    patch(buffers, _coalescing_manager=maybe_nothing(buffers._coalescing_manager))


def maybe_nothing(
    coalescing: Callable[..., contextlib.AbstractContextManager[Any]],
) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Returns torch's manager of coalesced collectives, changed so that it may have nothing to
    coalesce: older versions (2.6) then read a variable that was never set."""

    @contextlib.contextmanager
    def manager(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            with coalescing(group, *args, **kwargs) as handle:
                yield handle
        except UnboundLocalError:
            if group.size() > 1:  # there something was to be done
                raise

    return manager


def p19_latent_attention() -> None:
    """0.19 only: it chooses norms and projections again. Without a latent of queries it refuses the
    norm of one that its local spec names, and wants Transformer Engine's linear layer with a norm.
    """
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    linear = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")

    def of_spec(self: Any, submodules: Any) -> dict[str, Any]:
        return {n: getattr(submodules, n) for n in (*linear, "q_layernorm", "kv_layernorm")}

    if hasattr(MLASelfAttention, "_resolve_qk_norm_config"):
        patch(MLASelfAttention, _resolve_qk_norm_config=of_spec)


def p20_packed_rotary() -> None:
    """megarl knows the position of every packed token before a pass. megatron-core finds them again
    in every layer, for queries and for keys, from lengths that it asks the device for: four waits a
    layer."""
    from megatron.core.models.common.embeddings import rope_utils

    rotate = rotating(rope_utils._apply_rotary_pos_emb_thd, rope_utils._apply_rotary_pos_emb_bshd)
    patch(rope_utils, _apply_rotary_pos_emb_thd=rotate)


_POSITIONS = "megarl_positions"  # attribute of a micro-batch's cu_seqlens


def place_tokens(cu_seqlens: Tensor, positions: Tensor | None) -> None:
    """Says at which positions, int64 [T] on the device, a rank's packed tokens stand; None where
    the angles that layers get are those of the tokens already, one by one. All layers of a
    micro-batch bring the same cu_seqlens."""
    setattr(cu_seqlens, _POSITIONS, positions)


def rotating(
    original: Callable[..., Tensor], plain: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Returns megatron-core's `_apply_rotary_pos_emb_thd` (the original) for tokens whose positions
    are known, which asks the device for nothing. plain: `_apply_rotary_pos_emb_bshd`."""

    def rotate(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, cp_group: Any = None, **kw: Any
    ) -> Tensor:
        """Rotates t [T,n,d] by the angles freqs [longest,1,1,d], or [T,1,1,d]."""
        if not hasattr(cu_seqlens, _POSITIONS):
            return original(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kw)
        positions = getattr(cu_seqlens, _POSITIONS)
        angles = freqs if positions is None else torch.index_select(freqs, 0, positions)
        return plain(t.unsqueeze(1), angles, *args, **kw).squeeze(1)

    return rotate


def p21_pipeline_shapes() -> None:
    """Packed micro-batches differ in length, so megatron-core sends a shape before every tensor,
    and stops the device to read it. But all ranks of a pipeline cut the same rows into the same
    micro-batches, in one order: the k-th tensor from a neighbour is that of a known micro-batch."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    shapes = telling(P2PCommunicator._communicate_shapes)
    patch(P2PCommunicator, _communicate_shapes=shapes)


Shape = list[int]
_NONE: Shape = [0, 0, 0]


# of the pass under way: the shapes to come from the stage before, and from the stage after
_coming: list[tuple[Iterator[Shape], Iterator[Shape]]] = []


def telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns megatron-core's `P2PCommunicator._communicate_shapes` (the original), which sends
    nothing where a pass has said what comes."""

    def shapes(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
        if not _coming:
            return original(self, send_next, send_prev, recv_prev, recv_next)
        forward, backward = _coming[-1]
        return next(forward) if recv_prev else _NONE, next(backward) if recv_next else _NONE

    return shapes


@contextmanager
def known_shapes(forward: Iterable[Shape], backward: Iterable[Shape]) -> Iterator[None]:
    """Has a pass of megatron-core's schedules send no shapes inside. forward: those that come from
    the stage before, in order; backward: those from the stage after."""
    _coming.append((iter(forward), iter(backward)))
    try:
        yield
    finally:
        _coming.pop()


_deep_ep_problem = ""


def p22_deep_ep() -> None:
    """megatron-core takes EventOverlap from deep_ep.utils, where DeepEP 2 no longer has it, and
    takes the ImportError for a missing package. DeepEP asserts that there is a CUDA toolkit, which
    nobody catches: there it is made to look not installed. Checked against sgl-deep-ep 0.1.2
    (DeepEP 2.1)."""
    global _deep_ep_problem
    if importlib.util.find_spec("deep_ep") is None:
        _deep_ep_problem = "it is not installed"
        return
    try:
        utils = importlib.import_module("deep_ep.utils")
        if not hasattr(utils, "EventOverlap"):
            event = importlib.import_module("deep_ep.utils.event")
            utils.EventOverlap = event.EventOverlap  # type: ignore[attr-defined]
    except (ImportError, AssertionError, AttributeError, OSError) as e:
        _deep_ep_problem = f"it cannot be imported: {type(e).__name__}: {e}"
        for name in [m for m in sys.modules if m.split(".")[0] == "deep_ep"]:
            del sys.modules[name]
        sys.modules["deep_ep"] = None  # type: ignore[assignment]


def p23_recomputed_outputs() -> None:
    """CheckpointWithoutOutput takes its default, fp8=False, for a precision, and then asks
    Transformer Engine, which may not be there."""
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "FP8GlobalStateManager"):
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def deep_ep_problem() -> str:
    """Returns why DeepEP cannot be used, "" where it can."""
    return _deep_ep_problem


def p24_gradient_norm() -> None:
    """Without Transformer Engine and apex, megatron-core asks the device for the norm of each
    parameter's gradient, one after the other."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    def norm(_: int, __: Tensor, tensors: list[list[Tensor]], *___: Any) -> tuple[Tensor, None]:
        return torch.nn.utils.get_total_norm(tensors[0]).reshape(1), None

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        patch(clip_grads, l2_norm_impl=norm)


def p25_dispatchers() -> None:
    """Token dispatchers (0.16 and 0.19) keep tensors of the last micro-batch, with their graph.
    Under recomputation that graph ends in the layer's input, so that every layer of experts kept
    its input and the gradient of that input from its backward to its next forward."""
    from megatron.core.transformer.moe import token_dispatcher as dispatchers

    def dropping(last_step: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def combine_postprocess(self: Any, hidden_states: Tensor) -> Tensor:
            output = last_step(self, hidden_states)
            drop_pass(self)
            return output

        return combine_postprocess

    for kind in ("AllGather", "AlltoAll", "Flex"):
        dispatcher = getattr(dispatchers, f"MoE{kind}TokenDispatcher")
        patch(dispatcher, combine_postprocess=dropping(dispatcher.combine_postprocess))


# Tensors that a dispatcher has from its construction on; over_budget is of HybridEP in 0.19.
_OF_DISPATCHER = ("sort_input_by_local_experts", "restore_output_by_local_experts", "over_budget")


def drop_pass(dispatcher: Any) -> None:
    """Drops the tensors that a token dispatcher of megatron-core keeps of a micro-batch. They are
    read by the forward of their layer only."""
    for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        attributes = {} if owner is None else vars(owner)
        for name, value in attributes.items():
            if isinstance(value, Tensor | np.ndarray) and name not in _OF_DISPATCHER:
                attributes[name] = None


def p26_padding_mask() -> None:
    """Routers (0.16 and 0.19) get the mask of padding tokens [T], and combine it with their routes
    [T, experts] as if both had the same shape (https://github.com/NVIDIA/Megatron-LM/issues/6114).
    """
    from megatron.core.transformer.moe.router import TopKRouter

    count = TopKRouter._apply_expert_bias

    def count_real(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        count(self, routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])

    patch(TopKRouter, _apply_expert_bias=count_real)


def p27_mixed_groups() -> None:
    """The distributed optimizer (0.16 and 0.19) puts a group's fp32 parameters before the others,
    but numbers them in the order of the buffers. A save then stores the state of one parameter as
    the state of another.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    build = DistributedOptimizer._build_optimizer_group_ranges

    def in_order(param_groups: Any, gbuf_ranges: Any) -> tuple[dict[Any, Any], list[Any]]:
        numbers, groups = build(param_groups, gbuf_ranges)
        for index, group in enumerate(groups):
            group["params"].sort(key=lambda param: param.dtype != torch.float32)
            numbers |= {param: (index, i) for i, param in enumerate(group["params"])}
        return numbers, groups

    # An optimizer of torch, such as the hybrid one, refuses views that require gradients.
    views = torch.no_grad()(DistributedOptimizer._build_model_and_main_param_groups)
    patch(
        DistributedOptimizer,
        _build_optimizer_group_ranges=staticmethod(in_order),
        _build_model_and_main_param_groups=staticmethod(views),
    )


def p28_hybrid() -> None:
    """The hybrid optimizer (0.16 and 0.19) gives fp32 parameters on the device no gradient, and its
    loader looks for an fp32 copy of every parameter."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    split = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def with_copies(self: Any, fraction: float) -> tuple[Any, ...]:
        cpu, gpu, on_cpu, back, mains = split(self, fraction)
        own = set(mains.values())
        for group in gpu:
            for i, param in enumerate(group["params"]):
                if param not in own:
                    group["params"][i] = mains[param] = param.detach().clone()
        return cpu, gpu, on_cpu, back, on_cpu | mains

    patch(HybridDeviceOptimizer, _get_sub_optimizer_param_groups=with_copies)


def p29_fp32_router() -> None:
    """Transformer Engine multiplies matrices of one dtype only. megatron-core (0.16 and 0.19)
    passes 16-bit inputs with the router's fp32 weight."""
    from megatron.core.transformer.moe import router

    multiply = router.router_gating_linear

    def gate(inputs: Tensor, weight: Tensor, *args: Any) -> Tensor:
        return multiply(inputs.to(weight.dtype), weight, *args)

    patch(router, router_gating_linear=gate)


p22_deep_ep()
if not on_cuda():
    cpu_patches.install()

# what megatron-core says about choices that are right here, once per rank and engine
for _message in (
    "full scope is deprecated. Use empty cuda_graph_scope",  # its own default
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # an expert's
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",  # ZeRO-1 shards
    r"`torch\.distributed\.\w+` is deprecated. Please use `torch\.distributed\.\w+_single`",
):
    warnings.filterwarnings("ignore", message=_message)
if not on_cuda():
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")


def _is_other(message: str, record: logging.LogRecord) -> bool:
    return message not in record.getMessage()


# what 0.19 logs beside, at every build and load: GPTModel, the layout that the wrapper computes and
# common.pt are what both versions have
for _logger, _message in (
    ("models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("distributed.distributed_data_parallel", "full_param_layout not provided"),
    ("dist_checkpointing.strategies.common", "load_common is deprecated"),
):
    logging.getLogger(f"megatron.core.{_logger}").addFilter(partial(_is_other, _message))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "Transformer Engine / apex is not installed"
    import megatron.core
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.transformer.moe.token_dispatcher  # noqa: F401

    p7_te_general_gemm()
    p10_adam()
    p11_one_rank_collectives()
    p19_latent_attention()
    p20_packed_rotary()
    p21_pipeline_shapes()
    p23_recomputed_outputs()
    p24_gradient_norm()
    p25_dispatchers()
    p26_padding_mask()
    p27_mixed_groups()
    p28_hybrid()
    p29_fp32_router()
