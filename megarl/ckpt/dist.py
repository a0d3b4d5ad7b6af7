"""Training checkpoints on disk: sharded state to a directory and back, on any layout.

The directory is a megatron-core "torch_dist" checkpoint (torch.distributed.checkpoint files,
common.pt, metadata.json) plus megarl.json, written last, which says what is inside and which files
belong to it. What the state means is the caller's business.

Saving stays in this process. megatron-core's writers of its asynchronous saves are processes: one
is forked for each save, from a process with threads and a CUDA context, beside a "spawn" manager
that deadlocks scripts without a `__main__` guard; the persistent one is spawned, with the same
demand on scripts. Here a thread writes a copy in host memory: most of the writing is without the
interpreter's lock, an error reaches the ranks with its cause, and nothing outlives the process.
torch's own dcp.async_save cannot copy megatron-core's wrappers of tensors.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from megarl.ckpt.background import PendingSave, to_host, writers_group
from megarl.ckpt.files import (
    MARKER,
    Writer,
    check_contents,
    failures_named,
    read_info,
    read_marker,
    staged,
    write_marker,
)
from megarl.ckpt.restricted import check_common, restricted_reading
from megarl.models.hf_config import ModelConfig
from megarl.models.params import checkpoint_key, checkpoint_keys
from megarl.models.piece_table import PieceTable
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.ranks import Ranks, on_rank_zero, together
from megarl.parallel.worlds import PerWorld
from megarl.utils.files import check_room, full_disk_named, put_in_place

from megatron.core import dist_checkpointing as mcore_ckpt
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as mcore_torch
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

# megatron-core calls torch's older name
warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", module="megatron")


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """Holds the state that a checkpoint is made of.

    shared: nested dicts whose leaves are ShardedTensor, ShardedObject or plain objects of rank 0.
            `replicas` are the ranks that hold the same tensors and share writing and reading.
    own:    nested dicts and lists of ShardedTensors that belong to this rank alone, such as its
            part of the optimizer state. Nobody else writes or reads them.
    """

    shared: dict[str, Any]
    own: dict[Any, Any]
    replicas: dist.ProcessGroup


def save_sharded(path: str | Path, state: Sharded, info: Mapping[str, Any]) -> None:
    """Writes `state` to `path`; `info` is what `read_info` will return. Collective over the world.

    The directory is written beside `path` and renamed when whole: until then an older checkpoint
    there stays as it was. A failure on any rank is raised on every rank, and nothing is left
    behind.
    """
    with staged(Path(path), "checkpoint", MARKER) as staging:
        mine = _share_out(path, state, staging)
        checksums = _write(path, staging, mine)
        together(f"saving {path}", lambda: _finish(staging, info, checksums, Path(path)))


def begin_save(
    path: str | Path, state: Sharded, info: Mapping[str, Any]
) -> PendingSave[dict[str, str]]:
    """Saves as `save_sharded`, but in a thread. Collective; returns when `state` is copied to host
    memory, where the copy stays until the files are written. Nothing is at `path` before
    `PendingSave.finish`."""
    with staged(Path(path), "checkpoint", MARKER) as staging:
        mine = _share_out(path, state, staging, copy=True)
        group = writers_group()
    return PendingSave(
        f"saving {path}",
        staging,
        lambda: _write(path, staging, mine, group),
        lambda checksums: _finish(staging, info, checksums, Path(path)),
    )


def save_common(common: Any, staging: Path) -> None:
    """Writes what is not sharded, on rank 0, where megatron-core's loaders of all versions look for
    it: 0.19 writes it among the tensors, and reads this first."""
    if dist.get_rank() == 0:
        torch.save(common, staging / "common.pt")


@dataclass(frozen=True)
class _Share:
    """Holds what a rank shall write, by torch's names; `nbytes` is that of all ranks together."""

    state: dict[str, Any]
    nbytes: int


def _share_out(path: str | Path, state: Sharded, staging: Path, *, copy: bool = False) -> _Share:
    """Returns the tensors that this rank is to write, as copies in host memory if `copy`. Rank 0
    writes what is not sharded (common.pt) and checks that the disk has room for everything."""
    what = f"saving {path}"
    shared, common = together(
        what, lambda: save_preprocess(state.shared, validate_access_integrity=False)
    )

    def plan() -> tuple[dict[str, Any], int]:
        sharing = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), state.replicas
        )
        sharing.apply_saving_parallelization(shared)  # checks too that all is saved exactly once
        with full_disk_named(what, staging):
            save_common(common, staging)
        mine, _, _ = mcore_torch._replace_state_dict_keys_with_sharded_keys(
            {"shared": shared, "own": state.own}, keep_only_main_replica=True
        )
        tensors = [t for parts in mine.values() for t in parts if isinstance(t, ShardedTensor)]
        nbytes = sum(t.data.nbytes for t in tensors)
        if copy:
            for tensor, host in zip(tensors, to_host(t.data for t in tensors), strict=True):
                tensor.data = host
        return dict(mcore_torch.mcore_to_pyt_state_dict(mine)), nbytes

    mine, nbytes = together(what, plan)
    needed = sum(Ranks.of().gather(nbytes))
    on_rank_zero(check_room, what, staging, needed)
    return _Share(mine, needed)


