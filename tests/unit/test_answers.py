"""Answers kept over a resume: all as of one cut, each for the request that it belongs to."""

import errno

import pytest
import torch

from megarl.api.inference import RolloutWorkflow
from megarl.api.records import ModelRequest
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, WeightSyncConfig
from megarl.rollout.chat import ChatWorkflow
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.episode_context import AnswerLog, take_log
from megarl.rollout.generation import Sample, routes_from
from megarl.rollout.trajectory import to_batch
from megarl.trainer.recover import AnswersFile
from megarl.wire.routes import RouteShape, encode
from tests.unit.rollout_fakes import FakeServer, trajectory


def sample(ids=(1, 2), seed=None, **gconfig):
    g = GenerationHyperparameters(**({"max_new_tokens": 4} | gconfig))
    return Sample(ModelRequest(rid="r", input_ids=list(ids), gconfig=g, seed=seed), seed=seed)


def write(s, *tokens, end=""):
    """Has a server's answer of these tokens come in."""
    meta = {
        "finish_reason": {"type": end or "abort"},
        "weight_version": "3",
        "output_token_logprobs": [[-0.1 * t, t, None] for t in tokens],
    }
    s.absorb({"meta_info": meta})


def test_all_answers_are_as_of_the_cut():
    """One that ended after it keeps no more of its end than the others do of their tokens."""
    log = AnswerLog()
    ended, ends_later, begun, later = [sample((i,)) for i in range(1, 5)]
    for s in (ended, ends_later, begun):
        log.begin(s)
    write(ended, 5, 6, end="stop")
    write(ends_later, 7)
    log.cut()
    write(ends_later, 8, end="stop")
    write(begun, 9)
    log.begin(later)
    write(later, 9, end="stop")
    log.end()  # it holds tensors from here on
    state = log.state()
    assert [a["tokens"].tolist() for a in state] == [[5, 6], [7]]
    assert [a["stop_reason"] for a in state] == ["stop", ""]
    log.cut()
    assert [a["tokens"].tolist() for a in log.state()] == [[5, 6], [7, 8], [9], [9]]


def test_an_answer_is_for_the_same_request_only_and_once():
    log = AnswerLog()
    first = sample(seed=1)
    log.begin(first)
    write(first, 5, 6)
    log.cut()
    again = AnswerLog(log.state())
    for other in (sample((1, 3), 1), sample(seed=2), sample(seed=1, temperature=0.5)):
        again.begin(other)
        assert other.response.output_tokens == []
    same, twin = sample(seed=1), sample(seed=1)
    again.begin(same)
    again.begin(twin)
    assert same.tokens == [1, 2, 5, 6] and twin.tokens == [1, 2]
    assert same.response.output_logprobs == pytest.approx([-0.5, -0.6])
    assert same.response.output_versions == [3, 3] and not same.done
    assert same.sampling_params()["max_new_tokens"] == 2
    # before another cut, what a second resume finds is the same
    assert [a["tokens"].tolist() for a in again.state()] == [[5, 6]]


def test_samples_of_one_prompt_get_the_answers_of_their_own_seeds():
    """One without tokens at the cut is not kept: it must not get its neighbour's."""

    def two():
        request = sample().request
        return [Sample(request, seed=seed) for seed in (7, 8)]

    log, (queued, wrote) = AnswerLog(), two()
    log.begin(queued)
    log.begin(wrote)
    write(wrote, 5, 6, 7)
    log.cut()
    again, resumed = AnswerLog(log.state()), two()
    for each in resumed:
        again.begin(each)
    assert [s.response.output_tokens for s in resumed] == [[], [5, 6, 7]]


def test_routes_are_kept_as_far_as_the_cut():
    shape = RouteShape(layers=1, experts=200, top_k=1)

    def routed():
        request = ModelRequest(rid="r", input_ids=[1, 2], gconfig=GenerationHyperparameters())
        return Sample(request, seed=1, routes=shape)

    def absorb(s, tokens, routes, start):
        meta = {"routed_experts": encode(torch.tensor(routes).view(-1, 1, 1))}
        meta |= {"finish_reason": {"type": "abort"}, "weight_version": "3"}
        meta["output_token_logprobs"] = [[-1.0, t, None] for t in tokens]
        s.absorb({"meta_info": meta}, routes_from=start)

    log = AnswerLog()
    log.begin(first := routed())
    absorb(first, [5, 6], [150, 2, 3], 0)
    log.cut()
    absorb(first, [7], [4], 3)
    log.end()
    (kept,) = log.state()
    assert kept["routes"].flatten().tolist() == [150, 2, 3] and kept["routes"].dtype == torch.int16
    again = AnswerLog([kept])
    again.begin(second := routed())
    assert routes_from([second]) == 3
    absorb(second, [8, 9], [5, 6], 3)
    assert second.response.routed_experts.flatten().tolist() == [150, 2, 3, 5, 6]
    # kept by a run that asked for none: what was written before stays unknown
    AnswerLog([{k: v for k, v in kept.items() if k != "routes"}]).begin(third := routed())
    assert third.response.routed_experts.shape == (0, 1, 1) and routes_from([third]) == 0
    absorb(third, [8], [1, 92, 93, 5], 0)
    assert third.response.routed_experts.flatten().tolist() == [1, -1, -1, 5]


