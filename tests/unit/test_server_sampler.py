"""The sampler: what it reports, what it draws, and that randomness is a function of its key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.server.protocol import GenerateBody, SamplingParams, ServerError, read, read_chat
from megarl.server.sampler import SamplingBatch, seed_keys, truncate, uniforms
from megarl.server.sequence import ServedSequence

VOCAB = 40


def make_sequence(seed=0, prompt=(3, 4), output=(), stop_ids=(), **params):
    s = ServedSequence(
        rid="r",
        prompt=list(prompt),
        params=SamplingParams(**params),
        max_new_tokens=99,
        stop_ids=frozenset(stop_ids),
        seed=seed,
        done=None,
        wants_logprobs=True,
    )
    s.output = list(output)
    return s


def draw(logits, seqs):
    return SamplingBatch(seqs, torch.device("cpu"), logits.shape[1]).sample(logits)


def test_uniforms_are_uniform_and_uncorrelated():
    keys = np.repeat(seed_keys(range(100)), 200)
    u = uniforms(keys, np.tile(np.arange(200), 100))
    assert u.min() >= 0 and u.max() < 1
    histogram = np.histogram(u, bins=20, range=(0, 1))[0]
    chi2 = ((histogram - 1000) ** 2 / 1000).sum()
    assert chi2 < 43.8  # 19 degrees of freedom, p = 0.001
    grid = u.reshape(100, 200)
    for a, b in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):  # positions, seeds
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03


def test_negative_and_large_seeds_have_streams_of_their_own():
    keys = seed_keys([0, 1, -1, 2**63 - 1, -(2**63)])
    assert len(set(keys.tolist())) == 5


def test_frequencies_follow_the_distribution():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    n = 20000
    seqs = [make_sequence(seed=i, temperature=0.7) for i in range(n)]
    tokens = draw(logits.expand(n, VOCAB), seqs).tokens
    want = torch.softmax(logits[0] / 0.7, -1).double()
    got = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    common = want * n > 5
    chi2 = ((got - want * n) ** 2 / (want * n))[common].sum()
    degrees = int(common.sum())
    assert chi2 < degrees + 4.5 * (2 * degrees) ** 0.5


def test_logprobs_are_at_the_temperature_and_not_renormalised():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    seqs = [
        make_sequence(temperature=0.7),
        make_sequence(temperature=0.0),
        make_sequence(temperature=1.3, top_k=3),
        make_sequence(top_p=0.3),
    ]
    got = draw(logits, seqs)
    temperatures = torch.tensor([0.7, 1.0, 1.3, 1.0])[:, None]
    want = torch.log_softmax(logits / temperatures, -1)
    torch.testing.assert_close(
        torch.tensor(got.logprobs), want[torch.arange(4), torch.tensor(got.tokens)]
    )
    assert got.tokens[1] == int(logits[1].argmax())


def test_a_token_does_not_depend_on_the_batch():
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(9, VOCAB, generator=g)
    seqs = [
        make_sequence(seed=i, temperature=0.5 + i / 5, top_p=0.9 if i % 3 == 0 else 1.0)
        for i in range(9)
    ]
    together = draw(logits, seqs).tokens
    alone = [draw(logits[i : i + 1], [s]).tokens[0] for i, s in enumerate(seqs)]
    assert together == alone


def test_randomness_is_keyed_by_seed_and_position_in_the_sequence():
    logits = torch.zeros(1, VOCAB)
    a = draw(logits, [make_sequence(seed=5, prompt=(3, 4), output=(7, 8))]).tokens
    b = draw(logits, [make_sequence(seed=5, prompt=(3, 4, 7, 8))]).tokens
    others = {
        draw(logits, [make_sequence(seed=5, output=range(3, 3 + k))]).tokens[0] for k in range(20)
    }
    assert a == b and len(others) > 5


def test_truncate_matches_a_plain_loop():
    probs = torch.softmax(torch.randn(30, 25, generator=torch.Generator().manual_seed(4)) * 2, -1)
    g = torch.Generator().manual_seed(5)
    top_k = torch.randint(1, 26, (30,), generator=g)
    top_p = torch.rand(30, generator=g)
    got = truncate(probs, top_k, top_p)
    for row in range(30):
        mass, kept = 0.0, set()
        for rank, i in enumerate(probs[row].argsort(descending=True).tolist()):
            p = float(probs[row, i])
            if rank < int(top_k[row]) and mass <= float(top_p[row]):
                kept.add(i)
            mass += p
        assert set(got[row].nonzero()[:, 0].tolist()) == kept
        assert torch.equal(got[row][list(kept)], probs[row][list(kept)])


def test_top_p_over_a_flat_vocabulary_needs_more_than_the_first_candidates():
    vocab = 5000
    probs = torch.full((1, vocab), 1 / vocab)
    kept = truncate(probs, torch.tensor([vocab]), torch.tensor([0.9]))
    assert abs(int((kept > 0).sum()) - 0.9 * vocab) <= 2


def test_top_k_one_is_greedy_with_the_temperatures_logprob():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6))
    got = draw(logits, [make_sequence(seed=i, temperature=0.7, top_k=1) for i in range(3)])
    assert got.tokens == logits.argmax(-1).tolist()
    want = torch.log_softmax(logits / 0.7, -1).max(-1).values
    torch.testing.assert_close(torch.tensor(got.logprobs), want)


def test_stop_tokens_are_held_back_until_min_new_tokens():
    logits = torch.full((2, VOCAB), -20.0)
    logits[:, 1], logits[:, 9] = 20.0, 5.0
    short = make_sequence(stop_ids={1}, min_new_tokens=3, output=(5, 5))
    long = make_sequence(stop_ids={1}, min_new_tokens=3, output=(5, 5, 5))
    got = draw(logits, [short, long])
    assert got.tokens == [9, 1]
    assert got.logprobs[0] == pytest.approx(-15.0, abs=1e-4)  # of the whole distribution


def test_the_last_token_of_the_vocabulary_can_be_drawn_and_none_with_zero_mass():
    logits = torch.full((500, VOCAB), -torch.inf)
    logits[:, VOCAB - 1] = logits[:, 2] = 0.0
    tokens = draw(logits, [make_sequence(seed=i) for i in range(500)]).tokens
    assert set(tokens) == {2, VOCAB - 1}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"n": 2}, "n"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"sampling_seed": 2**70}, "sampling_seed"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"regex": "a+"}, "regex"),
        ("greedy", "sampling_params"),
    ],
)
def test_bad_sampling_params_are_refused_by_name(given, named):
    with pytest.raises(ServerError, match=named):
        read(SamplingParams, given, "sampling_params")


def test_unknown_and_neutral_sampling_params():
    with pytest.raises(ServerError, match="unknown field `bogus`, expected one of `max_new"):
        read(SamplingParams, {"bogus": 1}, "sampling_params")
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "regex": None, "top_k": None}
    assert read(SamplingParams, neutral, "sampling_params") == SamplingParams()


def test_a_null_in_a_chat_is_as_if_left_out() -> None:
    messages = [{"role": "user", "content": "hi"}]
    names = "max_tokens", "max_completion_tokens"
    for given, other in (names, names[::-1]):
        for body in ({given: 5, other: None}, {other: None, given: 5}):
            _, params = read_chat({"messages": messages, "temperature": None, **body})
            assert params.max_new_tokens == 5 and params.temperature == 1.0


def test_the_start_of_logprobs_is_no_truth_value() -> None:
    with pytest.raises(ServerError, match="logprob_start_len"):
        read(GenerateBody, {"input_ids": [1], "logprob_start_len": False})
