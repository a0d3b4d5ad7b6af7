"""A teacher held by servers: what they say, and what becomes of samples they say nothing of."""

import doctest
import http.server
import json
import threading
from contextlib import contextmanager

import pytest
import torch

from megarl.rollout import teacher
from megarl.rollout.teacher import ServerTeacher, read_answer
from tests.teaching import SAMPLES, batch_of, check_teacher

V = 130


class Table(torch.nn.Module):
    """The interface of a causal language model, for logits that a table gives to each token."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight = torch.randn(V, V, generator=g)

    def get_output_embeddings(self):
        return self

    def forward(self, ids):
        self.logits = self.weight[ids]
        return self


def said_of(ids, k):
    """SGLang's answer about a prompt."""
    logp = Table()(torch.tensor(ids)).logits.log_softmax(-1)
    own = [[None, ids[0], None]]
    own += [[logp[t, i].item(), i, None] for t, i in enumerate(ids[1:])]
    meta = {"input_token_logprobs": own}
    if k:
        values, which = (x.tolist() for x in logp[:-1].topk(k))
        pairs = zip(values, which, strict=True)
        meta["input_top_logprobs"] = [
            None, *([[lp, i, None] for lp, i in zip(*pair, strict=True)] for pair in pairs)
        ]  # fmt: skip
    return {"text": "", "output_ids": [], "meta_info": meta}


@contextmanager
def serving(refuses=lambda ids: False, status=500):
    """An address that speaks as SGLang does, but for the prompts that it `refuses`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 0}
            assert body["return_logprob"] and body["logprob_start_len"] == 0
            refused = refuses(body["input_ids"])
            said = {"error": {"message": "no"}} if refused else said_of(
                body["input_ids"], body["top_logprobs_num"]
            )  # fmt: skip
            raw = json.dumps(said).encode()
            self.send_response(status if refused else 200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("k", [1, 9, V])
def test_servers_name_the_likeliest_tokens_and_the_tail(k):
    with serving() as address:
        check_teacher([address], Table(), k)


@pytest.mark.parametrize("status", [400, 500])
def test_samples_without_an_answer_are_told_from_the_others(status):
    refuses = serving(lambda ids: ids == SAMPLES[2], status)
    with serving() as sound, refuses as broken:
        batch = batch_of(SAMPLES)
        alone = ServerTeacher([broken], top=3, vocab_size=V, retry_timeout=0.3)
        assert alone.teach(batch).tolist() == [False, False, True, False]
        assert (batch.padded([2])["given_ids"] == -1).all()
        assert batch.padded([0])["teacher_logp"][0, 1:].all()
        # another server is asked before a sample is given up
        assert not ServerTeacher([broken, sound], top=3, vocab_size=V).teach(batch).any()


def test_a_server_that_starts_again_is_waited_for():
    calls = []

    def starting(ids):
        calls.append(ids)
        return len(calls) <= 4 * len(SAMPLES)

    with serving(starting, 503) as address:
        assert not ServerTeacher([address], top=3, vocab_size=V).teach(batch_of(SAMPLES)).any()


def test_lost_servers_are_waited_for_once(monkeypatch):
    """Not by one sample after the other."""
    monkeypatch.setattr(teacher, "AT_ONCE", 1)
    calls = []

    def refuses(ids):
        calls.append(ids)
        return True

    with serving(refuses, 503) as address:
        lost = ServerTeacher([address], top=3, vocab_size=V, retry_timeout=0.5)
        assert lost.teach(batch_of(SAMPLES)).all()
    assert [calls.count(ids) for ids in SAMPLES[1:]] == [1] * (len(SAMPLES) - 1)
    assert calls.count(SAMPLES[0]) > 1


def broken(change):
    answer = said_of([4, 5, 6], 2)
    change(answer["meta_info"])
    return answer


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda meta: meta.pop("input_token_logprobs"), "no logprobs of the prompt"),
        (lambda meta: meta.pop("input_top_logprobs"), "no logprobs of the prompt"),
        (lambda meta: meta["input_top_logprobs"][1].pop(), "another number of tokens than 2"),
        (lambda meta: meta["input_token_logprobs"].pop(), "speaks of tokens"),
        (lambda meta: meta["input_token_logprobs"][1].__setitem__(0, float("nan")), "is NaN"),
        (
            lambda meta: meta["input_top_logprobs"].__setitem__(1, [[-1.0, 7, None]] * 2),
            "names a token twice",
        ),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_refused(change, problem):
    read_answer(said_of([4, 5, 6], 2), [4, 5, 6], 2)
    with pytest.raises(ValueError, match=problem):
        read_answer(broken(change), [4, 5, 6], 2)


def test_the_examples_of_the_docstrings():
    found = doctest.testmod(teacher)
    assert found.attempted and not found.failed
