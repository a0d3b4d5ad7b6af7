"""Reads what the parts of every layer put out in a pass, for `megarl gap`.

Nothing of the pass changes. T tokens of the batch, row after row; H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.engine.micro_batch import Frame, MicroBatch
from megarl.engine.setup import EngineState
from megarl.models.names import unwrap
from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip


class Part(NamedTuple):
    """Names a part of a model: the number of its layer, -1 before the first and the number of
    layers behind the last, and what it is, a word of ORDER."""

    layer: int
    name: str


EMBEDDING, FINAL_NORM, HEAD = "embedding", "final norm", "head"
ATTENTION_NORM, ATTENTION, ATTENTION_POST_NORM = "attention norm", "attention", "norm of attention"
MLP_NORM, ROUTER, MLP, MLP_POST_NORM = "MLP norm", "router", "MLP", "norm of MLP"
# in the order in which they compute
ORDER = (
    EMBEDDING,
    ATTENTION_NORM,
    ATTENTION,
    ATTENTION_POST_NORM,
    MLP_NORM,
    ROUTER,
    MLP,
    MLP_POST_NORM,
    FINAL_NORM,
    HEAD,
)
# the parts of a layer by megatron-core's names; the router's logits have none of their own
_MODULES = {
    ATTENTION_NORM: "input_layernorm",
    ATTENTION: "self_attention",
    ATTENTION_POST_NORM: "post_self_attn_layernorm",
    MLP_NORM: "pre_mlp_layernorm",
    MLP: "mlp",
    MLP_POST_NORM: "post_mlp_layernorm",
}


class Probe:
    """Keeps what the parts of an engine's chunks put out, micro-batch after micro-batch.

    Norms that Transformer Engine fuses into the linear map behind them are no parts.
    """

    def __init__(self, state: EngineState) -> None:
        self._groups = state.groups
        self._last = state.model.num_layers
        self._chunks: list[Any] = [unwrap(chunk) for chunk in state.chunks]
        self._seen: dict[Part, list[Tensor]] = {}
        self.found: dict[Part, Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens to the passes made inside, each part's outputs in the order of micro-batches."""
        undo: list[Callable[[], None]] = []
        try:
            for chunk in self._chunks:
                for part, module in self._parts(chunk):
                    undo.append(self._listen(part, module))
            yield
        finally:
            for each in undo:
                each()
            self._seen.clear()

    def _parts(self, chunk: Any) -> Iterator[tuple[Part, nn.Module]]:
        if chunk.pre_process:
            yield Part(-1, EMBEDDING), chunk.embedding
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1  # megatron counts from 1
            for name, attribute in _MODULES.items():
                module = getattr(layer, attribute, None)
                if isinstance(module, nn.Module) and not isinstance(module, IdentityOp):
                    yield Part(number, name), module
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                yield Part(number, ROUTER), router
        if chunk.post_process:
            yield Part(self._last, FINAL_NORM), chunk.decoder.final_layernorm

    def _listen(self, part: Part, module: Any) -> Callable[[], None]:
        """Keeps what `module` puts out, of a router its logits; returns how to stop."""
        note = partial(self._note, part)
        if not isinstance(module, TopKRouter):
            undo: Callable[[], None] = module.register_forward_hook(lambda *a: note(a[2])).remove
            return undo
        gating = module.gating

        def noted(x: Tensor) -> Tensor:
            logits: Tensor = gating(x)
            note(logits)
            return logits

        module.gating = noted  # its logits leave the router nowhere else
        return partial(delattr, module, "gating")

    def _note(self, part: Part, out: Any) -> None:
        if isinstance(out, tuple):  # megatron-core's blocks leave their bias to the caller
            value, bias = out[:2]
            out = value if bias is None else value + bias
        # a copy: megatron-core's sums write over what they add
        self._seen.setdefault(part, []).append(out.detach().flatten(0, -2).clone())

    def collect(self, micro_batches: Sequence[MicroBatch], frame: Frame) -> None:
        """Sets `found`: what each part put out, [T,...] float32 on the host, on every rank.
        Collective."""
        layout, coords = self._groups.layout, self._groups.coords
        # without sequence parallelism tensor-parallel ranks hold the same
        speaks = layout.sequence_parallel or coords.tp == 0
        for part, width in sorted(self._everyones().items()):
            full = frame.zeros((width,), torch.float32)
            mine = self._seen.get(part, []) if speaks else []
            for mb, values in zip(micro_batches, mine, strict=bool(mine)):
                real, places = frame.places(mb, layout, coords.tp)
                full[places] = values[real].float()
            if layout.world_size > 1:
                dist.all_reduce(full)
            self.found[part] = full.cpu()

    def _everyones(self) -> dict[Part, int]:
        """Returns the parts that any rank has seen, with the numbers each gives of a token."""
        mine = {part: seen[0].shape[-1] for part, seen in self._seen.items()}
        if self._groups.layout.world_size == 1:
            return mine
        said: list[dict[Part, int]] = [{}] * self._groups.layout.world_size
        dist.all_gather_object(said, mine)
        return {part: width for each in said for part, width in each.items()}
