"""Proves a conversion: both models, in fp32, give the same logits for a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ckpt.convert_source import DistSource
from megarl.ckpt.dist import Sharded, load_sharded
from megarl.ckpt.keys import settle_keys
from megarl.models.build import build_model
from megarl.models.hf_config import ModelConfig, transformers_config
from megarl.models.names import unwrap
from megarl.models.piece_table import PieceTable
from megarl.parallel import mcore
from megarl.parallel.groups import ProcessGroups, model_scope
from megarl.parallel.layout import Layout

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # isort: skip

TOLERANCE = 1e-3  # relative to the largest logit; fp32 rounding is 100 times less


def check_logits(hf: str | Path, checkpoint: str | Path, prompt: str | None = None) -> float:
    """Returns the largest difference of the logits, relative to the largest logit.

    prompt: text, or None for 32 random tokens. It makes a process group of its own. Raises
    ValueError if the difference is more than TOLERANCE, or for a value model.
    """
    from transformers import AutoModelForCausalLM

    model = DistSource(Path(checkpoint)).model
    if model.head != "lm":
        raise ValueError(f"{checkpoint} is a value model: it has no logits; compare by verify")
    config = transformers_config(hf)
    reference = AutoModelForCausalLM.from_pretrained(hf, config=config, dtype=torch.float32)
    ids = _prompt_ids(hf, prompt, reference.config.vocab_size)
    with torch.no_grad():
        want = reference.eval()(ids).logits[0].float()
    del reference
    got = _megatron_logits(model, Path(checkpoint), ids)[:, : want.shape[1]]
    worst = float((got - want).abs().max() / want.abs().max())
    if not worst <= TOLERANCE:  # nan fails, too
        raise ValueError(
            f"{hf} and {checkpoint} differ in their logits by {worst:.2g} of the largest; run "
            "verify on them to find the tensor"
        )
    return worst


def _prompt_ids(hf: str | Path, prompt: str | None, vocab: int) -> Tensor:
    """Returns the ids [1, S] of `prompt`, or 32 random ones."""
    if prompt is None:
        return torch.randint(vocab, (1, 32), generator=torch.Generator().manual_seed(0))
    from transformers import AutoTokenizer

    ids: Tensor = AutoTokenizer.from_pretrained(hf)(prompt, return_tensors="pt")["input_ids"]
    return ids


def _megatron_logits(model: ModelConfig, checkpoint: Path, ids: Tensor) -> Tensor:
    """Returns the logits [S, V] after megatron-core's own load, on one rank."""
    dist.init_process_group(mcore.comm_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = ProcessGroups(Layout())
        with model_scope(groups), torch.no_grad():
            model_parallel_cuda_manual_seed(0)
            built = build_model(model, Layout(), dtype=torch.float32)
            chunk = built.chunks[0].eval()
            _load(chunk, built.table, checkpoint, groups)
            device = mcore.device()
            position = torch.arange(ids.shape[1], device=device)[None]
            logits: Tensor = chunk(ids.to(device), position, None)
            found = logits[0].float().cpu()
        groups.release()
        return found
    finally:
        dist.destroy_process_group()


def _load(
    chunk: torch.nn.Module, table: PieceTable, checkpoint: Path, groups: ProcessGroups
) -> None:
    metadata = {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "dp_cp_group": groups.dp_cp,
    }
    states: dict[str, Any] = unwrap(chunk).sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    weights = {k: v for k, v in states.items() if "_extra_state" not in k}
    settle_keys(weights, table)
    state = Sharded(shared={"model": weights}, own={}, replicas=groups.dp_cp)
    loaded, _ = load_sharded(checkpoint, state)
    found = unwrap(chunk).load_state_dict(loaded["model"], strict=False)
    lost = [k for k in found.missing_keys if not k.endswith("_extra_state")]
    assert not lost and not found.unexpected_keys, (lost, found.unexpected_keys)
