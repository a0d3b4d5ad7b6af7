"""Chunked vocabulary projection against the dense formulas."""

import pytest
import torch
import torch.nn.functional as F

from megarl.parallel import cpu_kernels as products
from megarl.parallel.vocab_parallel import VocabShard, columns, gathered_logits, token_outputs

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


def top(hidden, weight, labels, k, outputs=("topk_ids", "entropy", "topk_logprobs"), **kw):
    shard = kw.pop("shard", SHARD)
    out = token_outputs(hidden, weight, labels, shard=shard, outputs=outputs, topk=k, **kw)
    at = columns(outputs, k)
    return out[:, at["topk_logprobs"]], out[:, at["topk_ids"]].long(), out[:, at["entropy"]]


@pytest.mark.parametrize("k", [1, 4, V])
@pytest.mark.parametrize("chunk", [3, 100])
def test_top_k_equals_sorting_the_dense_formula(k, chunk):
    hidden, weight, labels = inputs(torch.float32)
    logprobs, ids, entropy = top(hidden, weight, labels, k, temperature=0.7, chunk_tokens=chunk)
    logp = F.log_softmax(hidden @ weight[:V].T / 0.7, -1)
    want = logp.sort(-1, descending=True)
    assert torch.equal(ids, want.indices[:, :k])
    torch.testing.assert_close(logprobs, want.values[:, :k], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1, keepdim=True))


def test_top_k_of_equals_takes_the_lowest_ids_and_zero_has_no_sign():
    logits = torch.tensor([[-0.0, 2.0, -1.0, 2.0, 0.0, -1.0, 2.0]])
    shard = VocabShard(start=0, rows=7, vocab_size=7)
    labels = torch.zeros(1, dtype=torch.long)
    _, ids, _ = top(torch.ones(1, 1), logits.T, labels, 7, shard=shard)
    assert ids.tolist() == [[1, 3, 6, 0, 4, 2, 5]]


