"""Control calls: what servers answer, refuse, or never say, as one readable error."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from megarl.api.records import WeightUpdateMeta
from megarl.models.piece_table import HfTensor, Piece, PieceTable, Place, View
from megarl.parallel.layout import Layout
from megarl.parallel.ranks import Ranks
from megarl.server.weights import WeightStore
from megarl.utils.env import address_towards
from megarl.utils.http import HttpError, call_json, in_thread, split_address
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.receiver import LOADER
from megarl.weight_sync.receiver.megarl_receiver import load
from megarl.weight_sync.servers import Answer, BucketTransfer, Deadline, ServerInfo, Servers
from megarl.weight_sync.transports import WeightSource
from megarl.weight_sync.verify import Fingerprints, held_checksums, sample
from megarl.wire import handles
from tests.tiny import tiny_hf

SILENCE = "silence"  # an answer that never comes


class Fake:
    """Answers each path with the (status, body) it is given, or that a function of the request's
    body gives; remembers what it was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._over = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.asked.append((self.path, json.loads(body) if body else None))
                found = answers.get(self.path, (404, {"detail": "Not Found"}))
                status, answer = found(fake.asked[-1][1]) if callable(found) else found
                if answer == SILENCE:
                    fake._over.wait(30)
                    return
                if isinstance(answer, bytes):
                    data = answer
                else:
                    data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def fakes() -> Iterator[Any]:
    running: list[Fake] = []

    def make(**answers: Any) -> Fake:
        running.append(Fake({f"/{path}": answer for path, answer in answers.items()}))
        return running[-1]

    yield make
    for fake in running:
        fake.close()


REFUSALS = (
    ({"success": False, "message": "no group"}, "no group"),
    ({"error": {"message": "bad shape"}}, "bad shape"),
    ({"detail": "Not Found"}, "Not Found"),
    (b"<html>", "<html>"),
    (None, "no message"),
)


@pytest.mark.parametrize("answer, words", REFUSALS)
def test_a_refusal_is_quoted(fakes: Any, answer: Any, words: str) -> None:
    fake = fakes(x=(400, answer))
    with pytest.raises(HttpError, match=f"server {fake.address}: /x answered 400: .*{words}") as e:
        call_json("POST", fake.address, "/x", {}, timeout=60)
    assert e.value.status == 400 and e.value.server == fake.address


def test_what_an_answer_may_be(fakes: Any) -> None:
    fake = fakes(json=(200, {"a": [1]}), empty=(200, None), text=(200, b"ok"))
    kinds = [call_json("POST", f"http://{fake.address}/", p, {"q": 1}, timeout=60)
             for p in ("/json", "/empty", "/text")]  # fmt: skip
    assert kinds == [{"a": [1]}, None, "ok"]
    assert fake.asked[0] == ("/json", {"q": 1})


def test_failure_under_a_good_status_is_a_failure(fakes: Any) -> None:
    fake = fakes(x=(200, {"success": False, "message": "partially updated"}))
    with pytest.raises(HttpError, match="partially updated"):
        call_json("POST", fake.address, "/x", timeout=60)


def test_no_answer_is_bounded(fakes: Any) -> None:
    fake = fakes(x=(200, SILENCE))
    with pytest.raises(HttpError, match=f"{fake.address}: /x gave no answer within 0.2 s") as e:
        call_json("POST", fake.address, "/x", timeout=0.2)
    assert e.value.status is None


@pytest.mark.parametrize("junk", (b"<html>\n<body>", [1], {"tp_size": "two"}))
def test_junk_from_a_server_is_one_readable_line(fakes: Any, junk: Any) -> None:
    fake = fakes(server_info=(200, junk), model_info=(200, junk), weights_checker=(200, junk))
    servers, deadline = Servers([fake.address]), Deadline(10)
    asks = (servers.info, servers.started_again, partial(held_checksums, [fake.address]))
    for ask in asks:
        with pytest.raises(RuntimeError, match=f"^server {fake.address}: /") as e:
            ask(deadline)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("inside", ({"dp_size": 2}, {"pp_size": 2}))
