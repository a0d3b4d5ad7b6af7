"""Makes megatron-core run on CPU and gloo: every patch it needs, by name, with its reason.

`install()` runs once, before megatron.core is imported, and only where the engine's device is the
CPU (megarl.parallel.mcore decides). The patched calls raise "Torch not compiled with CUDA enabled"
on such a machine, so no working code changes its meaning. P7, P10, P11 and P19 to P22 are needed on
GPUs too: `install_everywhere()`. Tested with megatron-core 0.16.1 and 0.19.2 (`make test-mcore`); a
patch that only one of them needs names it.

  P1   torch.cuda.current_device()            is the CPU device
  P2   torch.cuda streams, events, memory     are null objects: CPU work is synchronous
  P3   device="cuda", pin_memory, .cuda()     stay on the CPU
  P4   Tensor.type() without argument         reads "torch.cuda.*Tensor", which the optimizer tests
  P5   random states                          are those of the CPU generator, the tracker included
  P6   torch.compile inside megatron-core     is the identity
  P7   te_general_gemm (0.16)                 exists although Transformer Engine does not
  P8   MoE split sizes                        become numpy also when they are on the CPU already
  P9   uneven all_gather                      is padded to even (gloo has no other)
  P10  Adam                                   has Transformer Engine's state, so checkpoints agree
  P11  gradient and parameter collectives     of a single rank are skipped: gloo would copy, and
                                              NCCL make a communicator with buffers of its own
  P12  fused rotary, SwiGLU, weight gradient  are those of megarl.parallel.cpu_kernels
  P13  process groups of a single rank        are made once: each costs a thread that wakes
  P14  large tensors                          come in huge pages, from memory that was freed before
  P15  the optimizer that is partly on CPUs   knows its host copies although all tensors are there
  P16  new weights of parallel layers         are drawn where they stand, not whole on every rank
  P17  matmul of layers without autograd      is by oneDNN where that is faster than MKL
  P18  sequence parallelism's reduce-scatter  sends each rank its part, not everything
  P19  latent attention (0.19)                is made of the modules that its spec names
  P20  rotary embedding that is not fused     finds packed tokens' angles without asking the device
  P21  pipeline stages                        send no shapes where a pass knows them
  P22  DeepEP 2                               has the names that megatron-core asks for (deep_ep.py;
                                              installed first, as megatron-core asks at its import)
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel import (
    cpu_collectives,
    cpu_kernels,
    cpu_torch,
    packed_rotary,
    pipeline_shapes,
)
from megarl.parallel import cpu_products as products
from megarl.parallel.cpu_adam import CpuFusedAdam
from megarl.parallel.cpu_torch import nothing, patch
from megarl.parallel.worlds import PerWorld

_SHAPES = 64  # of products that stay known: all of a micro-batch, which the next one seldom has


def p5_tracker() -> None:
    """The tracker sets states by a lazy CUDA call that never fires on CPU: without this half its
    streams are silently those of the default generator, and differ across TP ranks.
    """
    from megatron.core.tensor_parallel import random as R

    class CpuRNGStatesTracker(R.CudaRNGStatesTracker):
        """Forks the CPU generator; otherwise megatron-core's tracker."""

        _current_state_name: str

        @contextlib.contextmanager
        def fork(self, name: str = R._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"rng state {name} was never added")
            outer, outer_name = torch.get_rng_state(), self._current_state_name
            if outer_name != "default-rng":
                self.states_[outer_name] = outer
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(
                    outer if outer_name == "default-rng" else self.states_[outer_name]
                )
                self._current_state_name = outer_name

    patch(
        R,
        CudaRNGStatesTracker=CpuRNGStatesTracker,
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )


def p6_no_compile() -> None:
    """megatron.core.jit binds torch.compile when it is imported. Compiling costs seconds per
    function on a CPU and gains nothing at the sizes that run there.
    """

    def identity(model: Any = None, **_: Any) -> Any:
        return model if model is not None else (lambda f: f)

    compile_, torch.compile = torch.compile, identity  # type: ignore[assignment]
    try:
        import megatron.core
        import megatron.core.jit

        megatron.core.jit.disable_jit_fuser()  # for modules imported later
    finally:
        torch.compile = compile_  # type: ignore[assignment]


def p7_te_general_gemm() -> None:
    """0.16 only: the MoE router reads a name that is bound only when Transformer Engine imports, on
    a GPU without it as on a CPU. 0.19 binds it to None itself.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        patch(moe_utils, te_general_gemm=None)


def p8_moe_split_sizes() -> None:
    """The alltoall dispatcher turns split sizes into numpy only when they sit on a GPU, but
    torch.split wants integers, not a CPU tensor.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    patch(moe_utils, maybe_move_tensor_to_cpu=to_host)
    patch(token_dispatcher, maybe_move_tensor_to_cpu=to_host)


def p9_uneven_all_gather() -> None:
    """MoE with expert-tensor-parallel > 1 gathers uneven splits, which gloo refuses."""
    from megatron.core.tensor_parallel import mappings

    even = mappings._gather_along_first_dim

    def gather(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, None, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        padded = input_.new_zeros((max(*sizes, 1), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)])

    patch(mappings, _gather_along_first_dim=gather)


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


def p12_fused_kernels() -> None:
    """megatron-core's unfused ways recompute sines in every layer, and leave to autograd what takes
    a third of the passes over memory when written out.
    """
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers

    patch(fused_bias_swiglu, swiglu=cpu_kernels.swiglu, swiglu_back=cpu_kernels.swiglu_back)
    patch(
        rope_utils,
        fused_apply_rotary_pos_emb=cpu_kernels.rotary,
        fused_apply_rotary_pos_emb_thd=cpu_kernels.rotary_packed,
    )
    apex = SimpleNamespace(wgrad_gemm_accum_fp32=cpu_kernels.wgrad_accumulate)
    patch(layers, fused_weight_gradient_mlp_cuda=apex)  # used by layers that are told to


