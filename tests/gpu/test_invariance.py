"""The rows of the invariance table that one process can run, on a GPU over NCCL, and bfloat16."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.dist import test_bf16 as bf16
from tests.dist.invariance import AXES, Case, check, reference, save, train
from tests.pairwise import all_pairs

ATTENTION = ["sdpa"] + (["te"] if importlib.util.find_spec("transformer_engine") else [])
SLACK = 10.0  # GPU kernels sum in larger blocks and other orders than the CPU's
CASES = [Case(**row) for row in all_pairs({n: v for n, v in AXES.items() if n != "layout"})]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_equals_hugging_face(case: Case, attention: str, tmp_path: Path) -> None:
    b, want = reference(case.family, case.tie, case.loss)
    got = train(
        save(tmp_path, case), {}, case.loss, b, dtype="float32", attention=attention,
        **case.settings(),
    )  # fmt: skip
    check([got], want, slack=SLACK)


# grouped heads, windows of attention, experts: fp32 rows never run flash, which bf16 trains with
@pytest.mark.parametrize("kind", ("qwen3", "gemma3_text", "qwen3_moe"))
@pytest.mark.parametrize("attention", ATTENTION)
def test_bf16_is_as_close_to_fp32_as_hugging_face(
    kind: str, attention: str, tmp_path: Path
) -> None:
    models = bf16.save_models(tmp_path, kind)
    bf16.check(kind, bf16.engine_figures(models, {}, attention=attention))