def test_a_server_with_replicas_or_stages_takes_weights_from_files_alone(
    fakes: Any, inside: dict[str, int]
) -> None:
    fake = fakes(server_info=(200, {"tp_size": 1, "dtype": "float32"} | inside))
    servers = Servers([fake.address])
    assert servers.info(Deadline(10))[fake.address].tp == 1
    with pytest.raises(RuntimeError, match=f"server {fake.address} runs with .*type=disk"):
        servers.receivers(Deadline(10))


@pytest.mark.parametrize("address", ("localhost", "host:", ":80", "host:port"))
def test_addresses_have_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="use host:port"):
        split_address(address)
    assert split_address("http://[::1]:80/") == ("::1", 80)


def test_an_address_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="one is given twice"):
        Servers(["a:1", "b:1", "a:1"])


def test_all_failures_are_told_at_once(fakes: Any) -> None:
    good, bad = fakes(x=(200, {"n": 1})), fakes(x=(400, {"message": "no"}))
    quiet = fakes(x=(200, SILENCE))
    assert Servers([good.address]).call("/x", {}, Deadline(10)) == {good.address: {"n": 1}}
    with pytest.raises(RuntimeError) as e:
        Servers([good.address, bad.address, quiet.address]).call("/x", {}, Deadline(0.5))
    assert good.address not in str(e.value)
    assert f"{bad.address}: /x answered 400: no" in str(e.value)
    assert quiet.address in str(e.value)


def test_servers_without_sessions_need_none(fakes: Any) -> None:
    old, new = fakes(), fakes(begin_weight_update=(200, {}), end_weight_update=(200, {}))
    assert Servers([old.address]).begin_update(Deadline(10)) is False
    both = Servers([old.address, new.address])
    assert both.begin_update(Deadline(10)) is True
    both.end_update(Deadline(10))
    assert [path for path, _ in new.asked] == ["/begin_weight_update", "/end_weight_update"]
    broken = fakes(begin_weight_update=(500, {"message": "boom"}))
    with pytest.raises(RuntimeError, match="boom"):
        Servers([old.address, broken.address]).begin_update(Deadline(10))


class Holder(torch.nn.Module):
    """Holds tensors by their HF names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, t in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(t.clone(), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            self.get_parameter(name).copy_(w)


def obeying(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The answers of a server that holds these and has our loader."""
    return obeying_with(Holder(tensors))


def obeying_with(model: torch.nn.Module) -> dict[str, Any]:
    """The answers of a server of this model that has our loader."""

    def obey(body: Any) -> tuple[int, Any]:
        load(model, handles.unpack(body["serialized_named_tensors"][0]))
        return 200, {}

    return {"update_weights_from_tensor": obey}


def commands_of(fake: Fake) -> list[dict[str, Any]]:
    """What its loader was asked."""
    texts = [body["serialized_named_tensors"][0] for _, body in fake.asked]
    return [json.loads(handles.unpack(text)[0][0]) for text in texts]


PLACE = Place(0, 0, tp=0)


def source_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> WeightSource:
    """One rank that holds these and sends them in `dtype`."""
    pieces = {
        n: Piece(PLACE, n, View(0, tuple(t.shape), t.stride()), (0,) * t.ndim, tuple(t.shape))
        for n, t in tensors.items()
    }
    table = PieceTable(
        None,  # type: ignore[arg-type]
        Layout(),
        0,
        tuple(HfTensor(n, tuple(t.shape), (pieces[n],)) for n, t in tensors.items()),
        (),
    )
    return WeightSource(table, table.layout, 0, tensors, dtype=dtype)


OURS = ServerInfo(tp=1, embedded=True, loaders=(LOADER,))
STOCK = ServerInfo(tp=1, embedded=False, loaders=(LOADER,))
BARE = ServerInfo(tp=1, embedded=False)