def p13_one_rank_groups() -> None:
    """megatron-core makes some forty groups, most of one rank where there are few ranks. Every gloo
    group has a thread that wakes a hundred times a second, so those groups are one and the same.
    They are not in the list of groups that end with their layout, but live as long as the world.
    """
    from megatron.core import parallel_state

    create = parallel_state.create_group
    of_world = PerWorld(dict[int, Any])

    def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is None or len(ranks) != 1:
            return create(ranks, *args, **kwargs)
        of_rank = of_world.get()
        if ranks[0] not in of_rank:
            of_rank[ranks[0]] = dist.new_group(list(ranks))
        return of_rank[ranks[0]]

    patch(parallel_state, create_group=create_group)


def p15_hybrid_optimizer() -> None:
    """HybridDeviceOptimizer moves parameters to the host until a fraction of them is there, and
    tells the copies from the rest by is_cuda. Here it goes by which ones it copied.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def split(self: Any, fraction: float) -> tuple[Any, ...]:
        left = fraction * sum(p.numel() for g in self.param_groups for p in g["params"])
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        host_of, device_of, fp32_of = {}, {}, {}
        for group in self.param_groups:
            parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
            for param in group["params"]:
                moves = left > 0
                inner = param.detach().clone() if moves else param
                if self.param_update_in_fp32 and inner.dtype != torch.float32:
                    inner = fp32_of[param] = inner.detach().clone().float()
                if moves:
                    left -= param.numel()
                    host_of[param], device_of[inner] = inner, param
                parts[moves].append(inner)
            for moved, params in parts.items():
                if params:
                    groups[moved].append(group | {"params": params})
        return groups[True], groups[False], host_of, device_of, fp32_of

    patch(
        HybridDeviceOptimizer,
        _get_sub_optimizer_param_groups=split,
        _move_new_state_to_right_device=nothing,  # it is there
    )


def p16_no_whole_weights() -> None:
    """megatron-core's initialisation on a CPU draws the whole weight of a parallel layer in fp32,
    on every rank, and keeps a slice. Ours are filled from the piece table: to make those took
    several times as long as to load a model, and twice its memory."""
    from megatron.core.tensor_parallel import layers

    def mark_and_draw(
        weight: torch.Tensor,
        output_size: int,
        input_size: int,
        per_partition_size: int,
        partition_dim: int,
        init_method: Callable[[torch.Tensor], Any],
        stride: int = 1,
        skip_set_tensor_parallel_attributes: bool = False,
        **_: Any,
    ) -> None:
        if not skip_set_tensor_parallel_attributes:
            layers.set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
        init_method(weight)

    patch(layers, _initialize_affine_weight_cpu=mark_and_draw)


def p17_matrix_products() -> None:
    """The parallel layers' own forward and backward call torch.matmul and Tensor.matmul, with
    gradients off, where nearly all of a pass goes; see megarl.parallel.cpu_products."""
    if products.by_onednn():
        products.remember_shapes(_SHAPES)
        patch(torch, matmul=cpu_kernels.product)
        patch(torch.Tensor, matmul=cpu_kernels.product)


def p18_direct_reduce_scatter() -> None:
    """torch makes gloo's reduce-scatter of an all-reduce of everything; see
    megarl.parallel.cpu_collectives. The layers and the mappings between them call it by a name of
    their own."""
    from megatron.core.tensor_parallel import layers, mappings

    for module in (layers, mappings):
        patch(module, dist_reduce_scatter_func=cpu_collectives.reduce_scatter)


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
    """See megarl.parallel.packed_rotary."""
    from megatron.core.models.common.embeddings import rope_utils

    rotate = packed_rotary.rotating(
        rope_utils._apply_rotary_pos_emb_thd, rope_utils._apply_rotary_pos_emb_bshd
    )
    patch(rope_utils, _apply_rotary_pos_emb_thd=rotate)


def p21_pipeline_shapes() -> None:
    """See megarl.parallel.pipeline_shapes."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    shapes = pipeline_shapes.telling(P2PCommunicator._communicate_shapes)
    patch(P2PCommunicator, _communicate_shapes=shapes)


_installed = False


def install_everywhere() -> None:
    """Installs the patches that GPUs need too, above all where Transformer Engine is missing."""
    p7_te_general_gemm()
    p10_adam()
    p11_one_rank_collectives()
    p19_latent_attention()
    p20_packed_rotary()
    p21_pipeline_shapes()


def install() -> None:
    """Installs P1 to P21, once. Raises AssertionError if megatron.core is imported already."""
    global _installed
    if _installed:
        return
    early = [m for m in sys.modules if m.startswith("megatron.core")]
    assert not early, f"import megarl.parallel.mcore before megatron ({early[0]} is loaded)"
    cpu_torch.p14_large_tensors()
    cpu_torch.p1_current_device()
    cpu_torch.p2_streams_and_memory()
    cpu_torch.p3_tensor_placement()
    cpu_torch.p4_tensor_type()
    cpu_torch.p5_torch_random_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine / apex is not installed"
        p6_no_compile()
        p5_tracker()
        p8_moe_split_sizes()
        p9_uneven_all_gather()
        install_everywhere()
        p12_fused_kernels()
        p13_one_rank_groups()
        p15_hybrid_optimizer()
        p16_no_whole_weights()
        p17_matrix_products()
        p18_direct_reduce_scatter()
    _installed = True
