"""Maps HF models to Megatron's: one declaration per family, the piece table, and the built models.

Reading configs, checking layouts and building piece tables import neither torch nor megatron; names
are loaded on first use so that it stays so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.models.build import BuiltModel, build_model
    from megarl.models.gather import BucketGatherer, plan_buckets
    from megarl.models.hf_config import ModelConfig, check_layout, read_hf_config
    from megarl.models.names import named_params
    from megarl.models.param_loading import init_params, load_params, local_view
    from megarl.models.piece_table import PieceTable, build_piece_table, padded_vocab_size

_HOME = {
    "build": ("BuiltModel", "build_model"),
    "param_loading": ("load_params", "init_params", "local_view"),
    "gather": ("BucketGatherer", "plan_buckets"),
    "hf_config": ("ModelConfig", "check_layout", "read_hf_config"),
    "names": ("named_params",),
    "piece_table": ("PieceTable", "build_piece_table", "padded_vocab_size"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BucketGatherer",
    "BuiltModel",
    "ModelConfig",
    "PieceTable",
    "build_model",
    "build_piece_table",
    "check_layout",
    "load_params",
    "init_params",
    "local_view",
    "named_params",
    "padded_vocab_size",
    "plan_buckets",
    "read_hf_config",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)