@pytest.mark.parametrize("chunk", [1, 4, T])
def test_logits_that_fit_the_budget_are_not_computed_again(chunk, monkeypatch):
    hidden, weight, labels = inputs()
    made, linear = [], products.linear

    def counted(x, w):
        made.extend([1] if len(w) == SHARD.real_rows else [])  # logits; else a gradient
        return linear(x, w)

    monkeypatch.setattr(products, "linear", counted)
    chunks = -(-T // chunk)
    size = T * V * 8

    def grads(keep):
        made.clear()
        out = token_outputs(
            hidden, weight, labels, shard=SHARD, outputs=("entropy", "logprobs"),
            chunk_tokens=chunk, keep_bytes=keep,
        )  # fmt: skip
        found = torch.autograd.grad(out.square().sum(), (hidden, weight), retain_graph=True)
        count = len(made)
        again = torch.autograd.grad(out.square().sum(), (hidden, weight))
        for a, b in zip(found, again, strict=True):  # what was kept is gone by now
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        return count, found

    once, kept = grads(size)
    twice, recomputed = grads(size - 1)
    assert (once, twice) == (chunks, 2 * chunks)
    for a, b in zip(kept, recomputed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def peak_bytes(fn):
    """The most that torch's CPU allocator held at once for what fn allocated."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        fn()
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for e in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += e.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("shards", [1, 4])
def test_peak_memory_is_a_few_chunks_of_logits_whatever_the_batch(shards):
    rows, chunk = 8192 // shards, 32
    shard = VocabShard(start=0, rows=rows, vocab_size=8192)
    weight = torch.randn(rows, 2, requires_grad=True)
    one_chunk = chunk * rows * 4
    small = rows * 2 * 4 * 3 + 128 * chunk * 160  # the weight's gradient; numbers by token

    def peak(tokens, keep=0, outputs=("logprobs", "entropy"), chunk=chunk):
        hidden = torch.randn(tokens, 2, requires_grad=True)
        labels = torch.randint(0, rows, (tokens,))

        def step():
            out = token_outputs(
                hidden, weight, labels, shard=shard, outputs=outputs, chunk_tokens=chunk,
                keep_bytes=keep, topk=4,
            )  # fmt: skip
            out[:, :2].sum().backward()

        return peak_bytes(step)

    for chunks in (4, 32, 128):
        assert one_chunk < peak(chunks * chunk) < 2.2 * one_chunk + small, chunks
        top = peak(chunks * chunk, outputs=("logprobs", "entropy", "topk_logprobs", "topk_ids"))
        assert top < 2.2 * one_chunk + small, chunks
    assert peak(8 * chunk, chunk=8 * chunk) > 8 * one_chunk
    assert 8 * one_chunk < peak(8 * chunk, keep=8 * one_chunk) < 10.2 * one_chunk + small
    assert peak(8 * chunk, keep=8 * one_chunk - 1) < 2.2 * one_chunk + small


GIVEN = ("given_logprobs", "given_tail")
# distinct ids by row; of the last rows some are no token, one is asked about nothing, one about all
IDS = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(t)) for t in range(T)])
IDS[-3, 2:] = -1
IDS[-2] = -1


def dense_given(hidden, weight, ids, temperature):
    """The logprobs of `ids` and the log of the others' mass, by the whole vocabulary."""
    logp = F.log_softmax(hidden @ weight[:V].T / temperature, -1)
    known = (ids >= 0) & (ids < V)
    asked = torch.where(known, logp.gather(-1, ids.clamp(0, V - 1)), -torch.inf)
    others = torch.ones_like(logp, dtype=torch.bool)
    for t, i in known.nonzero().tolist():
        others[t, ids[t, i]] = False
    return torch.cat([asked, logp.masked_fill(~others, -torch.inf).logsumexp(-1)[:, None]], -1)


def finite(x):
    return x.where(x.isfinite(), 0.0)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("n", [1, 5, V])
def test_given_tokens_and_the_tail_equal_the_dense_formula(chunk, n):
    hidden, weight, labels = inputs()
    ids = torch.cat([IDS[:, : n - 1], torch.full((T, 1), V)], 1) if n == 5 else IDS[:, :n]
    got = token_outputs(
        hidden, weight, labels, shard=SHARD, outputs=(*GIVEN, "entropy", "logprobs"), given=ids,
        temperature=0.7, chunk_tokens=chunk,
    )  # fmt: skip
    said = dense(hidden, weight, labels, 0.7)[:, [1, 0]]
    want = torch.cat([dense_given(hidden, weight, ids, 0.7), said], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    mix = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    for columns_ in (slice(None), slice(n), slice(n, n + 1), slice(n + 2)):
        pairs = [(finite(x) * mix)[:, columns_].sum() for x in (got, want)]
        grads, expected = (
            torch.autograd.grad(x, (hidden, weight), retain_graph=True) for x in pairs
        )
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_tail_is_exact_where_one_less_the_rest_would_be_nothing():
    """The given token has all but 3e-13 of the mass, which float32 cannot tell from 1."""
    weight = torch.tensor([[30.0], [0.0], [0.0], [0.0]], requires_grad=True)
    shard = VocabShard(start=0, rows=4, vocab_size=4)
    out = token_outputs(
        torch.ones(1, 1), weight, torch.tensor([0]), shard=shard, outputs=GIVEN,
        given=torch.tensor([[0]], dtype=torch.int32),
    )  # fmt: skip
    assert out[0].tolist() == pytest.approx([0.0, torch.tensor(3.0).log().item() - 30.0])
    out[0, 1].backward()
    assert weight.grad.flatten().tolist() == pytest.approx([-1.0, 1 / 3, 1 / 3, 1 / 3])


def test_a_tail_that_underflows_is_finite_and_gives_finite_gradients():
    weight = torch.tensor([[500.0], [0.0]], requires_grad=True)
    shard = VocabShard(start=0, rows=2, vocab_size=2)
    out = token_outputs(
        torch.ones(1, 1), weight, torch.tensor([0]), shard=shard, outputs=GIVEN,
        given=torch.tensor([[0]]),
    )  # fmt: skip
    assert -90 < out[0, 1] < -80
    out[0, 1].backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("k", [1, 4, V])
def test_the_tail_of_the_top_k_is_that_of_its_ids(k):
    hidden, weight, labels = inputs(torch.float32)
    outputs = ("topk_ids", "topk_tail")
    out = token_outputs(hidden, weight, labels, shard=SHARD, outputs=outputs, topk=k)
    given = out[:, :k].long()
    again = token_outputs(hidden, weight, labels, shard=SHARD, outputs=GIVEN, given=given)
    assert torch.equal(out[:, k], again[:, k]) and (k < V) == bool(out[:, k].isfinite().all())
