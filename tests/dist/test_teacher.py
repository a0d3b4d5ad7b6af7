"""A teacher whose embedding has more rows than the student's, or that has a prompt of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

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


def read_in_context(path: str, parallel: dict[str, Any], contexts: Any, over: Any) -> Any:
    """Returns the batch below contexts, whole, as a teacher has taught it, and with None what it
    says where the contexts are the prompts themselves: with them, and without."""
    from megarl.algos.distillation import Distillation
    from megarl.algos.roles import Teacher
    from megarl.api.batch import Batch
    from megarl.api.context import add_contexts, prompt_lengths
    from megarl.config.engine import TrainEngineConfig

    frozen = make_engine(path, parallel, trained=False, lm_head_topk=5, **over)
    teacher = Teacher(TrainEngineConfig(), frozen, temperature=1.5)

    def taught(own: Any) -> Any:
        b = batch()
        b["logprobs"] = torch.zeros(b["input_ids"].shape)
        first = b["loss_mask"].bool().int().argmax(1)[:, None]
        b["versions"] = torch.where(torch.arange(b["input_ids"].shape[1]) < first, -1, 0).int()
        prompts = prompt_lengths(b)
        if own is not None:
            given = own or [r[:n].tolist() for r, n in zip(b["input_ids"], prompts, strict=True)]
            (b,) = add_contexts([b], [prompts], [given])
        rows = b if torch.distributed.get_rank() == 0 else None  # as a driver hands it out
        made = Batch.from_local(rows)
        assert not teacher.teach(made).any()
        return made, prompts

    made, prompts = taught(contexts)
    out = made.fetch(range(len(made))) | {"prompts": prompts}
    same = [taught([])[0], taught(None)[0]]
    frozen.destroy()
    engine = make_engine(path, parallel, optimizer={"lr": 1e-9, "weight_decay": 0.0}, **over)
    outputs = ("logprobs", "given_tail", "given_logprobs")
    losses = [
        engine.eval_batch(b, Distillation(kind="jsd"), weight_fn, outputs=outputs) for b in same
    ]
    engine.destroy()
    return out, losses


LAYOUTS = {
    "sp2": dict(tp=2, sequence_parallel=True),
    "pp2": dict(pp=2),
    "cp2": dict(cp=2),
    "dp2-tries": dict(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_it_says_below_contexts_is_what_transformers_says(world2, models, name):
    """In every layout, with shared prefixes too; the student's own prompts give its loss today."""
    path = save_model(models, "qwen3", False)
    g = torch.Generator().manual_seed(2)
    sizes = [1, 30, 4, 12, 2, 7, 5]
    contexts = [torch.randint(VOCAB, (n,), generator=g).tolist() for n in sizes]
    contexts[3][:10] = contexts[1][:10]  # a prefix in common
    over = {"share_prefixes": True, "max_tokens": 120} if name == "dp2-tries" else {}
    (said, losses), _ = world2.run(read_in_context, path, LAYOUTS[name], contexts, over)
    assert losses[0] == losses[1]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    lengths = said["attention_mask"].sum(1).tolist()
    for row, (context, prompt, n) in enumerate(zip(contexts, said["prompts"], lengths)):
        answer = said["input_ids"][row, prompt:n]
        ids = torch.cat([torch.tensor(context), answer])
        with torch.no_grad():
            logp = (model(ids[None]).logits[0] / 1.5).log_softmax(-1)
        logp = logp[len(context) - 1 : -1]  # of the answer's tokens
        here = slice(prompt, n)
        own = logp.gather(-1, answer[:, None])[:, 0]
        # as close as the engine's logprobs are to transformers' in tests/dist/test_models.py
        torch.testing.assert_close(said["teacher_logp"][row, here], own, rtol=0, atol=1e-4)
        top = logp.topk(5).values
        torch.testing.assert_close(said["teacher_logprobs"][row, here], top, rtol=0, atol=1e-4)
        named = logp.gather(-1, said["given_ids"][row, here].long())
        torch.testing.assert_close(named, top, rtol=0, atol=1e-4)
        tail = torch.log1p(-top.exp().sum(-1))
        torch.testing.assert_close(said["teacher_tail"][row, here], tail, rtol=0, atol=1e-4)
