"""PEFT directories with random adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.config.engine import LoRAConfig
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import adapter_config, adapter_table
from megarl.parallel.layout import Layout

ALL = ("all-linear",)


def lora(targets: tuple[str, ...] = ALL, **over: Any) -> LoRAConfig:
    return LoRAConfig(**{"r": 4, "alpha": 6.0, "target_modules": list(targets), **over})


def write_adapter(
    directory: Path, base: str, cfg: LoRAConfig, head: str = "lm", seed: int = 1
) -> str:
    """Writes a PEFT directory with random A and B, from the declarations, without an engine."""
    model = read_hf_config(base, head=head)
    g = torch.Generator().manual_seed(seed)
    tensors = {
        t.name: 0.1 * torch.randn(t.shape, generator=g)
        for t in adapter_table(model, Layout(), cfg).tensors
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    text = json.dumps(adapter_config(model, cfg, base))
    (directory / "adapter_config.json").write_text(text)
    return str(directory)
