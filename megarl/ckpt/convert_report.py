"""Says what a directory of weights is, and whether two of them hold the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.ckpt.convert_files import matrix
from megarl.ckpt.convert_source import HF, Source, main_dtype, open_source
from megarl.ckpt.convert_work import MAX_MEMORY, Buffer, Progress, chunk_bytes
from megarl.ckpt.files import MARKER, read_info
from megarl.utils.files import human

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


def verify(
    a: str | Path,
    b: str | Path,
    *,
    base: Path | None = None,
    max_memory: int = MAX_MEMORY,
    quiet: bool = False,
) -> list[Difference]:
    """Returns every HF tensor that is not the same bits in `a` and `b`, the worst first.

    Either may be a model directory or a dist checkpoint of any layout; `base` is the model
    directory of an `a` without its config. Raises ValueError if one of them is not whole.
    """
    size = chunk_bytes(max_memory, workers=3)  # two buffers, and what a comparison makes of them
    first, second = open_source(a, base), open_source(b, base)
    shapes = [{t.name: t.shape for t in s.table.tensors} for s in (first, second)]
    found = []
    both = []
    for name in dict.fromkeys([*shapes[0], *shapes[1]]):
        if (x := shapes[0].get(name)) != (y := shapes[1].get(name)):
            found.append(Difference(name=name, what=f"{x} and {y}", worst=float("inf")))
        else:
            both.append(name)
    total = sum(shapes[0][n][0] * matrix(shapes[0][n])[1] for n in both)
    buffers = Buffer(size), Buffer(size)
    with Progress(total * main_dtype(first.dtypes, first).itemsize, quiet=quiet) as progress:
        for name in both:
            found += _compare(first, second, name, shapes[0][name], buffers, progress)
    return sorted(found, key=lambda d: -d.worst)


def _compare(
    a: Source,
    b: Source,
    name: str,
    shape: tuple[int, ...],
    buffers: tuple[Buffer, Buffer],
    progress: Progress,
) -> list[Difference]:
    rows, width = matrix(shape)
    dtypes = a.dtypes[name], b.dtypes[name]
    step = buffers[0].rows(width * 8)  # as fp64, where they differ
    count, worst = 0, 0.0
    for row in range(0, rows, step):
        n = min(step, rows - row)
        x, y = (buf.tensor((n, width), dt) for buf, dt in zip(buffers, dtypes, strict=True))
        a.read(name, row, x)
        b.read(name, row, y)
        if dtypes[0] != dtypes[1] or not torch.equal(_bits(x), _bits(y)):
            same = dtypes[0] == dtypes[1]
            differ = _bits(x) != _bits(y) if same else x.double() != y.double()
            apart = (x.double() - y.double()).abs_().masked_fill_(~differ, 0.0)
            count += int(differ.sum())
            worst = max(worst, float(apart.nan_to_num_(nan=float("inf")).max()))
        progress.add(x.numel() * x.element_size())
    if dtypes[0] != dtypes[1]:
        what = f"{dtypes[0]} and {dtypes[1]}, {count} of {rows * width} numbers differ"
    elif count:
        what = f"{count} of {rows * width} numbers differ"
    else:
        return []
    return [Difference(name=name, what=f"{what}, by {worst:.3g} at most", worst=worst)]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_BITS[x.element_size()])


def inspect(path: str | Path) -> dict[str, Any]:
    """Returns what `path` is, as lines of a table. Raises ValueError if it is no directory."""
    path = Path(path)
    work = path.absolute().with_name(f".{path.absolute().name}.converting")
    if not path.exists() and work.is_dir():
        path = work
    if (path / "input.json").is_file() and (path / "notes").is_dir():
        done = [f.name for f in (path / "notes").glob("*.json")]
        return {"what": "an unfinished conversion", "complete": "no", "files done": len(done)}
    if not path.is_dir():
        raise ValueError(f"{path} is no directory")
    try:
        return _whole(open_source(path))
    except ValueError as e:
        return {**_part(path), "complete": f"no: {e}"}


def _whole(source: Source) -> dict[str, Any]:
    model, info = source.model, source.info
    stored = sum(f.stat().st_size for f in source.path.rglob("*") if f.is_file())
    what: dict[str, Any] = {
        "what": "a Hugging Face model" if source.kind == HF else "a dist checkpoint",
        "family": model.family + (" (value model)" if model.head == "value" else ""),
        "parameters": f"{sum(t.numel for t in source.table.tensors):,}",
        "dtype": str(main_dtype(source.dtypes, source)).removeprefix("torch."),
        "tied embedding": "yes" if model.tie_word_embeddings else "no",
    }
    return {**what, **_training(info), "size": human(stored), "complete": "yes"}


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
    models = sorted(m.parent.name for m in path.glob(f"*/{MARKER}"))
    if models:
        return {"what": "a checkpoint of a run", "models": ", ".join(f"{m}/" for m in models)}
    return {"what": "neither a Hugging Face model nor a dist checkpoint"}
