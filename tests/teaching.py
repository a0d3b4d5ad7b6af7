"""What servers, as a teacher, say of samples, beside the whole logits of transformers' model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.api.batch import Batch
from megarl.rollout.teacher import ServerTeacher

SAMPLES = [[2, 40, 50, 60], [5], [7, 8, 9, 100, 101, 12], [3, 3, 3]]


def batch_of(samples: Sequence[Sequence[int]]) -> Batch:
    width = max(map(len, samples))
    ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in samples])
    lengths = torch.tensor([len(s) for s in samples])
    return Batch.from_padded(
        {"input_ids": ids, "attention_mask": torch.arange(width) < lengths[:, None]}
    )


def check_teacher(addresses: Sequence[str], model: Any, k: int, close: float = 2e-5) -> None:
    """Servers of `model` name its k likeliest tokens, and what they leave to the others."""
    vocab_size = model.get_output_embeddings().weight.shape[0]
    teacher = ServerTeacher(addresses, top=k, vocab_size=vocab_size, timeout=60.0)
    batch, plain = batch_of(SAMPLES), batch_of(SAMPLES)
    assert not teacher.teach(batch).any() and not teacher.teach(plain, top=False).any()
    assert "given_ids" not in plain
    for row, ids in enumerate(SAMPLES):
        said = batch.padded([row])
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        own = logp.gather(-1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0]
        for found in (said["teacher_logp"], plain.padded([row])["teacher_logp"]):
            torch.testing.assert_close(found[0, 1:], own, rtol=0, atol=close)
        values = logp.topk(k).values
        torch.testing.assert_close(said["teacher_logprobs"][0, 1:], values, rtol=0, atol=close)
        there = logp.gather(-1, said["given_ids"][0, 1:].long())
        torch.testing.assert_close(there, values, rtol=0, atol=close)
        left = 1.0 - values.exp().sum(-1) if k < vocab_size else torch.zeros(len(own))
        torch.testing.assert_close(said["teacher_tail"][0, 1:].exp(), left, rtol=0, atol=close)
        assert (said["given_ids"][0, 0] == -1).all()