def compare(
    tensors: Mapping[str, torch.Tensor],
    info: Mapping[str, ServerInfo],
    *,
    verify: Any = "full",
    dtype: torch.dtype = torch.float32,
) -> bool:
    meta = WeightUpdateMeta(type="distributed", version=3, addresses=tuple(info), verify=verify)
    phases = Phases()
    fingerprints = Fingerprints(source_of(tensors, dtype), 0, meta, Deadline(10), phases)
    fingerprints.record(info)
    verified = fingerprints.compare()
    assert phases.metrics["verified"] == verified
    return verified


def test_agreement_is_one_line_a_server_and_at_info_only_once(
    fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"w": torch.ones(2)}
    servers = [fakes(**obeying(tensors)) for _ in range(3)]
    with caplog.at_level(logging.DEBUG, logger="megarl.weight_sync.verify"):
        for some in (servers[:2], servers[:2], servers):  # the third comes later
            assert compare(tensors, {s.address: OURS for s in some})
    lines = [r for r in caplog.records if r.name == "megarl.weight_sync.verify"]
    assert [r.levelno for r in lines] == [logging.INFO] * 2 + [logging.DEBUG] * 4 + [logging.INFO]
    for line, server in zip(lines, [*servers[:2], *servers[:2], *servers], strict=True):
        assert server.address in line.getMessage() and " 1 tensors" in line.getMessage()


@pytest.mark.parametrize("kind", (OURS, STOCK))
def test_verification_names_server_and_tensor(fakes: Any, kind: ServerInfo) -> None:
    """What was sent in bf16 is held in fp32."""
    held = {"w": torch.ones(2), "b": torch.zeros(2)}
    ours = {"w": torch.full([2], 1 + 2**-12), "b": torch.zeros(2)}
    good, bad = (fakes(**obeying(held | other)) for other in ({}, {"w": torch.zeros(2)}))
    assert compare(ours, {good.address: kind}, dtype=torch.bfloat16)
    for servers, verify in (((good, bad), "full"), ((bad,), "sample")):
        info = {s.address: kind for s in servers}
        with pytest.raises(RuntimeError, match=rf"server {bad.address}, rank 0: w \[0:2\]") as e:
            compare(ours, info, dtype=torch.bfloat16, verify=verify)
        assert good.address not in str(e.value)
    with pytest.raises(RuntimeError, match=rf"{good.address}, rank 0: w \["):
        compare(ours, {good.address: kind})


