"""Records what `model.load_weights` does with HF tensors, without any of their memory.

`load_weights` is called once with a `Probe` of every HF tensor, which has shape, dtype and device
and no memory. A probe follows views by strides and movements of data by element numbers, and takes
a note when it is copied into a parameter, which stays as it is. No model is known by name here.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .strides import Ints, affine, boxes, grid

aten = torch.ops.aten
GAP = 1 << 20  # between the numbers of two tensors' elements: no run of numbers crosses it
COPIES = (aten._to_copy.default, aten.clone.default)
# what puts elements elsewhere and leaves their values alone: joins, and what an index may say
JOINS = (aten.cat.default, aten.stack.default)
MOVES = (
    *JOINS,
    *(aten.index_select.default, aten.index.Tensor, aten.gather.default),
    *(aten.flip.default, aten.roll.default, aten.repeat.default, aten._unsafe_view.default),
)
INDEX = (torch.int64, torch.int32, torch.bool)


class Entry(NamedTuple):
    """Says that box [start, stop) of an HF tensor, in row-major order, is a strided view of a
    parameter. offset: in elements, from the beginning of the parameter's storage."""

    tensor: str
    start: Ints
    stop: Ints
    param: str
    offset: int
    shape: Ints
    strides: Ints


@dataclass
class Table:
    """Holds what one rank keeps of the HF tensors.

    computed: parameters written with something else than HF elements, and the HF tensors that went
    into it. twice: parameter -> elements that several HF elements reach. unfilled: parameter ->
    elements that neither these nor constants (padding) reach. params: name -> dtype. digest:
    changes when the table no longer holds.
    """

    digest: str
    entries: list[Entry] = field(default_factory=list)
    computed: dict[str, list[str]] = field(default_factory=dict)
    twice: dict[str, int] = field(default_factory=dict)
    unfilled: dict[str, int] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name."""
    return {n: p.detach() for n, p in (*model.named_parameters(), *model.named_buffers())}


def digest_of(model: torch.nn.Module) -> str:
    """Returns a hash of all that a table depends on: parameters' names, shapes, strides, offsets
    and dtypes, and which expert lies where."""
    found: list[Any] = [
        (n, tuple(p.shape), p.stride(), p.storage_offset(), str(p.dtype))
        for n, p in model.named_parameters()
    ]
    return hashlib.sha256(repr([*found, _experts()]).encode()).hexdigest()[:16]


def _experts() -> Any:
    """Returns SGLang's map of experts, which its load balancer changes, None without one."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    known = module and module.get_global_expert_location_metadata()
    return known and known.physical_to_logical_map_cpu.tolist()


# ---- probes


class Unsupported(RuntimeError):
    """Tells that a loader does something with a probe that cannot be followed."""


class Probe(torch.Tensor):
    """Stands for HF tensors, or views of them. `ids` numbers its elements.

    source: the one HF tensor it is a view of; then ids are on the meta device, and their offset and
    strides say which elements. Without one ids are real int64 numbers. tainted: the HF tensors it
    was computed from by arithmetic; then ids mean nothing. casts: its dtypes so far.
    """

    ids: torch.Tensor
    source: int | None
    tainted: frozenset[int]
    casts: tuple[torch.dtype, ...]
    recorder: Recorder

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # on the class and not in a mode: modes are per thread, and some models load in threads
        probes = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Probe)]
        return probes[0].recorder.op(func, args, kwargs or {}, probes)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's looks at values
        return f"Probe({tuple(self.shape)}, {self.dtype})"