def _write(
    path: str | Path, staging: Path, mine: _Share, group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """Writes this rank's files, synced to disk, and on rank 0 the list of all. Returns the
    checksums of all ranks' files. Collective over `group`: the writing threads' where the tensors
    are in host memory.

    If one rank fails, torch raises on all of them.
    """
    # a writer that looks ahead on the device's stream would wait there for the training's kernels,
    # and in a thread the current device is the first one
    ahead = 0 if group is not None else 10_000_000  # bytes; 10 MB is torch's default
    writer = Writer(staging, copy_ahead=ahead)
    what = f"saving {path}"
    with full_disk_named(what, staging, mine.nbytes), failures_named(what):
        dcp.save(
            mine.state,
            storage_writer=writer,
            planner=mcore_torch.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
            process_group=group,
        )
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, writer.checksums, group=group)
    return {name: digest for checksums in found for name, digest in checksums.items()}


def _finish(
    staging: Path, info: Mapping[str, Any], checksums: Mapping[str, str], target: Path
) -> None:
    """Completes the directory and puts it in place, on rank 0."""
    if dist.get_rank() != 0:
        return
    with full_disk_named(f"saving {target}", staging):
        complete(staging, info, checksums)
        put_in_place(staging, target)


def complete(
    staging: Path, info: Mapping[str, Any], checksums: Mapping[str, str] | None = None
) -> None:
    """Writes the metadata that makes the directory's files a whole checkpoint. `checksums`: those
    that are known already, by the file's name."""
    save_config(CheckpointingConfig("torch_dist", 1), str(staging))
    write_marker(staging, info, checksums)


def settle_keys(state: Mapping[str, Any], table: PieceTable) -> None:
    """Renames the norms in a model's sharded `state`. megatron-core names them after its modules,
    and which module a norm belongs to differs between the local layers and Transformer Engine's."""
    names = {p.name for p in table.params}
    settled: dict[str, str] = {}
    for name in names:
        settled |= dict.fromkeys(checkpoint_keys(name)[0], checkpoint_key(name, names))
    for tensor in nested_values(state):
        if isinstance(tensor, ShardedTensor):
            tensor.key = settled.get(tensor.key, tensor.key)


def describe_model(model: ModelConfig) -> dict[str, Any]:
    """Returns the model's part of `info`: "model", by which an engine tells whether the checkpoint
    is its own, and "hf_config", from which the model directory can be made again."""
    meaning = json.loads(json.dumps(model.meaning()))  # lists for tuples
    return {"model": meaning, "hf_config": dict(model.raw)}


def open_checkpoint(path: str | Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns `read_info(path)` on every rank. Collective. Raises what `check(info)` raises, and
    ValueError for a file whose content is damaged.

    Every rank reads the marker itself: one without access to the storage would fail later, where
    the others wait for it. The files to check are divided over the ranks.
    """
    what, first = f"loading {path}", dist.get_rank() == 0

    def look() -> dict[str, Any]:
        if first:
            read_info(path)  # one rank looks at all the files
        marker = read_marker(Path(path))
        check(marker["info"])
        return marker

    marker = together(what, look)
    if len(set(Ranks.of().gather(marker["id"]))) > 1:
        raise ValueError(f"{path} is another checkpoint on some ranks: give all ranks one storage")
    sound = _sound.get()
    if marker["id"] not in sound and (damage := find_damage(path)):
        raise ValueError(damage)
    sound.discard(marker["id"])
    info: dict[str, Any] = marker["info"]
    return info


# ids of checkpoints that `find_damage` found sound and that are not opened yet; alike on every rank
# of a world
_sound = PerWorld(set[str])


def find_damage(path: str | Path) -> str | None:
    """Returns what is wrong with the content of the files at `path`, the same on every rank; None
    if nothing is. Collective: every rank reads its share of the files. `open_checkpoint` does not
    read them again."""
    path = Path(path)

    def look() -> str | None:
        try:
            check_contents(path, dist.get_rank(), dist.get_world_size())
        except ValueError as e:
            return str(e)
        return None

    of_rank = Ranks.of().gather(together(f"loading {path}", look))
    if damages := [damage for damage in of_rank if damage]:
        return damages[0]
    _sound.get().add(read_marker(path)["id"])
    return None


def load_sharded(path: str | Path, state: Sharded) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Returns `state.shared` and `state.own`, their leaves replaced by what `path` holds for them.
    Collective. Call `open_checkpoint` first.

    Each shared part is read once per group of `replicas` and
    exchanged. Tensors are filled in place: after a failure (a disk error, say) they hold nothing
    useful.
    """
    together(f"loading {path}", lambda: check_common(Path(path)))
    plain = mcore_torch.TorchDistLoadShardedStrategy()
    with restricted_reading(), failures_named(f"loading {path}"):
        reader = FullyParallelLoadStrategyWrapper(plain, state.replicas)
        shared: dict[str, Any] = mcore_ckpt.load(state.shared, str(path), reader)
        # reading is collective: a rank with nothing of its own takes part if any rank has something
        some = any(Ranks.of().gather(bool(state.own)))
        own: dict[Any, Any] = plain.load(state.own, Path(path)) if some else {}
    return shared, own
