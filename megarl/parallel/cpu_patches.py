"""Makes megatron-core run on CPU and gloo: every patch that this needs, by name, with its reason.

`install()` runs once, before megatron.core is imported, and only where the engine's device is the
CPU (megarl.parallel.mcore decides, and has the patches that GPUs need too). The patched calls raise
"Torch not compiled with CUDA enabled" on such a machine, so no working code changes its meaning.
Tested with megatron-core 0.16.1 and 0.19.2 (`make test-mcore`).

  P1   torch.cuda.current_device()            is the CPU device
  P2   torch.cuda streams, events, memory     are null objects: CPU work is synchronous
  P3   device="cuda", pin_memory, .cuda()     stay on the CPU
  P4   Tensor.type() without argument         reads "torch.cuda.*Tensor", which the optimizer tests
  P5   random states                          are those of the CPU generator, the tracker included
  P6   torch.compile inside megatron-core     is the identity
  P8   MoE split sizes                        become numpy also when they are on the CPU already
  P9   uneven all_gather                      is padded to even (gloo has no other)
  P12  fused rotary, SwiGLU, weight gradient  are those of megarl.parallel.cpu_kernels
  P13  process groups of a single rank        are made once: each costs a thread that wakes
  P14  large tensors                          come in huge pages, from memory that was freed before
  P15  the optimizer that is partly on CPUs   knows its host copies although all tensors are there
  P16  new weights of parallel layers         are drawn where they stand, not whole on every rank
  P17  matmul of layers without autograd      is by oneDNN where that is faster than MKL
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megarl.parallel import cpu_kernels
from megarl.parallel.worlds import PerWorld

_CPU = torch.device("cpu")
_SHAPES = 64  # of products that stay known: all of a micro-batch, which the next one seldom has
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_GIVEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def patch(target: Any, **attrs: Any) -> None:
    """Sets these attributes of `target`, a module or a class."""
    for name, value in attrs.items():
        setattr(target, name, value)


def nothing(*_: Any, **__: Any) -> None:
    """Takes any arguments and returns None."""
    return None


class NullEvent:
    """Replaces torch.cuda.Event where everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = nothing

    def query(self) -> bool:
        """Returns True: all work before the event is done."""
        return True

    def elapsed_time(self, _other: NullEvent) -> float:
        """Returns 0.0 ms, whatever happened between the events."""
        return 0.0


class NullStream:
    """Replaces torch.cuda.Stream where ordering always holds. All of them are the same stream."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        """Returns `event`, or a new one; there is nothing to record."""
        return event or NullEvent()

    def query(self) -> bool:
        """Returns True: all work of the stream is done."""
        return True

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullStream)

    def __hash__(self) -> int:
        return 0


def p1_current_device() -> None:
    """Makes torch.cuda.current_device() return the CPU device in place of an index."""
    patch(torch.cuda, current_device=lambda: _CPU)


def p2_streams_and_memory() -> None:
    """Makes torch.cuda's streams, events and ranges null objects, and its memory counters 0 bytes:
    work on a CPU is synchronous."""
    null = NullStream()
    silent = "synchronize empty_cache set_device set_stream ipc_collect reset_peak_memory_stats"
    for name in silent.split():
        # one function per name: torch._dynamo keys its rules by function and refuses duplicates
        patch(torch.cuda, **{name: lambda *_, **__: None})
    counters = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    patch(torch.cuda, **{name: lambda *_, **__: 0 for name in counters.split()})
    patch(
        torch.cuda,
        Stream=NullStream,
        Event=NullEvent,
        current_stream=lambda *_, **__: null,
        default_stream=lambda *_, **__: null,
        stream=lambda s: contextlib.nullcontext(s),
        get_device_capability=lambda *_, **__: (0, 0),
    )
    for name in ("range_push", "range_pop"):
        patch(torch.cuda.nvtx, **{name: lambda *_, **__: None})


def p3_tensor_placement() -> None:
    """Keeps tensors on the CPU despite device="cuda", device indices, .cuda() and pin_memory."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            is_index = isinstance(device, int) and not isinstance(device, bool)
            if is_index or str(device).startswith("cuda"):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return wrapper

    # torch.device("meta") as a context knows factories by identity, cached at its first use:
    # let it see the real ones, or models built under it (from_pretrained) get uninitialised buffers
    _device_constructors()
    factories = "tensor zeros ones empty full arange empty_like zeros_like ones_like"
    for name in factories.split():
        patch(torch, **{name: on_cpu(getattr(torch, name))})
    patch(
        torch.Tensor,
        cuda=lambda self, *_, **__: self,
        pin_memory=lambda self, *_, **__: self,
        record_stream=nothing,
    )
    patch(torch.nn.Module, cuda=lambda self, *_, **__: self)


def p4_tensor_type() -> None:
    """megatron.core.optimizer sorts parameters by `param.type()` among torch.cuda names."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)  # type: ignore[union-attr]

    patch(torch.Tensor, type=type_)


def p5_torch_random_state() -> None:
    """torch.manual_seed calls torch.cuda.manual_seed_all, so seeding goes to the generator."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    patch(torch.cuda, manual_seed=manual_seed, manual_seed_all=nothing)
    for module in (torch.cuda, torch.cuda.random):
        patch(module, get_rng_state=get_state, set_rng_state=set_state)


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
    apex = SimpleNamespace(wgrad_gemm_accum_fp32=cpu_kernels.accumulate)
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


def p14_large_tensors() -> None:
    """A tensor that comes fresh from the kernel has to be faulted in page by page, which takes
    longer than the pass that fills it. glibc gives large blocks back at once and the end of its
    heap soon, so that every micro-batch would pay this again. Other allocators (jemalloc, tcmalloc)
    decide for themselves, and elsewhere than on Linux nothing happens. torch reads the variable
    before it allocates the first tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_freed()


@cache
def keep_freed() -> bool:
    """Keeps what is freed for the tensors to come, from here on; the peak stays the same. Returns
    whether it does: not where the environment tells glibc something else, or without glibc."""
    library = _glibc()
    if library is None or any(name in os.environ for name in _GIVEN):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """Gives the kernel back what is freed and still kept."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


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
    gradients off, where nearly all of a pass goes; see megarl.parallel.cpu_kernels."""
    if cpu_kernels.by_onednn():
        cpu_kernels.remember_shapes(_SHAPES)
        patch(torch, matmul=cpu_kernels.product)
        patch(torch.Tensor, matmul=cpu_kernels.product)


_installed = False


def install() -> None:
    """Installs all of them, once. Raises AssertionError if megatron.core is imported already."""
    global _installed
    if _installed:
        return
    early = [m for m in sys.modules if m.startswith("megatron.core")]
    assert not early, f"import megarl.parallel.mcore before megatron ({early[0]} is loaded)"
    p14_large_tensors()
    p1_current_device()
    p2_streams_and_memory()
    p3_tensor_placement()
    p4_tensor_type()
    p5_torch_random_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine / apex is not installed"
        p6_no_compile()
        p5_tracker()
        p8_moe_split_sizes()
        p9_uneven_all_gather()
        p12_fused_kernels()
        p13_one_rank_groups()
        p15_hybrid_optimizer()
        p16_no_whole_weights()
        p17_matrix_products()
    _installed = True
