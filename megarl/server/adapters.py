"""LoRA adapters by name, from PEFT directories.

The adapter that was loaded last is merged into the model: W + scale * B A, in float32, rounded once
to the server's dtype, as the trainer merges.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megarl.models.shapes import plain_name
from megarl.server.protocol import ControlError, ServerError
from megarl.server.weights import WeightStore

_PREFIX = "base_model.model."
# settings that must be off, because this server does not implement them
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
}


class Adapters:
    """Loads and merges adapters. `paths` has the directory of each by its name; `merged` names the
    one that answers are computed with. It keeps a copy of the weights below the merged one."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._base: dict[str, torch.Tensor] = {}  # below the merged adapter
        self.paths: dict[str, str] = {}
        self.merged: str | None = None

    def load(self, name: str, path: str) -> None:
        """Merges the adapter in directory `path`, all of it or nothing. Raises ControlError if it
        cannot be read or does not fit the model, or if `name` is taken."""
        if name in self.paths:
            raise ControlError(f"LoRA adapter {name!r} is loaded already; unload it first")
        if self._store.torn:
            raise ControlError("the weights below an adapter are torn; load them first")
        pairs, scale = _read(path)
        weights = {plain_name(name): name for name in self._store.tensors}
        pairs = {weights.get(plain_name(name), name): pair for name, pair in pairs.items()}
        for weight, (a, b) in pairs.items():
            self._store.check({weight: ((b.shape[0], a.shape[1]), a.dtype)})
        self._restore()
        try:
            with self._store.writing(pairs):
                for weight, (a, b) in pairs.items():
                    own = self._store.tensors[weight]
                    self._base[weight] = own.clone()
                    a, b = (t.to(own.device, torch.float32) for t in (a, b))
                    own.copy_((b @ a * scale).add_(own))
        except Exception:
            with self._store.writing(pairs):
                self._restore()
            raise
        self.paths[name], self.merged = path, name

    def unload(self, name: str) -> None:
        """Forgets an adapter; where it is merged, puts back the weights below it. Raises
        ControlError if there is none of this name."""
        if name not in self.paths:
            raise ControlError(f"LoRA adapter {name!r} is not loaded")
        del self.paths[name]
        if name == self.merged:
            self._restore()

    def forget(self) -> None:
        """Unloads all adapters. Call it before the model's own weights change."""
        self._restore()
        self.paths.clear()

    def check_named(self, name: str | None) -> None:
        """Raises ServerError where a request's `lora_path` is another adapter than the one that
        answers are computed with."""
        if (name or None) != self.merged:
            has = f"LoRA adapter {self.merged!r}" if self.merged else "no LoRA adapter"
            raise ServerError(f"lora_path={name!r}: this server computes with {has} alone")

    def _restore(self) -> None:
        for weight, base in self._base.items():
            self._store.tensors[weight].copy_(base)
        self._base.clear()
        self.merged = None


def _read(path: str) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], float]:
    """Reads a PEFT directory; returns A [r, in] and B [out, r] by their module's name for the
    weight, and their scale."""
    try:
        config = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(Path(path) / "adapter_model.safetensors")
    except (OSError, SafetensorError, ValueError) as e:
        raise ControlError(f"{path}: cannot read a PEFT adapter: {e}") from e
    scale = _scale(path, config)
    for key, allowed in _PLAIN.items():
        if config.get(key) not in allowed:
            raise ControlError(f"{path}: {key}={config[key]!r} is not supported")
    pairs = {}
    for name in [n for n in tensors if n.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        if (b := tensors.pop(f"{module}.lora_B.weight", None)) is None:
            raise ControlError(f"{path}: {name} has no lora_B beside it")
        a = tensors.pop(name)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ControlError(
                f"{path}: {module} has A of shape {list(a.shape)} and B of {list(b.shape)}; they "
                "must be [r, in] and [out, r]"
            )
        pairs[module.removeprefix(_PREFIX) + ".weight"] = a, b
    if tensors:
        raise ControlError(f"{path}: {next(iter(tensors))} belongs to no linear layer's adapter")
    return pairs, scale


def _scale(path: str, config: Any) -> float:
    r, alpha = (config.get(k) for k in ("r", "lora_alpha")) if isinstance(config, dict) else (0, 0)
    if not isinstance(r, int) or r < 1 or not isinstance(alpha, int | float):
        raise ControlError(f"{path}: adapter_config.json has r={r!r}, lora_alpha={alpha!r}")
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)
