"""Chooses how keys and values travel between context-parallel ranks."""

from __future__ import annotations

from megarl.config.engine import ParallelConfig
from megarl.models.hf_config import ModelConfig
from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.utils import get_te_version, is_te_min_version  # isort: skip

# the first Transformer Engine that takes packed sequences by each way
_PACKED_SINCE = {"p2p": "1.7", "all_gather": "2.18", "a2a": "2.18"}


def cp_comm_type(asked: str, model: ModelConfig, parallel: ParallelConfig, attention: str) -> str:
    """Returns options.cp_comm_type, `asked`, with "auto" resolved, for `attention` "te" or "sdpa".

    Raises ValueError, naming value and fix, where the attention, the model or the installed
    Transformer Engine cannot do it.
    """
    slides = model.attention.window is not None and parallel.cp > 1
    if asked == "auto":
        if attention == "te" and not slides:
            return "p2p"
        asked = "all_gather"
    if attention == "te":
        _check_te(model, asked, parallel, slides)
    elif asked != "all_gather":
        raise ValueError(
            f"options.cp_comm_type={asked!r} needs Transformer Engine's attention; use 'auto'"
        )
    return asked


def _check_te(model: ModelConfig, asked: str, parallel: ParallelConfig, slides: bool) -> None:
    """Raises ValueError where the installed Transformer Engine cannot do this for the model.
    slides: it has a sliding window, and cp > 1."""
    if asked == "p2p" and slides:
        raise ValueError(
            f"options.cp_comm_type='p2p': Transformer Engine takes a sliding window (of "
            f"{model.attention.window} tokens in {model.family}) by 'all_gather' and 'a2a' only; "
            "use 'auto'"
        )
    if model.head_dim != model.v_head_dim and asked != "p2p":
        raise ValueError(
            f"options.cp_comm_type={asked!r}: Transformer Engine takes keys and values of unlike "
            f"sizes ({model.family}'s) by 'p2p' only; use 'p2p'"
        )
    if not is_te_min_version(_PACKED_SINCE[asked]):
        raise ValueError(
            f"options.cp_comm_type={asked!r} takes packed sequences from Transformer Engine "
            f"{_PACKED_SINCE[asked]} on, and {get_te_version()} is installed; use "
            + ("parallel.cp=1" if slides else "'p2p'")
        )
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    tp, cp = parallel.tp, parallel.cp
    if asked == "a2a" and (heads % (tp * cp) or kv % (tp * cp)):
        raise ValueError(
            f"options.cp_comm_type='a2a' shares heads out: tp*cp = {tp}*{cp} must divide "
            f"num_attention_heads={heads} and num_key_value_heads={kv}; use 'p2p'"
        )
