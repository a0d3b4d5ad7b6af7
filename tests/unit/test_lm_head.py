"""Chunked vocabulary projection against the dense formulas."""

import pytest
import torch
import torch.nn.functional as F

from megarl.parallel.vocab_parallel import VocabShard, gathered_logits, token_outputs

T, H, V, ROWS = 11, 6, 13, 16  # the last three rows are padding
OUTPUTS = ("logprobs", "entropy", "greedy_match")
SHARD = VocabShard(start=0, rows=ROWS, vocab_size=V)


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(ROWS, H, generator=g, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, V, (T,), generator=g)
    return hidden, weight, labels


def dense(hidden, weight, labels, temperature):
    logp = F.log_softmax(hidden @ weight[:V].T / temperature, -1)
    return torch.stack(
        [
            logp.gather(-1, labels[:, None])[:, 0],
            -(logp.exp() * logp).sum(-1),
            (logp.argmax(-1) == labels).to(logp.dtype),
        ],
        -1,
    )


@pytest.mark.parametrize("chunk", [1, 4, T, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_dense_formula(chunk, temperature):
    hidden, weight, labels = inputs()
    with torch.no_grad():  # a match must exist to be found
        labels[3] = (hidden[3] @ weight[:V].T).argmax()
    got = token_outputs(
        hidden, weight, labels, shard=SHARD, outputs=OUTPUTS, temperature=temperature,
        chunk_tokens=chunk,
    )  # fmt: skip
    want = dense(hidden, weight, labels, temperature)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert got[3, 2] == 1.0

    mix = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    grads = torch.autograd.grad((got * mix).sum(), (hidden, weight))
    expected = torch.autograd.grad((want * mix).sum(), (hidden, weight))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert grads[1][V:].abs().max() == 0  # padded rows learn nothing


@pytest.mark.parametrize("outputs", [("logprobs",), ("entropy",), ("entropy", "logprobs")])
def test_gradcheck(outputs):
    hidden, weight, labels = inputs()

    def f(h, w):
        return token_outputs(
            h, w, labels, shard=SHARD, outputs=outputs, temperature=1.3, chunk_tokens=4
        )

    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_frozen_weight_gets_no_gradient():
    hidden, weight, labels = inputs()
    out = token_outputs(hidden, weight.detach(), labels, shard=SHARD)
    out.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_ties_go_to_the_lowest_id_like_argmax():
    hidden = torch.ones(2, 1)
    weight = torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    shard = VocabShard(start=0, rows=4, vocab_size=4)
    got = token_outputs(
        hidden, weight, torch.tensor([1, 2]), shard=shard, outputs=("greedy_match",)
    )
    assert got[:, 0].tolist() == [1.0, 0.0]


def test_bfloat16_weights_are_accumulated_in_float32():
    """Many chunks of equal gradient: a bf16 accumulator would stop growing at 256 additions."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    shard = VocabShard(start=0, rows=2, vocab_size=2)
    labels = torch.zeros(1024, dtype=torch.long)
    out = token_outputs(hidden, weight, labels, shard=shard, chunk_tokens=1)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [512.0, -512.0]


def test_logits_are_those_of_the_real_vocabulary():
    hidden, weight, _ = inputs()
    got = gathered_logits(hidden, weight, shard=SHARD, temperature=2.0)
    torch.testing.assert_close(got, hidden @ weight[:V].T / 2)