def test_what_no_tensor_fills_and_what_gives_no_hashes_is_not_verified(
    fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sent = {"w": torch.ones(2)}
    more, busy = fakes(**obeying(sent | {"bias": torch.ones(2)})), fakes()
    assert compare(sent, {more.address: STOCK}) is False
    assert "not proved: bias (" in caplog.text
    assert compare(sent, {more.address: BARE}) is False  # started again, without the receiver
    assert f"weights on {more.address} not verified: " in caplog.text
    assert compare(sent, {busy.address: OURS}) is False
    assert f"weights on {busy.address} not verified: " in caplog.text


@pytest.mark.parametrize("verify", ("full", "sample"))
def test_an_embedded_server_of_another_model_is_an_error(fakes: Any, verify: str) -> None:
    """One parameter that nothing fills, and a tied head that the trainers hold apart."""
    more = fakes(**obeying({"w": torch.ones(2), "bias": torch.ones(2)}))
    with pytest.raises(RuntimeError, match=rf"server {more.address}; not proved: bias \("):
        compare({"w": torch.ones(2)}, {more.address: OURS}, verify=verify)
    tied = WeightStore(tiny_hf("qwen3", layers=1, tie=True).eval())
    fake = fakes(**obeying_with(tied.model))
    assert compare(tied.tensors, {fake.address: OURS}, verify=verify)
    sent = tied.tensors | {n: tied.tensors[e] + 1 for n, e in tied.tied.items()}
    with pytest.raises(RuntimeError, match=r"not proved: lm_head.weight \(.* keeps 0 of"):
        compare(sent, {fake.address: OURS})


def test_a_server_that_cannot_say_hides_no_other(
    fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sent = {"w": torch.ones(2)}
    good, bad, busy = fakes(**obeying(sent)), fakes(**obeying({"w": torch.zeros(2)})), fakes()
    assert compare(sent, {s.address: OURS for s in (busy, good)}) is False
    assert f"weights on {busy.address} not verified: " in caplog.text
    assert f"weights on {good.address} not" not in caplog.text and len(busy.asked) == 1
    with pytest.raises(RuntimeError, match=rf"server {bad.address}, rank 0: w \["):
        compare(sent, {s.address: OURS for s in (busy, good, bad)})


def test_servers_without_the_receiver_cannot_be_verified_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert compare({"w": torch.ones(1)}, {"stock:1": BARE}) is False
        assert compare({"w": torch.ones(1)}, {"stock:1": BARE}) is False
    (line,) = caplog.messages  # the second time at debug
    assert "stock:1 not verified: it was not started with --custom-weight-loader" in line


def test_a_sample_asks_for_a_few_tensors(fakes: Any) -> None:
    tensors = {f"w{i}": torch.ones(1) for i in range(100)}
    few = sample(tensors, seed=3)
    assert few == sample(reversed(tensors), seed=3) != sample(tensors, seed=4)  # type: ignore[arg-type]
    assert len(few) == 8 and few < set(tensors) and sample(["a"], 1) == {"a"}
    other = {n: t + (n not in few) for n, t in tensors.items()}
    both = [fakes(**obeying(other)) for _ in range(2)]
    info = {both[0].address: OURS, both[1].address: STOCK}
    assert compare(tensors, info, verify="sample") is True
    for fake in both:
        assert [c["do"] for c in commands_of(fake)] == ["record", "hash"]
        assert commands_of(fake)[1]["names"] == sorted(few)
    wrong = {n: t + 1 for n, t in tensors.items()}
    first = min(few, key=list(tensors).index)
    with pytest.raises(RuntimeError, match=rf"{both[0].address}, rank 0: {first} \["):
        compare(wrong, info, verify="sample")


def later(seconds: float, error: str | None = None) -> Answer:
    time.sleep(seconds)
    if error:
        raise RuntimeError(error)
    return Answer(None, time.monotonic())


def test_an_exchange_prefers_the_servers_own_words() -> None:
    """The broken broadcast shows first; the reason comes a moment later."""
    ours = in_thread(later, 0, "connection closed by peer")
    theirs = {"a": in_thread(later, 0.2, "server a: out of memory"), "b": in_thread(later, 0.1)}
    with pytest.raises(RuntimeError, match=r"^bucket 1: server a: out of memory$"):
        BucketTransfer("bucket 1", ours, theirs).wait(Deadline(30))


def test_an_exchange_names_the_silent() -> None:
    ours, theirs = in_thread(later, 2.0), {"a": in_thread(later, 0), "b": in_thread(later, 2.0)}
    with pytest.raises(
        RuntimeError, match=r"^bucket 1: no answer within weight_sync.timeout=0\.2 s from b$"
    ):
        BucketTransfer("bucket 1", ours, theirs).wait(Deadline(0.2))


def test_which_address_others_can_reach() -> None:
    assert address_towards("localhost") == "127.0.0.1"


def test_a_rank_on_its_own_agrees_with_itself() -> None:
    alone = Ranks()
    assert alone.together(lambda x: x + 1, 1) == 2 and alone.gather("a") == ["a"]
    with pytest.raises(KeyError):
        alone.together({}.__getitem__, "k")
    alone.close()


def test_stock_servers_of_gpus_record_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    """The first sync compares everything that servers say by themselves; nothing is recorded there
    on a GPU, where this has never been run."""
    source = source_of({"w": torch.ones(1)}, torch.float32)
    source.device = torch.device("cuda")
    meta = WeightUpdateMeta(
        type="distributed", version=1, addresses=("a:1",), verify="sample", first=True
    )
    assert meta.compares_all
    fingerprints = Fingerprints(source, 0, meta, Deadline(5), Phases())
    fingerprints.record({"a:1": STOCK})  # connects nowhere
    source.device = torch.device("cpu")
    assert fingerprints.compare() is False
    assert "weights on a:1 not verified: this has not been run on a GPU" in caplog.text
