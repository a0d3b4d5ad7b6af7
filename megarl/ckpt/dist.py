"""Training checkpoints on disk: sharded state to a directory and back, on any layout.

The directory is a megatron-core "torch_dist" checkpoint (torch.distributed.checkpoint files,
common.pt, metadata.json) plus megarl.json, written last, which says what is inside and which files
belong to it. What the state means is the caller's business.

Saving stays in this process: megatron-core's own writer starts a "spawn" manager and forks, which
deadlocks scripts without a `__main__` guard and costs seconds.
"""

from __future__ import annotations

import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megarl.models.hf_config import ModelConfig
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.utils.staging import put_in_place, stage

from megatron.core import dist_checkpointing as mcore_ckpt  # isort: skip
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # isort: skip
from megatron.core.dist_checkpointing.serialization import (  # isort: skip
    get_default_save_common_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # isort: skip
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch  # isort: skip
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # isort: skip
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

# megatron-core 0.16 calls torch's older name
warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", module="megatron")

MARKER = "megarl.json"
FORMAT = 1
# fields of ModelConfig that do not change what the weights mean
_NOT_THE_MODEL = ("raw", "dtype", "initializer_range", "new_head")

T = TypeVar("T")


def save_sharded(
    path: str | Path,
    state: dict[str, Any],
    info: Mapping[str, Any],
    *,
    replicas: dist.ProcessGroup,
) -> None:
    """Writes `state` (leaves: ShardedTensor, ShardedObject, plain objects of rank 0) to `path`.

    Collective over the world. `info` is what `read_info` will return; `replicas` are the ranks that
    hold the same tensors and share the writing. The directory is written beside `path` and renamed
    when whole: until then an older checkpoint there stays as it was. A failure on any rank is
    raised on every rank, and nothing is left behind.
    """
    what = f"saving {path}"
    staging = _from_zero(_together(what, lambda: _stage(Path(path))))
    try:
        sharded, common = _together(
            what, lambda: save_preprocess(state, validate_access_integrity=False)
        )
        mine = _together(what, lambda: _share_out(sharded, common, staging, replicas))
        with _failures_named(what):  # torch's part: a rank that fails makes all of them raise
            dcp.save(
                mine,
                storage_writer=dcp.FileSystemWriter(staging, thread_count=1),
                planner=mcore_torch.MCoreSavePlanner(
                    dedup_replicated_tensors=False, flatten_state_dict=False
                ),
            )
        _together(what, lambda: _finish(Path(staging), info, Path(path)))
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _stage(target: Path) -> str | None:
    """Rank 0 makes the staging directory and answers its path."""
    if dist.get_rank() != 0:
        return None
    _check_target(target)
    return str(stage(target))


def _check_target(target: Path) -> None:
    """ValueError if `target` is something a save must not replace."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"cannot save to {target}: a file is there; choose another directory")
    if target.exists() and any(target.iterdir()) and not (target / MARKER).is_file():
        raise ValueError(
            f"cannot save to {target}: it is not empty and holds no checkpoint (no {MARKER}), and "
            "saving would replace it; choose another directory"
        )


def _share_out(
    sharded: Any, common: Any, staging: str, replicas: dist.ProcessGroup
) -> dict[str, Any]:
    """What this rank shall write of the tensors; rank 0 writes what is not sharded (common.pt)."""
    sharing = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), replicas)
    sharing.apply_saving_parallelization(sharded)  # checks too that all is saved exactly once
    get_default_save_common_strategy().save_common(common, staging)
    mine, _, _ = mcore_torch._replace_state_dict_keys_with_sharded_keys(
        sharded, keep_only_main_replica=True
    )
    return dict(mcore_torch.mcore_to_pyt_state_dict(mine))


def _finish(staging: Path, info: Mapping[str, Any], target: Path) -> None:
    """Rank 0 completes the directory and puts it in place."""
    if dist.get_rank() != 0:
        return
    complete(staging, info)
    put_in_place(staging, target)


def complete(staging: Path, info: Mapping[str, Any]) -> None:
    """Writes what says that the directory's files are a whole checkpoint, and which."""
    save_config(CheckpointingConfig("torch_dist", 1), str(staging))
    files = {
        f.relative_to(staging).as_posix(): f.stat().st_size
        for f in sorted(staging.rglob("*"))
        if f.is_file() and f.name != MARKER
    }
    marker = {"format": FORMAT, "id": uuid.uuid4().hex, "info": dict(info), "files": files}
    (staging / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def describe_model(model: ModelConfig) -> dict[str, Any]:
    """What `info` says of the model: "model", by which an engine tells whether the checkpoint is
    its own, and "hf_config", from which the model directory can be made again."""
    fields = {k: v for k, v in asdict(model).items() if k not in _NOT_THE_MODEL}
    found: dict[str, Any] = json.loads(json.dumps({"model": fields}))  # lists for tuples
    return found | {"hf_config": dict(model.raw)}


def read_info(path: str | Path) -> dict[str, Any]:
    """The `info` of the whole checkpoint at `path`; ValueError if it is none. Not collective."""
    marker = _read_marker(Path(path))
    for name, size in marker["files"].items():
        file = Path(path) / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise ValueError(
                f"{file} has {found} bytes, {MARKER} says {size}: the checkpoint is damaged or "
                "was copied in part; load another one"
            )
    info: dict[str, Any] = marker["info"]
    return info


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError) as e:
        raise ValueError(
            f"{path} holds no whole checkpoint ({MARKER}: {e}); give the directory of one saved "
            "with weight_format='dist', on storage that every rank sees"
        ) from e
    if marker.get("format") != FORMAT:
        raise ValueError(
            f"{path}: checkpoint format {marker.get('format')!r}, this version reads {FORMAT}; "
            "load it with the version that wrote it"
        )
    return marker


def open_checkpoint(path: str | Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`read_info`, the same on every rank; `check(info)` may refuse it. Collective.

    Every rank looks itself: one without access to the storage would fail later, where the others
    wait for it.
    """
    what, first = f"loading {path}", dist.get_rank() == 0

    def look() -> dict[str, Any]:
        if first:
            read_info(path)  # one rank looks at all the files
        marker = _read_marker(Path(path))
        check(marker["info"])
        return marker

    marker = _together(what, look)
    wanted = _from_zero(marker["id"])

    def compare() -> None:
        if marker["id"] != wanted:
            raise ValueError(f"{path} is another checkpoint on rank 0: give all ranks one storage")

    _together(what, compare)
    info: dict[str, Any] = marker["info"]
    return info


def load_sharded(
    path: str | Path, state: dict[str, Any], *, replicas: dist.ProcessGroup
) -> dict[str, Any]:
    """`state` with its leaves replaced by what `path` holds for them. Collective.

    `open_checkpoint` comes first. Each part is read once per group of `replicas` and exchanged.
    Tensors are filled in place: after a failure (a disk error, say) they hold nothing useful.
    """
    reader = FullyParallelLoadStrategyWrapper(mcore_torch.TorchDistLoadShardedStrategy(), replicas)
    with _failures_named(f"loading {path}"):
        loaded: dict[str, Any] = mcore_ckpt.load(state, str(path), reader)
    return loaded


def _together(what: str, fn: Callable[[], T]) -> T:
    """`fn()` on every rank; if it fails on one, all raise. Collective over the world.

    A rank raises its own error if it has one, else a RuntimeError that names the first rank that
    failed. Collectives inside `fn` come before anything that can fail on one rank alone.
    """
    error: Exception | None = None
    try:
        result = fn()
    except Exception as e:  # whatever it is, the other ranks must hear of it
        error = e
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, f"{type(error).__name__}: {error}" if error else None)
    if error is not None:
        error.add_note(f"({what}, rank {dist.get_rank()})")
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {message}")
    return result


def _from_zero(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


@contextmanager
def _failures_named(what: str) -> Iterator[None]:
    """torch raises a CheckpointException, which is no Exception, on every rank: say whose it is."""
    try:
        yield
    except CheckpointException as e:
        rank, (cause, _) = min(e.failures.items())
        text = f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}"
        raise RuntimeError(text) from e
