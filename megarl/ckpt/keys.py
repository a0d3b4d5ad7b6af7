"""Gives training checkpoints one set of keys, whichever layers the model is built of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.ckpt.restricted import read_metadata
from megarl.models.names import checkpoint_key, checkpoint_keys
from megarl.models.piece_table import PieceTable
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.agreement import from_zero, together

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip


def settle_keys(state: Mapping[str, Any], table: PieceTable, stored: Collection[str] = ()) -> None:
    """Renames the norms in a model's sharded `state`. megatron-core names them after its modules,
    and which module a norm belongs to differs between the local layers and Transformer Engine's.

    `stored`: the keys of the checkpoint that is to be read, which may have any of the names.
    """
    names = {p.name for p in table.params}
    spellings: dict[str, tuple[str, ...]] = {}
    for name in names:
        keys, _ = checkpoint_keys(name)
        if len(keys) > 1:
            spellings |= dict.fromkeys(keys, (checkpoint_key(name, names), *keys))
    for tensor in nested_values(state):
        if isinstance(tensor, ShardedTensor) and tensor.key in spellings:
            options = spellings[tensor.key]
            tensor.key = next((k for k in options if k in stored), options[0])


def stored_keys(path: str | Path) -> frozenset[str]:
    """Returns the keys of the weights in the checkpoint at `path`, on every rank. Collective."""

    def look() -> frozenset[str]:
        if dist.get_rank() != 0:
            return frozenset()
        keys = read_metadata(Path(path)).state_dict_metadata
        return frozenset(k for k in keys if not k.startswith("optimizer."))

    found: frozenset[str] = from_zero(together(f"loading {path}", look))
    return found
