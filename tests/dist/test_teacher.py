"""A teacher whose embedding has more rows than the student's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.algos.distillation import DIVERGENCES
from tests.dist.engine_jobs import batch, make_engine, save_model, weight_fn
from tests.tiny import VOCAB, save_tiny

ROWS = VOCAB + 14


def losses_of(path: str, wider: str, parallel: dict[str, Any], k: int) -> dict[str, Any]:
    """Returns what an update by each divergence says, what the teacher says of every token, and the
    student's logits."""
    from megarl.algos.distillation import Distillation
    from megarl.algos.roles import Teacher
    from megarl.config.engine import TrainEngineConfig

    frozen = make_engine(wider, parallel, trained=False, lm_head_topk=k)
    b = batch()
    b["logprobs"] = torch.zeros(b["input_ids"].shape)
    Teacher(TrainEngineConfig(), frozen, temperature=1.0).teach(b)
    teacher = frozen.forward(b, outputs=("logits",))
    frozen.destroy()
    engine = make_engine(path, parallel, optimizer={"lr": 1e-9, "weight_decay": 0.0})
    student = engine.forward(b, outputs=("logits",))
    outputs = ("logprobs", "given_tail", "given_logprobs")
    found = {}
    for kind in DIVERGENCES:
        loss = Distillation(kind=kind, beta=0.3)
        stats = engine.train_batch(b, loss, weight_fn, outputs=outputs)
        found[kind] = stats["loss"], stats["grad_norm"], stats["update_successful"]
    engine.destroy()
    return dict(found=found, ids=b["given_ids"], teacher=teacher, student=student)


@pytest.mark.parametrize(
    "parallel", [dict(tp=2, sequence_parallel=True), dict(pp=2), dict()], ids=["sp2", "pp2", "dp2"]
)
@pytest.mark.parametrize("k", [8, ROWS])
def test_its_tokens_that_the_student_lacks_count_to_the_tail(world2, models, parallel, k):
    from megarl.algos.distillation import divergence

    path = save_model(models, "qwen3", False)
    wider = models / "wider"
    if not wider.exists():
        save_tiny(wider, "qwen3", tie=False, vocab_size=ROWS, seed=1)
    got, _ = world2.run(losses_of, path, str(wider), parallel, k)
    b = batch()
    mask = b["loss_mask"].bool() & b["attention_mask"].bool()
    assert (got["ids"][mask] >= VOCAB).any()
    want = dict.fromkeys(DIVERGENCES, 0.0)
    for row, t in mask.nonzero().tolist():
        p = got["student"][row, t].double().softmax(-1)
        q = got["teacher"][row, t].double().softmax(-1)
        named = [i for i in got["ids"][row, t].tolist() if i < VOCAB]
        if len(named) < VOCAB:
            p, q = (torch.cat([x[named], 1 - x[named].sum()[None]]) for x in (p, q))
        else:
            q = q[:VOCAB] / q[:VOCAB].sum()
        for kind in DIVERGENCES:
            want[kind] += float(divergence(p.log(), q.log(), kind, 0.3))
    for kind, (loss, norm, updated) in got["found"].items():
        assert loss == pytest.approx(want[kind] / weight_fn(b), rel=1e-3), kind
        assert 0 < norm < 1e6 and updated