class Recorder(TorchDispatchMode):
    """Follows probes through one call of load_weights. As a mode, it keeps loaders from writing
    real numbers into parameters. tensors: (name, shape, dtype) of the HF model in its order."""

    def __init__(self, model: torch.nn.Module, tensors: Sequence[tuple[str, Ints, str]]) -> None:
        super().__init__()
        self.tensors = [(n, tuple(shape), getattr(torch, dtype)) for n, shape, dtype in tensors]
        self.bases, end = [], 0
        for _, shape, _ in self.tensors:
            self.bases.append(end)
            end += math.prod(shape) + GAP
        self.storages: dict[str, torch.Tensor] = {}
        self.homes: dict[int, str] = {}
        for name, p in state(model).items():
            if p.numel() and p.untyped_storage().data_ptr() not in self.homes:
                self.homes[p.untyped_storage().data_ptr()] = name
                self.storages[name] = p
        self.device = next(iter(self.storages.values())).device
        self.used, self.zeros = set[int](), set[int]()  # HF tensors
        # (source tensor, its offset, shape and strides, parameter, its offset and strides)
        self.writes: list[tuple[int, int, Ints, Ints, str, int, Ints]] = []
        self.fills: list[tuple[str, torch.Tensor]] = []
        self.computed: list[tuple[str, frozenset[int], torch.Tensor]] = []

    def probes(self) -> Iterator[tuple[str, Probe]]:
        """Yields a probe of every HF tensor under its name."""
        for i, (name, shape, dtype) in enumerate(self.tensors):
            yield name, self.probe(torch.empty(shape, device="meta"), self.device, (dtype,), i)

    def probe(
        self,
        ids: torch.Tensor,
        device: Any,
        casts: tuple[torch.dtype, ...],
        source: int | None,
        tainted: frozenset[int] = frozenset(),
    ) -> Probe:
        """Returns a probe that says it is on `device`, in the last dtype of `casts`."""
        probe = torch.Tensor._make_wrapper_subclass(
            Probe,
            ids.shape,
            strides=ids.stride(),
            storage_offset=ids.storage_offset(),
            dtype=casts[-1],
            device=device,
        )
        probe.ids, probe.source, probe.tainted = ids, source, tainted
        probe.recorder, probe.casts = self, casts
        # SGLang's mark of tensors to consume at once: it loads others in threads, where this mode
        # does not see padding being filled
        probe.__dict__["_sglang_runai_streamer_tensor"] = True
        return probe

    def op(self, func: Any, args: Any, kwargs: dict[str, Any], probes: list[Probe]) -> Any:
        """Does what torch is asked to do with probes. Raises Unsupported for what it cannot."""
        like, schema = probes[0], func._schema
        # what a rank leaves to another; a view or a copy from before would not follow
        source = like.source
        if func is aten.zero_.default and source is not None and source not in self.used:
            self.zeros.add(source)
            return like
        self.used.update(p.source for p in probes if p.source is not None)
        if func is aten.copy_.default and not isinstance(args[0], Probe):
            self.write(args[0], args[1])
            return args[0]
        if schema.is_mutable:
            raise Unsupported(f"{func} with a loaded tensor")
        if func in COPIES:
            return self.copied(like, kwargs)
        tainted = frozenset().union(*(p.tainted for p in probes))
        # a view of the bits as another dtype has other values
        is_view = func is not aten.view.dtype and any(r.alias_info for r in schema.returns)
        moves = func in MOVES and not tainted and _only_moves(func, args, kwargs, probes)
        if not is_view and not moves:  # the shape of the result, and from what it is computed
            tainted = tainted.union(*(self.sources(p) for p in probes))
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}

        def inside(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if not isinstance(x, Probe):
                return x if is_view else x.to("cpu" if moves else "meta")
            if is_view:
                return x.ids
            if moves:
                return self.numbers(x)
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

        def outside(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            casts = like.casts if is_view or moves else (x.dtype,)
            return self.probe(x, like.device, casts, like.source if is_view else None, tainted)

        try:
            return tree_map(outside, func(*tree_map(inside, args), **tree_map(inside, kwargs)))
        except (NotImplementedError, RuntimeError) as e:  # .item(), for one
            raise Unsupported(f"{func} looks at the numbers of a loaded tensor: {e}") from e

    def copied(self, probe: Probe, kwargs: dict[str, Any]) -> Probe:
        """Returns a copy of a probe, maybe of another dtype, on another device, contiguous."""
        dtype = kwargs.get("dtype") or probe.dtype
        form = kwargs.get("memory_format") or torch.preserve_format
        ids, source = probe.ids, probe.source
        if ids.clone(memory_format=form).stride() != ids.stride():  # its elements move
            ids, source = self.numbers(probe).clone(memory_format=form), None
        casts = probe.casts if dtype == probe.dtype else (*probe.casts, dtype)
        device = kwargs.get("device") or probe.device
        return self.probe(ids, device, casts, source, probe.tainted)

    def write(self, target: torch.Tensor, probe: Probe) -> None:
        """Notes that a probe is copied into `target`, a view of a parameter."""
        home = self.homes.get(target.untyped_storage().data_ptr())
        if home is None:
            raise Unsupported("a loaded tensor is copied into memory that is no parameter")
        offset, there = int(target.storage_offset()), target.stride()
        ids = probe.ids.expand(target.shape)
        zeros = self.zeros & self.sources(probe) if self.zeros else set()
        if zeros and not probe.tainted and zeros == self.sources(probe):
            self.fills.append((home, target))
        elif zeros or probe.tainted or not _exact((*probe.casts, target.dtype)):
            self.computed.append((home, probe.tainted or self.sources(probe), target))
        elif probe.source is not None:
            at = int(ids.storage_offset())
            self.writes.append((probe.source, at, ids.shape, ids.stride(), home, offset, there))
        else:
            for first, shape, steps, off, strides in affine(ids, offset, there):
                i = bisect.bisect_right(self.bases, first) - 1
                self.writes.append((i, first - self.bases[i], shape, steps, home, off, strides))

    def numbers(self, probe: Probe) -> torch.Tensor:
        """Returns real numbers of a probe's elements, 8 bytes each."""
        if probe.source is None:
            return probe.ids
        first = self.bases[probe.source] + int(probe.ids.storage_offset())
        return grid(first, probe.shape, probe.ids.stride()).contiguous()

    def sources(self, probe: Probe) -> frozenset[int]:
        """Returns which HF tensors a probe comes from."""
        if probe.tainted:
            return probe.tainted
        if probe.source is not None:
            return frozenset({probe.source})
        return frozenset(
            bisect.bisect_right(self.bases, n) - 1 for n in probe.ids.unique().tolist()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes real numbers on their way into parameters, and leaves them out."""
        if func._schema.is_mutable and not any(isinstance(x, Probe) for x in tree_leaves(args)):
            for a, x in zip(func._schema.arguments, args, strict=False):
                if a.alias_info and a.alias_info.is_write and isinstance(x, torch.Tensor):
                    home = self.homes.get(x.untyped_storage().data_ptr())
                    if home is not None:
                        self.fills.append((home, x))
                        return x
        return func(*args, **(kwargs or {}))


def record(model: torch.nn.Module, tensors: Sequence[tuple[str, Ints, str]]) -> Table:
    """Returns where the elements of `tensors` (name, shape, dtype) land. Parameters stay as they
    are. All go in one call: some loaders wait for several tensors before they write. Raises
    Unsupported, or what the loader raises."""
    recorder = Recorder(model, tensors)
    with torch.no_grad(), recorder:
        model.load_weights(recorder.probes())  # type: ignore[operator]
    return _table(model, recorder)


def _table(model: torch.nn.Module, found: Recorder) -> Table:
    """Makes the table, and counts how often every element is reached: a byte of memory for each
    element of one parameter at a time."""
    table = Table(digest_of(model))
    owned: dict[str, list[Any]] = {}  # by the first in the same memory
    for name, p in model.named_parameters():
        memory = found.homes.get(p.untyped_storage().data_ptr(), name)
        owned.setdefault(memory, []).append((name, p))
    writes: dict[str, list[Any]] = {}
    for write in found.writes:
        writes.setdefault(write[4], []).append(write)
    for param, home in found.storages.items():
        table.params[param] = str(home.dtype).removeprefix("torch.")
        seen = torch.zeros(home.untyped_storage().nbytes() // home.itemsize, dtype=torch.uint8)
        for source, first, sizes, steps, _, offset, there in writes.get(param, ()):
            name, shape, _ = found.tensors[source]
            dims = list(zip(steps, sizes, there, strict=True))
            for start, stop, off, view in boxes(shape, first, dims, offset):
                own, strides = [n for n, _ in view], [t for _, t in view]
                table.entries.append(Entry(name, start, stop, param, off, own, strides))
                seen.as_strided(own, strides, off).add_(1)
        if n := int((seen > 1).sum()):
            table.twice[param] = n
        for _, sources, target in (c for c in found.computed if c[0] == param):
            names = {found.tensors[i][0] for i in sources}
            table.computed[param] = sorted(names.union(table.computed.get(param, ())))
            seen.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(1)
        for target in (t for p, t in found.fills if p == param):
            seen.as_strided(target.shape, target.stride(), target.storage_offset()).fill_(1)
        for name, p in owned.get(param, ()):
            missing = seen.as_strided(p.shape, p.stride(), p.storage_offset()) == 0
            if n := int(missing.sum()):
                table.unfilled[name] = n
    return table


def _only_moves(func: Any, args: Any, kwargs: Any, probes: Sequence[Probe]) -> bool:
    """Returns whether a call has probes of one dtype and, unless it joins them, indices alone."""
    others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    others = [x for x in others if not isinstance(x, Probe)]
    if any(x.dtype not in INDEX for x in others) or (others and func in JOINS):
        return False
    return len({p.casts for p in probes}) == 1


def _exact(casts: tuple[torch.dtype, ...]) -> bool:
    """Returns whether a chain of casts is the one cast from its first to its last dtype."""
    first, *between, last = casts
    return all(d == last or torch.promote_types(first, d) == d for d in between)
