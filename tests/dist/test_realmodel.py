"""Real weights: the engine's logits are those of transformers (`make test-realmodel`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.engine_jobs import Tensors, make_engine
from tests.dist.reference import hf_outputs

pytestmark = pytest.mark.realmodel
ROOT = Path(__file__).parents[2]
QUESTION = "A train leaves at 9:40 and takes 95 minutes. When does it arrive?"
LOGITS = 2e-3  # absolute, of logits of order ten over 30 layers in fp32


@pytest.fixture(scope="module")
def model() -> str:
    sys.path.insert(0, str(ROOT / "examples"))
    from smollm2 import CACHE, fetch

    return str(fetch(CACHE / "SmolLM2-135M-Instruct"))


@pytest.fixture(scope="module")
def wanted(model: str) -> tuple[Tensors, Tensors]:
    """Returns (a batch of prose, code and a chat, transformers' outputs of it)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": QUESTION}]
    texts = [
        (ROOT / "README.md").read_text()[:800],
        Path(__file__).read_text()[:500],
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
    ]
    ids = [torch.tensor(tokenizer(text)["input_ids"][:160]) for text in texts]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
    b = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": mask.bool(),
    }
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return b, hf_outputs(hf, b)


def outputs(path: str, parallel: dict[str, Any], b: Tensors) -> Any:
    engine = make_engine(path, parallel, trained=False, dtype="float32", max_tokens=256)
    found = engine.forward(b, outputs=("logprobs", "logits"), temperature=0.8)
    engine.destroy()
    return found if torch.distributed.get_rank() == 0 else None


@pytest.mark.parametrize("parallel", [{}, dict(tp=3), dict(pp=2)], ids=("tp1", "tp3", "pp2"))
def test_logits_equal_those_of_transformers(parallel, model, wanted, worlds):
    b, want = wanted
    world = worlds(parallel.get("tp", 1) * parallel.get("pp", 1))
    got = world.run(outputs, model, parallel, b)[0]
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=LOGITS, msg=name)
    assert want["logits"].std() > 1
    assert torch.equal(got["logits"].argmax(-1), want["logits"].argmax(-1))
