"""Says what a directory of weights is, and whether two of them hold the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.ckpt.convert.rows import MAX_MEMORY, Buffer, chunk_bytes, chunks
from megarl.ckpt.convert.source import HF, Source, models_of_run, open_source
from megarl.ckpt.files import MARKER, read_info
from megarl.ckpt.safetensors import main_dtype
from megarl.utils.files import human

Rows = Iterator[tuple[int, torch.Tensor]]
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Describes a tensor that differs. `worst` is the largest |a - b|; it is inf where the shapes
    differ, one side lacks the tensor, or a number is nan."""

    name: str
    what: str
    worst: float

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def verify(a: str | Path, b: str | Path, *, max_memory: int = MAX_MEMORY) -> list[Difference]:
    """Returns every HF tensor that is not the same bits in `a` and `b`, the worst first.

    Either may be a model directory or a dist checkpoint of any layout. Raises ValueError if one of
    them is not whole.
    """
    size = chunk_bytes(max_memory, workers=3)  # two buffers, and what a comparison makes of them
    sources = open_source(Path(a)), open_source(Path(b))
    members = [{m.name: m for m in source.members()} for source in sources]
    buffers = Buffer(size), Buffer(size)
    differences = []
    for name in dict.fromkeys([*members[0], *members[1]]):
        pair = members[0].get(name), members[1].get(name)
        shapes = [m and m.shape for m in pair]
        if shapes[0] == shapes[1]:
            streams = (
                chunks(source.blocks[name], m, buffer, itemsize=8)  # as fp64, where they differ
                for source, m, buffer in zip(sources, pair, buffers, strict=True)
                if m is not None
            )
            differences += _compare(name, *streams)
        else:
            what = f"{shapes[0]} and {shapes[1]}"
            differences.append(Difference(name=name, what=what, worst=float("inf")))
    return sorted(differences, key=lambda d: -d.worst)


def _compare(name: str, a: Rows, b: Rows) -> list[Difference]:
    """Returns the difference of a tensor, if there is one, given its rows on both sides."""
    count, numbers, worst, dtypes = 0, 0, 0.0, ""
    for (_, x), (_, y) in zip(a, b, strict=True):
        numbers += x.numel()
        dtypes = "" if x.dtype == y.dtype else f"{x.dtype} and {y.dtype}, "
        if not dtypes and torch.equal(_bits(x), _bits(y)):
            continue
        differ = x.double() != y.double() if dtypes else _bits(x) != _bits(y)
        apart = (x.double() - y.double()).abs_().masked_fill_(~differ, 0.0)
        count += int(differ.sum())
        worst = max(worst, float(apart.nan_to_num_(nan=float("inf")).max()))
    if not dtypes and not count:
        return []
    what = f"{dtypes}{count} of {numbers} numbers differ, by {worst:.3g} at most"
    return [Difference(name=name, what=what, worst=worst)]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_BITS[x.element_size()])


def inspect(path: str | Path) -> dict[str, Any]:
    """Returns what `path` is, as lines of a table. Raises ValueError if it is no directory."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no directory")
    if models := models_of_run(path):
        parts = {f"{model.name}/": inspect(model)["complete"] for model in models}
        wrong = [f"{name} {why}" for name, why in parts.items() if why != "yes"]
        about = {"what": "a checkpoint of a run", "models": ", ".join(parts)}
        return {**about, "complete": "; ".join(wrong) or "yes"}
    try:
        return _whole(open_source(path))
    except ValueError as e:
        return {**_part(path), "complete": f"no: {e}"}


def _whole(source: Source) -> dict[str, Any]:
    model = source.table.model
    stored = sum(f.stat().st_size for f in source.path.rglob("*") if f.is_file())
    what: dict[str, Any] = {
        "what": "a Hugging Face model" if source.kind == HF else "a dist checkpoint",
        "family": model.family + (" (value model)" if model.head == "value" else ""),
        "parameters": f"{sum(t.numel for t in source.table.tensors):,}",
        "dtype": str(main_dtype(source.members())).removeprefix("torch."),
        "tied embedding": "yes" if model.tie_word_embeddings else "no",
    }
    return {**what, **_training(source.info), "size": human(stored), "complete": "yes"}


def _training(info: Any) -> dict[str, Any]:
    """Returns what the info of a dist checkpoint says of the training that wrote it."""
    if not info:
        return {}
    layout = {k: v for k, v in info["layout"].items() if v not in (1, False, None)}
    found = {
        "layout": " ".join(f"{k}={v}" for k, v in layout.items()) or "one rank",
        "optimizer state": info["optimizer"] if info["with_optim"] else "no",
        "weight version": info["version"],
    }
    if "schedule_steps" in info:
        found["schedule steps"] = info["schedule_steps"]
    return found


def _part(path: Path) -> dict[str, Any]:
    """Returns what is known of a directory that cannot be read as a model."""
    if (path / ".metadata").exists() or (path / MARKER).exists():
        try:
            info = read_info(path)
        except ValueError:
            return {"what": "a dist checkpoint"}
        lora = {"lora": "yes"} if info.get("lora") else {}
        return {"what": "a dist checkpoint", **_training(info), **lora}
    if (path / "config.json").exists():
        return {"what": "a Hugging Face model"}
    return {"what": "neither a Hugging Face model nor a dist checkpoint"}