def test_rows_that_are_in_flight_twice_get_their_answers_in_order():
    kept = [(row, [{"request": r}]) for row, r in ((7, "a"), (8, "b"), (7, "c"))]
    found = [take_log(kept, {"row_id": row}).state() for row in (7, 7, 7, 8)]
    assert [[a["request"] for a in answers] for answers in found] == [["a"], ["c"], [], ["b"]]


class TwoTurns(RolloutWorkflow):
    """Asks, then asks again with the answer as part of the prompt."""

    async def arun_episode(self, engine, data):
        g = GenerationHyperparameters(max_new_tokens=3)
        ids = [9, data["row_id"]]
        for _ in range(2):
            response = await engine.agenerate(ModelRequest(rid="r", input_ids=ids, gconfig=g))
            ids = ids + response.output_tokens
        return trajectory(ids[1:], version=engine.get_version())


class OneBatch:
    """A dataloader of one batch of one row."""

    batch_size = 1

    def __iter__(self):
        while True:
            yield [{"row_id": 4}]


def test_a_workflow_goes_on_in_the_middle_of_its_second_turn(monkeypatch):
    monkeypatch.setattr("megarl.rollout.generation.ABORT_DELAY", 60.0)
    server, clients = FakeServer(), []

    def connect():
        client = RemoteSGLangEngine(RolloutConfig(addresses=[server.address]))
        clients.append(client)
        client.initialize()
        client.executor.episodes.keeps_answers = True
        return client

    try:
        first = connect()
        server.abort_after = [None, 1]  # of the second turn there is a token, and no more for now

        def killed():
            if len(server.requests) == 2:
                first.pause()
                first.resume()
                raise InterruptedError

        with pytest.raises(InterruptedError):
            first.executor.prepare_parts(OneBatch(), TwoTurns(), meanwhile=killed)
        state = first.executor.state_dict()
        first.destroy()
        ((row_id, answers),) = state["answers"]
        assert row_id == 4
        assert [a["tokens"].tolist() for a in answers] == [[102, 103, 104], [105]]

        server.requests.clear()
        second = connect()
        second.executor.load_state_dict(state)
        (batch,) = second.executor.prepare_parts(OneBatch(), TwoTurns())
        assert [r["input_ids"] for r in server.requests] == [[[9, 4, 102, 103, 104, 105]]]
        assert batch["input_ids"].tolist() == [[9, 4, 102, 103, 104, 105, 106, 107]]
    finally:
        for client in clients:
            client.destroy()
        server.close()


class Seeded(ChatWorkflow):
    """Two turns of one sample, seeded."""

    def __init__(self):
        gconfig = GenerationHyperparameters(max_new_tokens=3, seed=5)
        super().__init__(lambda **row: 0.0, gconfig, None, reward_pool=object())

    def text(self, answer):
        return ""

    async def arun_episode(self, engine, data):
        (sample,) = self.begin(data)
        for _ in range(2):
            await self.generate(engine, [sample], data)
        return to_batch([sample], [0.0])


