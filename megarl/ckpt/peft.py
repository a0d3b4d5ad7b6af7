"""Reads and writes adapters as PEFT directories: adapter_config.json and
adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.ckpt.files import staged
from megarl.models.adapters import Adapters
from megarl.models.lora import adapter_config, check_adapter_config
from megarl.models.params import load_params
from megarl.models.piece_table import HfTensor, PieceTable
from megarl.parallel import mcore
from megarl.parallel.ranks import together
from megarl.transfer.gather import BucketGatherer, plan_buckets
from megarl.utils.files import put_in_place

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
    one. Collective; all or nothing, as save_hf. Rank 0 holds all adapters."""
    buckets = plan_buckets(adapters.table, adapters.dtype, _BUCKET_BYTES)
    gatherer = BucketGatherer(
        adapters.table, rank, adapters.params, buckets, group=group, device=mcore.device()
    )
    target, tensors = Path(path), dict[str, Tensor]()
    with staged(target, "model", CONFIG, group) as staging:
        for bucket in buckets:
            if (flat := gatherer.gather(bucket)) is not None:
                tensors |= {name: t.to("cpu", copy=True) for name, t in bucket.views(flat)}

        def write() -> None:
            if rank != 0:
                return
            save_file(tensors, staging / WEIGHTS, {"format": "pt"})
            base = Path(base_model_path)
            named = str(base.absolute()) if base.is_dir() else base_model_path
            config = adapter_config(adapters.table.model, adapters.config, named)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            # safetensors lets its writer alone read
            (staging / WEIGHTS).chmod((staging / CONFIG).stat().st_mode)
            put_in_place(staging, target)

        together(f"saving {path}", write, group)


def load_peft(path: str | Path, adapters: Adapters) -> None:
    """Fills this rank's adapters from a PEFT directory. No communication.

    Raises ValueError, naming file and fix, unless it fits this engine's `lora` and model.
    """
    check_adapter_config(_read_config(Path(path)), adapters.config, str(Path(path) / CONFIG))
    file = Path(path) / WEIGHTS
    try:
        with safe_open(str(file), framework="pt", device="cpu") as stored:
            shapes = {n: stored.get_slice(n).get_shape() for n in stored.keys()}  # noqa: SIM118
            _check_tensors(shapes, adapters.table, file)

            def read(tensor: HfTensor, box: tuple[slice, ...]) -> Tensor:
                found: Tensor = stored.get_slice(tensor.name)[box]
                return found

            load_params(adapters.table, adapters.coords, adapters.params, read)
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{file}: not a whole safetensors file ({e}); save it again") from e


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
    want = {t.name: list(t.shape) for t in table.tensors}
    for name in sorted(want.keys() | found.keys()):
        if found.get(name) != want.get(name):
            raise ValueError(
                f"{file}: tensor {name} has shape {found.get(name)}, this engine's lora and model "
                f"ask for {want.get(name)}; set lora.target_modules and lora.r as they were when "
                "it was trained, on the same model"
            )
