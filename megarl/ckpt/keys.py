"""Gives training checkpoints one set of keys, whichever layers the model is built of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.names import checkpoint_key, checkpoint_keys
from megarl.models.piece_table import PieceTable
from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip


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