class Prompts:
    """Rows 0, 1, ..., each a batch."""

    batch_size = 1

    def __init__(self, first=0):
        self.first = first

    def __iter__(self):
        for i in range(self.first, 1000):
            yield [{"row_id": i, "prompt": "", "prompt_ids": [9, 50 + i]}]


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_a_seeded_answer_is_gone_on_with_a_version_later(monkeypatch, order):
    """Row 1 is rejected, and row 2 under way when the version changes: neither its seeds' version
    nor its number is another after the resume."""
    monkeypatch.setattr("megarl.rollout.generation.ABORT_DELAY", 60.0)
    monkeypatch.setattr("megarl.rollout.executor.LOOK_AROUND", 0.05)
    server, clients = FakeServer(), []
    accept = dict(should_accept=lambda batch: 51 not in batch["input_ids"])

    def connect(version):
        config = dict(max_head_offpolicyness=1, max_concurrent_rollouts=1, order=order)
        client = RemoteSGLangEngine(RolloutConfig(addresses=[server.address], **config))
        clients.append(client)
        client.initialize()
        client.set_version(version)
        client.executor.episodes.keeps_answers = True
        return client

    try:
        first, loader = connect(0), Prompts()
        server.abort_after = [None] * 5 + [1]  # of row 2's second turn there is a token
        (part,) = first.executor.prepare_parts(loader, Seeded(), **accept)
        first.executor.trained(part["episode_ids"])

        def killed():
            if len(server.requests) == 6:
                first.pause()
                first.resume()
                first.set_version(1)
                raise InterruptedError

        with pytest.raises(InterruptedError):
            first.executor.prepare_parts(loader, Seeded(), meanwhile=killed, **accept)
        state = first.executor.state_dict()
        first.destroy()
        server.requests.clear()
        second = connect(1)
        second.executor.load_state_dict(state)
        (part,) = second.executor.prepare_parts(Prompts(first=3), Seeded(), **accept)
        assert 52 in part["input_ids"] and part["episode_ids"].tolist() == [2]
        asked = [ids for r in server.requests for ids in r["input_ids"] if 52 in ids]
        assert all(len(ids) > 5 for ids in asked)  # no token of its first turn is generated again
    finally:
        for client in clients:
            client.destroy()


@pytest.mark.parametrize("mode", ["abort", "drain", "in_place"])
def test_a_cut_waits_for_no_answer_to_end(mode):
    """Whatever a weight update does with requests that are under way."""
    server = FakeServer()
    config = RolloutConfig(addresses=[server.address], kv_after_sync="keep")
    client = RemoteSGLangEngine(config, weight_sync=WeightSyncConfig(pause_mode=mode))
    try:
        client.initialize()
        client.executor.episodes.keeps_answers = True
        server.delay, server.written = 600.0, 2

        def save():
            if server.rids and server.delay:
                server.delay = 0.0  # of what goes on after the cut
                assert client.pauses.cut()

        (batch,) = client.executor.prepare_parts(OneBatch(), TwoTurns(), meanwhile=save)
        assert batch["input_ids"].tolist() == [[9, 4, 102, 103, 104, 105, 106, 107]]
        ((_, (answer,)),) = [kept for kept in client.executor.episodes.answers() if kept[1]]
        assert answer["tokens"].tolist() == [102, 103]
        assert [path for path, _ in server.calls] == ["/pause_generation", "/continue_generation"]
    finally:
        client.destroy()
        server.close()


class Client:
    """What AnswersFile asks of a client."""

    def __init__(self) -> None:
        self.version, self.calls = 3, []
        self.executor = self.episodes = self.pauses = self
        self.whole = True

    def get_version(self):
        return self.version

    def cut(self):
        self.calls.append("cut")
        return self.whole

    def answers(self):
        return [(7, [{"request": "k", "stop_reason": ""}])]


def test_saved_answers_are_of_one_version(tmp_path):
    path, client = tmp_path / "recover" / "answers.pt", Client()
    AnswersFile(path, client, 1000.0).write_if_due()
    AnswersFile(path, client, None).write_if_due()
    assert not client.calls and not path.exists()
    file = AnswersFile(path, client, 0.0)
    file.write_if_due()
    assert client.calls == ["cut"]
    assert file.read(3) == client.answers() and [p.name for p in path.parent.iterdir()] == [
        path.name
    ]
    assert file.read(4) is None and not path.exists()  # of other weights: never to be read again


def test_answers_that_do_not_come_back_leave_the_file_as_it_is(tmp_path):
    path, client = tmp_path / "answers.pt", Client()
    file = AnswersFile(path, client, 0.0)
    file.write_if_due()
    client.whole, client.answers = False, list
    file.write_if_due()
    assert file.read(3) == Client().answers()


def test_a_disk_that_is_full_costs_the_answers_not_the_run(tmp_path, monkeypatch, caplog):
    path, client = tmp_path / "answers.pt", Client()
    file = AnswersFile(path, client, 0.0)
    file.write_if_due()
    before = path.read_bytes()

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megarl.utils.files.sync", full)
    client.version = 4
    file.write_if_due()
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]
    assert "the answers so far are not saved" in caplog.text
