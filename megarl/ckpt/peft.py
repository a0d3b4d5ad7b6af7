"""Reads and writes adapters as PEFT directories: adapter_config.json and
adapter_model.safetensors."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.ckpt.hf import write_sidecars
from megarl.ckpt.safetensors import INDEX, SINGLE, SafetensorsDir, save_tensors
from megarl.config.engine import LoRAConfig
from megarl.models.adapters import Adapters
from megarl.models.lora import PEFT_PREFIX, adapter_config, check_adapter_config, scale
from megarl.models.params import load_params
from megarl.models.piece_table import HfTensor, PieceTable
from megarl.models.shapes import plain_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BUCKET_BYTES = 64 << 20


def save_peft(
    path: str | Path,
    adapters: Adapters,
    rank: int,
    *,
    base_model_path: str,
    tokenizer: Any = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a directory that PeftModel.from_pretrained loads, with the tokenizer where there is
    one. Collective; see `save_tensors`."""

    def finish(staging: Path, _files: object) -> None:
        (staging / SINGLE).rename(staging / WEIGHTS)
        base = Path(base_model_path)
        named = str(base.absolute()) if base.is_dir() else base_model_path
        config = adapter_config(adapters.table.model, adapters.config, named)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    save_tensors(
        path,
        adapters.table,
        rank,
        adapters.params,
        finish,
        marker=CONFIG,
        dtype=adapters.dtype,
        group=group,
        max_shard_bytes=sys.maxsize,
        bucket_bytes=_BUCKET_BYTES,
    )


def load_peft(path: str | Path, adapters: Adapters) -> None:
    """Fills this rank's adapters from a PEFT directory, whose names may be those of the language
    model or of a complete model. No communication.

    Raises ValueError, naming file and fix, unless it fits this engine's `lora` and model.
    """
    config = _read_config(Path(path))
    check_adapter_config(config, adapters.config, str(Path(path) / CONFIG))
    with SafetensorsDir(path, WEIGHTS) as files:
        names = {plain_name(name): name for name in files.names()}
        shapes = {plain: list(files.stored(name).shape) for plain, name in names.items()}
        _check_tensors(shapes, adapters.table, Path(path) / WEIGHTS)
        _check_targets(files.names(), config.get("target_modules"), Path(path) / CONFIG)

        def read(tensor: HfTensor, box: tuple[slice, ...]) -> Tensor:
            return files.read(names[plain_name(tensor.name)], box)

        load_params(adapters.table, adapters.coords, adapters.params, read)


def base_of(adapter: str | Path) -> str:
    """Returns the model that a PEFT adapter was trained on, as adapter_config.json names it. Raises
    ValueError for a directory without one."""
    return str(_read_config(Path(adapter)).get("base_model_name_or_path") or "")


def merge_peft(base: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Writes to the directory `out` the model `base` with a PEFT adapter merged in: W + scale * B A
    in fp32, rounded to the dtype of W. The adapter's tokenizer replaces that of the base.

    Raises ValueError for an adapter that is not plain LoRA, or that does not fit the model.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    found: dict[str, Any] = _read_config(adapter)
    cfg = LoRAConfig(
        r=found.get("r", 0),
        alpha=found.get("lora_alpha", 0.0),
        use_rslora=bool(found.get("use_rslora")),
    )
    check_adapter_config(found, cfg, str(adapter / CONFIG))
    with SafetensorsDir(adapter, WEIGHTS) as files:
        own = {
            plain_name(n): files.read(n, (slice(None),) * len(files.stored(n).shape))
            for n in files.names()
        }
    for shard in sorted(base.glob("*.safetensors")):
        tensors = load_file(shard)
        for name, weight in tensors.items():
            layer = PEFT_PREFIX + plain_name(name).removesuffix(".weight")
            pair = [f"{layer}.lora_{side}.weight" for side in "AB"]
            if not own.keys() >= {*pair}:
                continue
            a, b = (own.pop(tensor) for tensor in pair)
            if (b.shape[0], a.shape[1]) != tuple(weight.shape):
                raise ValueError(
                    f"{adapter}: {layer} does not fit {base}: {name} has {weight.shape}"
                )
            merged = weight.float() + scale(cfg) * (b.float() @ a.float())
            tensors[name] = merged.to(weight.dtype)
        save_file(tensors, out / shard.name, metadata={"format": "pt"})
    if own:
        raise ValueError(
            f"{adapter}: tensor {min(own)} has no weight in {base}; merge it with PEFT"
        )
    for file in filter(Path.is_file, (base / "config.json", base / INDEX)):
        shutil.copyfile(file, out / file.name)
    for source in (base, adapter):
        write_sidecars(out, source, None)


def _read_config(path: Path) -> dict[str, object]:
    try:
        config: dict[str, object] = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as e:
        raise ValueError(
            f"{path} holds no PEFT adapter ({CONFIG}: {e}); name a directory written by "
            "save_pretrained of a PEFT model, or saved with weight_format='peft'"
        ) from e
    return config


def _check_tensors(found: dict[str, list[int]], table: PieceTable, file: Path) -> None:
    want = {plain_name(t.name): list(t.shape) for t in table.tensors}
    for name in sorted(want.keys() | found.keys()):
        if found.get(name) != want.get(name):
            raise ValueError(
                f"{file}: tensor {name} has shape {found.get(name)}, this engine's lora and model "
                f"ask for {want.get(name)}; set lora.target_modules and lora.r as they were when "
                "it was trained, on the same model"
            )


def _check_targets(tensors: Iterable[str], targets: Any, file: Path) -> None:
    """Raises ValueError for an adapter that PEFT would not load, because `targets` (suffixes or a
    regular expression) does not name its module."""
    names = [targets] if isinstance(targets, str) else targets or ["all-linear"]
    for module in (t.rpartition(".lora_")[0].removeprefix(PEFT_PREFIX) for t in tensors):
        suffix = any(f".{module}".endswith(f".{name}") for name in names)
        pattern = isinstance(targets, str) and re.fullmatch(targets, module)
        if module and not suffix and not pattern and "all-linear" not in names:
            raise ValueError(
                f"{file}: target_modules={targets!r} does not name {module}, which has tensors in "
                f"{WEIGHTS}; add the module to target_modules, or take its tensors out"
            )
