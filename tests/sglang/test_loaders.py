"""Families that stock SGLang builds on a CPU, whether or not it can generate there: what its own
loader does with what trainers send, and what it then answers.

Two tensor-parallel ranks of its class, each in a process of its own, without a server. They answer
by plain_kernels.py, but for those of wholes and gpt-oss, whose sinks no backend here has.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.engine import ParallelConfig
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.transfer.geometry import Sources
from megarl.transfer.plan import Receiver, plan_transfer
from megarl.weight_sync.link import RankTable, spec_of
from megarl.weight_sync.plan import plan_sync
from megarl.weight_sync.receiver import RECEIVER
from megarl.weight_sync.slices import SliceSync
from tests.sglang.servers import ENV, PYTHON, hf_logprobs, save_model
from tests.tiny import nest
from tests.unit.slice_moves import assert_delivered, dtypes

RANKS = 2
HERE = Path(__file__).parent
# what published config.json have and transformers leaves out on saving
_INTERVAL = {"full_attention_interval": 2}
_DEEPSEEK = {
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip
_MINIMAX = {
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 12,
}  # fmt: skip
_QWEN_TOWER = dict(
    depth=1, hidden_size=32, num_heads=2, intermediate_size=16, out_hidden_size=64,
    num_position_embeddings=16, deepstack_visual_indexes=[],
)  # fmt: skip
_KIMI_TOWER = dict(
    hidden_size=64, vt_hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=32, init_pos_emb_height=4, init_pos_emb_width=4, text_hidden_size=64,
)  # fmt: skip
EP, PP, TP = dict(tp=2, ep=2), dict(pp=2), dict(tp=2)
# our name, keys of config.json, layout; in a whole: its architecture, model_type, vision tower
FAMILIES: dict[str, tuple[Any, ...]] = {
    "gpt_oss": ({}, EP),
    "minimax_m2": (_MINIMAX, EP),
    "qwen3_next": (_INTERVAL, EP),
    "qwen3_5_text": (_INTERVAL, PP, "Qwen3_5ForConditionalGeneration", "qwen3_5", _QWEN_TOWER),
    "qwen3_5_moe_text": (
        _INTERVAL, EP, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _QWEN_TOWER,
    ),
    "glm4_moe_lite": ({}, TP),
    "kimi_k2": (_DEEPSEEK, EP, "KimiK25ForConditionalGeneration", "kimi_k25", _KIMI_TOWER),
}  # fmt: skip
OVER: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(mlp_only_layers=[]),
    # SGLang takes rms_norm_eps for the norms of latents, too, transformers 1e-6
    "glm4_moe_lite": dict(rms_norm_eps=1e-6),
}
PROMPT = [2, 40, 50, 60, 7, 120]


def publish(path: Path, keys: dict[str, Any], *whole: Any) -> Path:
    """Writes config.json as it is published."""
    config = json.loads((path / "config.json").read_text()) | keys
    (path / "config.json").write_text(json.dumps(config))
    if whole:
        architecture, kind, tower = whole
        nest(path, architecture)
        config = json.loads((path / "config.json").read_text())
        config["text_config"] |= keys
        config |= {"model_type": kind, "vision_config": tower}
        (path / "config.json").write_text(json.dumps(config))
        tensors = load_file(path / "model.safetensors")
        for name in ("ids", "mask", "scale"):  # Kimi's loader refuses what its tower has not
            del tensors[f"vision_tower.{name}"]
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def table_of(model: Path, parallel: dict[str, int]) -> PieceTable:
    layout = Layout.from_config(ParallelConfig(**parallel), RANKS)
    return build_piece_table(read_hf_config(model), layout)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are and what SGLang says, of all of them: it is imported once."""
    root, jobs = tmp_path_factory.mktemp("loaders"), []
    for kind, (keys, parallel, *whole) in FAMILIES.items():
        models = [save_model(root / f"{kind}{i}", kind, i, **OVER.get(kind, {})) for i in (0, 1)]
        for model in models:
            publish(model, keys, *whole)
        table = table_of(models[0], parallel)
        spec = spec_of(table, lambda _: torch.float32)
        plan = plan_sync(table, torch.float32, 60_000)
        buckets = [[m.name for m in b.members] for b in plan.buckets]
        backend = "intel_amx" if kind == "gpt_oss" else "torch_native"
        prompt = [] if whole or kind == "gpt_oss" else PROMPT
        jobs.append((kind, *map(str, models), spec, buckets, backend, prompt))
    (root / "jobs").write_text(json.dumps(jobs))
    own = {
        "PYTHONPATH": str(RECEIVER),
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",  # states of convolutions are bf16 by default
    }
    command = [str(PYTHON), str(HERE / "loaders.py"), str(root / "jobs"), str(root)]
    subprocess.run(command, env=os.environ | ENV | own, check=True, timeout=500)
    return root


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_trainers_send_is_what_a_load_makes_of_it(answers: Path, kind: str) -> None:
    """By slices as its loader was recorded, and by buckets of whole tensors. With these it answers
    as transformers does, from a prefill on: fp32 rounds differently, by less than 2e-5."""
    for rank in range(RANKS):
        assert (answers / f"{kind}-{rank}").exists(), (answers / f"{kind}-{rank}.log").read_text()
    said = [torch.load(answers / f"{kind}-{rank}") for rank in range(RANKS)]
    _, parallel, *whole = FAMILIES[kind]
    table = table_of(answers / f"{kind}0", parallel)
    tensors = load_file(answers / f"{kind}1" / "model.safetensors")
    targets = []
    for its in said:
        assert its["recorded"] == its["kept"] == its["bucketed"] == []
        held = RankTable.of(its["table"], SliceSync.refused, nested=bool(whole))
        assert not held.refusal
        for e in held.entries.entries:
            box = tensors[e.tensor][tuple(map(slice, e.start, e.stop))]
            for v in e.views:
                there = its["loaded"][e.param].as_strided(v.shape, v.strides, v.offset)
                # SGLang keeps gpt-oss's sinks in bf16
                assert torch.equal(there, box.reshape(v.shape).to(there.dtype)), e
        targets.append(held.entries)
    receivers = {Receiver(0, rank): target for rank, target in enumerate(targets)}
    if answer := said[0]["answer"]:
        tokens, logprobs = zip(*answer, strict=True)
        theirs = hf_logprobs(answers / f"{kind}1", PROMPT, list(tokens))
        torch.testing.assert_close(torch.tensor(logprobs), theirs, atol=2e-5, rtol=0)
    plan = plan_transfer(Sources(table), receivers, dtypes=dtypes(table), round_bytes=50_000)
    assert_delivered(plan, [targets])
