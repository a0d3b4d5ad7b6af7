"""Records which experts a model's routers choose, as SGLang does for return_routed_experts.

B sequences of a pass, S positions, L layers, k experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


class RouteRecorder:
    """Notes what the routers of `model` chose in the pass that ran last.

    A router is the `gate` of a layer's `mlp`, as in all of transformers' models with experts; it
    answers with logits, weights and the numbers of the chosen experts. Raises ValueError for a
    model without.
    """

    def __init__(self, model: Any) -> None:
        layers = model.base_model.layers
        gates = {i: gate for i, layer in enumerate(layers) if (gate := _gate(layer)) is not None}
        if not gates:
            raise ValueError(
                f"--enable-return-routed-experts: {type(model).__name__} has no experts to route "
                "to; leave it out"
            )
        self._layers, self._chosen = len(layers), dict[int, Tensor]()
        for i, gate in gates.items():
            gate.register_forward_hook(partial(self._note, i))

    def _note(self, layer: int, _gate: Any, _args: Any, out: Any) -> None:
        self._chosen[layer] = out[2]

    def take(self, rows: int) -> Tensor:
        """Returns the routes [rows,S,L,k] of a pass of `rows` sequences; 0 in dense layers."""
        some = next(iter(self._chosen.values()))
        out = some.new_zeros(len(some), self._layers, some.shape[-1])
        for layer, chosen in self._chosen.items():
            out[:, layer] = chosen
        return out.to(torch.int16).cpu().unflatten(0, (rows, -1))


def _gate(layer: Any) -> Any:
    """Returns a layer's router; None in a dense layer."""
    gate = getattr(getattr(layer, "mlp", None), "gate", None)
    return gate if isinstance(gate, torch.nn.Module) else None
