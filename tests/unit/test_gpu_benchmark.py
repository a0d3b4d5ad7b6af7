"""The sizes of `make bench-gpu`: what it trains fits the GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.mark.parametrize("memory, recompute", [(80, "none"), (80, "full"), (40, "full")])
@pytest.mark.parametrize("shape", ["0.5b", "7b"])
def test_state_activations_and_logits_fit_the_gpu(
    shape: str, memory: int, recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as when it runs as a file
    import gpu_train

    tokens = 16384 if memory == 80 else 2048
    work = gpu_train.Work(tokens=131072, longest=4096, budget=tokens, chunk=2048)
    layers = gpu_train.write_config(shape, tmp_path, work, memory=memory * GIB, recompute=recompute)
    config = json.loads((tmp_path / "config.json").read_text())
    h, ffn, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = h * config["num_key_value_heads"] // config["num_attention_heads"]
    state = 18 * (layers * (2 * h * (h + kv) + 3 * h * ffn) + vocab * h)
    kept = 2 * tokens * (h if recompute == "full" else 9 * h + 3 * ffn)
    logits = 4 * tokens * vocab
    assert state + layers * kept + logits < 0.9 * memory * GIB
    assert layers == config["num_hidden_layers"]
    assert layers == 24 if shape == "0.5b" else 3 <= layers < 28
    with pytest.raises(SystemExit, match="use a smaller --budget"):
        gpu_train.write_config(shape, tmp_path, work, memory=1 * GIB)
    sys.modules.pop("gpu_train")
    sys.modules.pop("train_batch", None)
