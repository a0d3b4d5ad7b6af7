"""The embedded server beside transformers' models with a vision tower, as they are published."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.server.args import ServerArgs
from megarl.server.runner import ModelRunner
from megarl.server.weights import WeightStore
from tests.tiny import tiny_hf
from tests.unit.test_server_runner import make_sequence, prompts, reference, teacher_forced

_QWEN = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, patch_size=4,
    num_position_embeddings=16,
)  # fmt: skip
_SIGLIP = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16,
    patch_size=4,
)  # fmt: skip
# the published Gemma 3 has tied embeddings
WHOLES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "Qwen3_5": ("qwen3_5_text", False, dict(vision_config=_QWEN)),
    "Qwen3_5Moe": ("qwen3_5_moe_text", False, dict(vision_config=_QWEN)),
    "Gemma3": ("gemma3_text", True, dict(vision_config=_SIGLIP, mm_tokens_per_image=4)),
}


@pytest.mark.parametrize("name", WHOLES)
def test_the_language_model_of_a_whole_is_served_and_loaded(tmp_path, name):
    kind, tie, fields = WHOLES[name]
    text = tiny_hf(kind, tie=tie)
    config = getattr(transformers, f"{name}Config")(
        text_config=text.config.to_dict(), tie_word_embeddings=tie, **fields
    )
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    runner = ModelRunner(ServerArgs(model_path=str(tmp_path), dtype="float32", device="cpu"))
    given = prompts([5, 1, 20, 17])
    seqs = [make_sequence(p) for p in given]
    for logits, prompt in zip(teacher_forced(runner, seqs, steps=3), given, strict=True):
        torch.testing.assert_close(logits, reference(whole, prompt, 3), atol=1e-4, rtol=1e-4)
    store = WeightStore(runner.model, runner.wrapper)
    sent = {t.name for t in build_piece_table(read_hf_config(tmp_path), Layout()).tensors}
    assert store.tensors.keys() == sent
    sums = store.checksums()
    for tensor in store.tensors.values():
        tensor.zero_()
    store.load_directory(str(tmp_path))
    assert store.checksums() == sums
