"""Reads what the parts of every layer put out in a pass, for `megarl gap`.

Nothing of the pass changes. T tokens of the batch, row after row; H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.engine.micro_batch import MicroBatch, Result, ResultRows, Writes
from megarl.engine.setup import EngineState
from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.transformer.identity_op import IdentityOp


class Part(NamedTuple):
    """Names a part of a model: the number of its layer, -1 before the first and the number of
    layers behind the last, and what it is."""

    layer: int
    name: str


EMBEDDING, FINAL_NORM, HEAD = "embedding", "final norm", "head"
ATTENTION_NORM, ATTENTION, ATTENTION_POST_NORM = "attention norm", "attention", "norm of attention"
MLP_NORM, ROUTER, MLP, MLP_POST_NORM = "MLP norm", "router", "MLP", "norm of MLP"
# the parts of a layer by megatron-core's names and by transformers', which are the same in every
# family
_MODULES = {
    ATTENTION_NORM: ("input_layernorm", "input_layernorm"),
    ATTENTION: ("self_attention", "self_attn", "linear_attn"),
    ATTENTION_POST_NORM: ("post_self_attn_layernorm", "post_self_attn_layernorm"),
    MLP_NORM: ("pre_mlp_layernorm", "post_attention_layernorm"),
    ROUTER: ("mlp.router", "mlp.gate"),
    MLP: ("mlp", "mlp"),
    MLP_POST_NORM: ("post_mlp_layernorm", "post_mlp_layernorm"),
}


def parts_of_layer(layer: nn.Module, number: int) -> Iterator[tuple[Part, nn.Module]]:
    """Yields the parts of layer `number` of a model of megatron-core's or of transformers', and the
    modules that compute them. Norms that Transformer Engine fuses into the linear map behind them
    are no parts."""
    modules = dict(layer.named_modules())
    for name, paths in _MODULES.items():
        for path in dict.fromkeys(paths):
            if path in modules and not isinstance(modules[path], IdentityOp):
                yield Part(number, name), modules[path]


@contextmanager
def listening(
    parts: Iterable[tuple[Part, nn.Module]], hear: Callable[[Part, nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Calls hear(part, module, arguments, output) in every pass of a part's module made inside;
    what it returns, unless None, takes the output's place."""
    with ExitStack() as hooks:
        for part, module in parts:
            hooks.enter_context(module.register_forward_hook(partial(hear, part)))
        yield


class Probe:
    """Keeps what the parts of an engine's chunks put out, micro-batch after micro-batch."""

    def __init__(self, state: EngineState) -> None:
        self._groups = state.groups
        self._last = state.model.num_layers
        self._models = state.models
        self._seen: dict[Part, list[Tensor]] = {}

    def listening(self) -> AbstractContextManager[None]:
        """Listens to the passes made inside, each part's outputs in the order of micro-batches."""
        return listening(self._parts(), self._note)

    def _parts(self) -> Iterator[tuple[Part, nn.Module]]:
        for model in self._models:
            if model.pre_process:
                yield Part(-1, EMBEDDING), model.embedding
            for layer in model.decoder.layers:
                yield from parts_of_layer(layer, layer.layer_number - 1)  # megatron counts from 1
            if model.post_process:
                yield Part(self._last, FINAL_NORM), model.decoder.final_layernorm

    def _note(self, part: Part, module: Any, args: Any, out: Any) -> None:
        if part.name == ROUTER:
            out = module.gating(args[0])  # its logits leave the router nowhere
        elif isinstance(out, tuple):  # megatron-core's blocks leave their bias to the caller
            value, bias = out[:2]
            out = value if bias is None else value + bias
        # a copy: megatron-core's sums write over what they add
        self._seen.setdefault(part, []).append(out.detach().flatten(0, -2).clone())

    def results(self, micro_batches: Sequence[MicroBatch], at: ResultRows) -> Iterator[Result]:
        """Yields what each part put out, [T,...] float32. Collective."""
        for part, width in sorted(self._widths().items()):
            yield part, (width,), torch.float32, self._writes(part, micro_batches, at)

    def _writes(self, part: Part, micro_batches: Sequence[MicroBatch], at: ResultRows) -> Writes:
        # without sequence parallelism tensor-parallel ranks hold the same
        if part in self._seen and (
            self._groups.layout.sequence_parallel or self._groups.coords.tp == 0
        ):
            for mb, values in zip(micro_batches, self._seen[part], strict=True):
                places, real = at.of_layers(mb)
                yield places, values[real]

    def _widths(self) -> dict[Part, int]:
        """Returns the parts that any rank has seen, with the numbers each gives of a token."""
        widths = {part: seen[0].shape[-1] for part, seen in self._seen.items()}
        if self._groups.layout.world_size == 1:
            return widths
        of_rank: list[dict[Part, int]] = [{}] * self._groups.layout.world_size
        dist.all_gather_object(of_rank, widths)
        return {part: width for each in of_rank for part, width in each.items()}
