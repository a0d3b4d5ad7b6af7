"""Compaction: a chat that outgrows its bound goes on behind a summary that the policy wrote."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import Actor
from megarl.api.batch import Batch
from megarl.api.inference import FAILURES
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.algo import PPOActorConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.episode import batch_parts, check_episode
from megarl.rollout.episodes import Episode
from megarl.rollout.loop_thread import take_counts
from megarl.rollout.rewards import RewardPool
from megarl.rollout.tools.tooling import LocalToolingEnv, ToolFailure
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
from megarl.rollout.workflows.tool import ToolWorkflow
from megarl.trainer.rollout_metrics import rollout_metrics
from tests.unit.bigram import VOCAB, BigramEngine
from tests.unit.rollout_fakes import FakeServer, Scripted, prepare_batch
from tests.unit.scripted import run_episode, tool_tokenizer, trained_text, whole_text

HERE = "tests.unit.test_compaction"
MOST = 100  # gconfig.max_new_tokens
ASK = "Sum up."
ROW = {"messages": [{"role": "user", "content": "6*7?"}], "answer": "42", "row_id": 5}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(1, timeout=30.0) as pool:
        yield pool


def right(prompt: str, completion: str, *ids: Any, answer: str, **row: Any) -> float:
    return float(completion.endswith(answer))


def spoken(prompt: str, completion: str, *ids: Any, conversation: Any, **row: Any) -> float:
    return float(len(conversation))


def called(prompt: str, completion: str, *ids: Any, conversation: Any, **row: Any) -> float:
    return float(len(conversation)) if completion.endswith("</tool_call>") else -1.0


def say(n: int) -> str:
    """Speaks.

    Args:
        n: letters
    """
    if n < 0:
        raise ToolFailure("mute")
    return "z" * n


def call(n: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'say', 'arguments': {'n': n}})}</tool_call>"


class Recorder:
    """Answers each request with `#sample#` and what write(sample, answers before, whether a summary
    is asked for) says. Every token of an answer has a logprob of its own."""

    def __init__(self, tokenizer: Any, write: Callable[[int, int, bool], str]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.asked: list[tuple[int, ModelRequest, ModelResponse]] = []
        self.summaries = 0
        self._tokens = 0

    def get_version(self) -> int:
        return 3

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        await asyncio.sleep(0)
        return [self._answer(i, req) for i, req in enumerate(reqs)]

    def _answer(self, i: int, request: ModelRequest) -> ModelResponse:
        text = self.tokenizer.decode(request.input_ids)
        marks = re.findall(r"#(\d)#", text)
        sample = int(marks[-1]) if marks else i
        asked = text.endswith(f"user: {ASK}<eos><bos>assistant: ")
        before = sum(of == sample for of, _, _ in self.asked)
        self.summaries += asked
        said = f"#{sample}#{self.write(sample, before, asked)}<eos>"
        tokens = self.tokenizer(said, add_special_tokens=False)["input_ids"]
        out = tokens[: request.gconfig.max_new_tokens]
        first, self._tokens = self._tokens + 1, self._tokens + len(out)
        response = ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=out,
            output_logprobs=[-k / 2**14 for k in range(first, self._tokens + 1)],
            output_versions=[3] * len(out),
            stop_reason="stop" if len(out) == len(tokens) else "length",
        )
        self.asked.append((sample, request, response))
        return response


def flow_of(tokenizer: Any, pool: RewardPool, *, n: int = 1, reward: Any = right, **options: Any):
    """A ToolWorkflow; its `room` is what compact_at leaves to the prompt with answer and summary
    after it, beside what the shortest chat needs."""
    gconfig = GenerationHyperparameters(
        n_samples=n, max_new_tokens=MOST, seed=options.pop("seed", None)
    )
    room = options.pop("room", None)
    if room is not None:
        options["compact_at"] = shortest(tokenizer, options.get("messages", ROW["messages"])) + room
    options = {"tools": [f"{HERE}:say"], "compact_prompt": ASK, "max_turns": 20} | options
    return ToolWorkflow(reward, gconfig, tokenizer, reward_pool=pool, **options)


def shortest(tokenizer: Any, messages: Any) -> int:
    """The least compact_at that lets a chat with the tool `say` begin."""
    tools = LocalToolingEnv([say]).list_tools()
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    asking = f"<bos>user: {ASK}<eos><bos>assistant: "
    return 2 * MOST + sum(
        len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (prompt, "<eos>" + asking)
    )


@settings(max_examples=25, deadline=None)
@given(room=st.integers(0, 700), seed=st.integers(0, 2**16), n=st.integers(1, 3))
def test_every_sampled_token_is_in_one_row_and_no_context_is_above_the_bound(
    room, seed, n, tokenizer, pool
) -> None:
    rng = random.Random(seed)

    def write(sample: int, before: int, summary: bool) -> str:
        filler = "y" * rng.choice([0, 5, 20, 60])
        if summary or rng.random() < 0.1:
            return filler + "42"
        return filler[:20] + "".join(call(rng.randrange(250)) for _ in range(rng.choice([1, 1, 2])))

    engine = Recorder(tokenizer, write)
    flow = flow_of(tokenizer, pool, n=n, room=room, max_turns=rng.choice([2, 5, 20]))
    batch = run_episode(flow, engine, ROW)
    check_episode(batch, version=3, vocab_size=len(tokenizer))
    for _, request, _ in engine.asked:
        assert request.gconfig.max_new_tokens == MOST
        assert len(request.input_ids) + MOST <= flow.compact_at
    assert batch["input_ids"].shape[1] <= flow.compact_at
    sampled: Counter[tuple[int, int, float]] = Counter()
    for sample, _, response in engine.asked:
        for pair in zip(response.output_tokens, response.output_logprobs, strict=True):
            sampled[(sample, *pair)] += 1
    mask = batch["loss_mask"]
    whose = batch["rollout_ids"][:, None].expand_as(mask)[mask].tolist()
    trained = zip(whose, batch["input_ids"][mask].tolist(), batch["logprobs"][mask].tolist())
    assert Counter(trained) == sampled
    for sample in range(n):
        answers = sum(of == sample for of, _, _ in engine.asked)
        rows = batch["rollout_ids"] == sample
        assert len(set(batch["rewards"][rows].tolist())) == 1
        assert answers - (int(rows.sum()) - 1) <= flow.max_turns + 1  # one summary may be in vain


def test_a_compacted_chat_goes_on_behind_the_summary_and_the_last_step(tokenizer, pool) -> None:
    written = [call(20), call(120), "<think>hm</think>did <z>", call(110), "so far", "42"]
    engine = Recorder(tokenizer, lambda sample, before, summary: written[before])
    take_counts()
    batch = run_episode(flow_of(tokenizer, pool, room=300), engine, ROW)
    check_episode(batch, version=3)
    head = whole_text(tokenizer, batch, 0).partition("6*7?")[0] + "6*7?"
    ends, ask = "<eos><bos>assistant: ", f"<eos><bos>user: {ASK}<eos><bos>assistant: "
    said = [f"#0#{text}" for text in written]
    behind = "\n\nYour summary of the work so far:\n"
    assert [whole_text(tokenizer, batch, i) for i in range(3)] == [
        f"{head}{ends}{said[0]}<eos><bos>user: [{'z' * 20}]{ends}{said[1]}{ask}{said[2]}<eos>",
        # the thought of the summary is trained, and not read again
        f"{head}{behind}did <z>{ends}{said[1]}<eos><bos>user: [{'z' * 120}]{ends}{said[3]}"
        f"{ask}{said[4]}<eos>",
        f"{head}{behind}#0#so far{ends}{said[3]}<eos><bos>user: [{'z' * 110}]{ends}{said[5]}<eos>",
    ]
    assert [trained_text(tokenizer, batch, i) for i in range(3)] == [
        "".join(f"{text}<eos>" for text in part) for part in (said[:3], said[3:5], said[5:])
    ]
    assert batch["rewards"].tolist() == [1.0] * 3 and batch["rollout_ids"].tolist() == [0] * 3
    counts = take_counts()
    assert (counts["compactions"], counts["compactions_failed"]) == (2, 0)
    assert counts["tools/calls"] == 3


def test_without_a_bound_nothing_is_compacted(tokenizer, pool) -> None:
    written = [call(20), call(200), call(150), "42"]
    engines = [Recorder(tokenizer, lambda sample, before, summary: written[before]) for _ in "ab"]
    batches = [
        run_episode(flow_of(tokenizer, pool, **bound), engine, ROW)
        for bound, engine in zip(({}, {"room": 2000}), engines, strict=True)
    ]
    assert len(batches[0]["input_ids"]) == 1
    assert all(torch.equal(batches[1][k], v) for k, v in batches[0].items())


@pytest.mark.parametrize("why", ["the summary is cut", "the result is too long"])
def test_a_sample_that_cannot_go_on_is_scored_by_its_last_answer(why, tokenizer, pool) -> None:
    cut = why == "the summary is cut"  # there would be room to go on behind it
    written = [call(20), call(60), call(150 if cut else 900), "x" * (200 if cut else 5)]
    engine = Recorder(tokenizer, lambda sample, before, summary: written[before])
    take_counts()
    flow = flow_of(tokenizer, pool, room=450, reward=called, turn_discount=0.5)
    batch = run_episode(flow, engine, ROW)
    check_episode(batch, version=3)
    assert len(engine.asked) == 4 and len(batch["input_ids"]) == 1
    assert batch["truncated"].tolist() == [cut]
    # the outcome is discounted as that of the turn that was written last
    assert batch["rewards"].tolist() == [6 * 0.125]
    counts = take_counts()
    assert (counts["compactions"], counts["compactions_failed"]) == (0, 1)
    assert "z" * 61 not in whole_text(tokenizer, batch, 0)


def test_a_reward_sees_the_chat_as_it_stands(tokenizer, pool) -> None:
    written = [call(20), call(120), "so far", "42"]
    engine = Recorder(tokenizer, lambda sample, before, summary: written[before])
    batch = run_episode(flow_of(tokenizer, pool, room=300, reward=spoken), engine, ROW)
    # the question with the summary, the call, its result, and the answer
    assert batch["rewards"].tolist() == [4.0, 4.0]


def test_a_result_that_max_length_has_no_room_for_is_not_read(tokenizer, pool) -> None:
    engine = Recorder(tokenizer, lambda sample, before, summary: call(900))
    flow = flow_of(tokenizer, pool, max_length=shortest(tokenizer, ROW["messages"]) + 200)
    batch = run_episode(flow, engine, ROW)
    assert len(engine.asked) == 1 and batch["input_ids"].shape[1] <= flow.max_length
    assert whole_text(tokenizer, batch, 0).endswith("</tool_call><eos>")


def test_turns_are_counted_on_and_seeds_differ(tokenizer, pool) -> None:
    def write(sample: int, before: int, summary: bool) -> str:
        return "so far" if summary else call(100)

    def run() -> tuple[Recorder, Any]:
        engine = Recorder(tokenizer, write)
        flow = flow_of(tokenizer, pool, n=2, room=300, max_turns=6, seed=7)
        return engine, run_episode(flow, engine, ROW)

    engine, batch = run()
    for sample in (0, 1):
        texts = [trained_text(tokenizer, batch, i) for i in range(len(batch["input_ids"]))]
        own = "".join(text for text in texts if f"#{sample}#" in text)
        assert own.count("<tool_call>") == 6 and own.count("so far") >= 2
    seeds = [request.seed for _, request, _ in engine.asked]
    assert len(set(seeds)) == len(seeds)
    assert [request.seed for _, request, _ in run()[0].asked] == seeds


def right_once(prompt: str, completion: str, *ids: Any, **row: Any) -> float:
    return float(completion.endswith("42"))


def test_a_late_answer_is_discounted_by_all_answers_before_it(tokenizer, pool) -> None:
    def write(sample: int, before: int, summary: bool) -> str:
        return "so far" if summary else "42" if before > 7 else "w" * 40

    engine = Recorder(tokenizer, write)
    gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=MOST)
    flow = MultiTurnWorkflow(
        right_once, gconfig, tokenizer, reward_pool=pool, max_turns=20, turn_discount=0.5,
        compact_at=420, compact_prompt=ASK,
    )  # fmt: skip
    batch = run_episode(flow, engine, ROW)
    assert engine.summaries > 1 and len(batch["input_ids"]) == 1 + engine.summaries
    wrong = len(engine.asked) - engine.summaries - 1
    assert batch["rewards"].tolist() == [0.5**wrong] * len(batch["input_ids"])


def test_a_tool_that_breaks_after_a_compaction_fails_the_sample_once(tokenizer, pool) -> None:
    written = [call(20), call(120), "so far", call(-1)]
    engine = Recorder(tokenizer, lambda sample, before, summary: written[before])
    batch = run_episode(flow_of(tokenizer, pool, room=300), engine, ROW)
    assert batch["valid"].tolist() == [False] and FAILURES[int(batch["failure"][0])] == "tool"


def test_a_chat_that_ends_with_another_than_the_user_gets_the_summary_as_a_message(
    tokenizer, pool
) -> None:
    messages = [*ROW["messages"], {"role": "assistant", "content": "well,"}]
    flow = flow_of(tokenizer, pool, room=300)
    assert flow.compacted(messages, "so far")[:2] == messages
    assert [m["role"] for m in flow.compacted(messages, "so far")] == ["user", "assistant", "user"]
    assert [m["role"] for m in flow.compacted(ROW["messages"], "so far")] == ["user"]
    assert ROW["messages"][0]["content"] == "6*7?"


def test_rows_that_cannot_be_compacted_are_refused_by_name(tokenizer, pool) -> None:
    engine = Recorder(tokenizer, lambda *_: "42")
    flow = flow_of(tokenizer, pool, room=0)
    assert run_episode(flow, engine, ROW)["rewards"].tolist() == [1.0]
    longer = ROW | {"messages": [{"role": "user", "content": "6*7? And quickly."}]}
    with pytest.raises(ValueError, match=rf"row 5: .*compact_at={flow.compact_at}; set it to at"):
        run_episode(flow, engine, longer)
    gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=MOST)
    options: dict[str, Any] = {"reward_pool": pool, "compact_at": 500}
    multi = MultiTurnWorkflow(right, gconfig, tokenizer, **options)
    with pytest.raises(ValueError, match="row 5 has no messages"):
        run_episode(multi, engine, {"prompt_ids": [2, 9], "prompt": "?", "answer": "", "row_id": 5})
    for wrong, message in (
        ({"compact_at": 200}, "compact_at=200 has no room .*raise it above 2"),
        ({"compact_at": 900, "max_length": 900}, "compact_at=900 and max_length=900"),
    ):
        with pytest.raises(ValueError, match=message):
            flow_of(tokenizer, pool, **wrong)


# -- a run that is killed


class LetterServer(FakeServer):
    """Writes tokens of the tokenizer, up to each 16th of the chat, be it begun anew or gone on
    with."""

    def answer(self, rid: str, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        params = params | {"max_new_tokens": 16 - len(ids) % 16}
        said = super().answer(rid, ids, params)
        tokens = [3 + t % 90 for t in said["output_ids"]]
        said["output_ids"] = tokens
        if tokens:
            said["meta_info"]["output_token_logprobs"] = [[-t / 64, t, None] for t in tokens]
        if said["meta_info"]["finish_reason"]["type"] == "length":
            said["meta_info"]["finish_reason"] = {"type": "stop", "matched": 1}
        return said


class OneRow:
    batch_size = 1

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield [ROW]


def test_a_run_that_is_killed_in_mid_summary_goes_on_there(tokenizer, pool, monkeypatch) -> None:
    monkeypatch.setattr("megarl.rollout.generation.ABORT_DELAY", 60.0)
    gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=20)
    flow = MultiTurnWorkflow(
        right_once, gconfig, tokenizer, reward_pool=pool, max_turns=12,
        compact_at=220, compact_prompt=ASK,
    )  # fmt: skip
    asking = tokenizer(f"user: {ASK}", add_special_tokens=False)["input_ids"]
    server, clients = LetterServer(), []

    def connect() -> RemoteSGLangEngine:
        clients.append(RemoteSGLangEngine(RolloutConfig(addresses=[server.address])))
        clients[-1].initialize()
        clients[-1].executor.episodes.keeps_answers = True
        return clients[-1]

    def asks(ids: list[int]) -> bool:
        return any(ids[k : k + len(asking)] == asking for k in range(len(ids) - 30, len(ids)))

    try:
        whole = prepare_batch(connect().executor, OneRow(), flow)
        asked = [ids for r in server.requests for ids in r["input_ids"]]
        at = next(k for k, ids in enumerate(asked) if asks(ids))
        assert len(asked[at]) % 16 < 15  # there is more than a token to it
        assert 1 < at < len(asked) - 1 and len(whole["input_ids"]) > 1

        server.requests.clear()
        server.abort_after = [*[None] * at, 1]  # of the summary there are tokens, for now no more
        first = connect()

        def killed() -> None:
            if len(server.requests) == at + 1:
                first.pause()
                first.resume()
                raise InterruptedError

        with pytest.raises(InterruptedError):
            first.executor.prepare_parts(OneRow(), flow, meanwhile=killed)
        state = first.executor.state_dict()
        first.destroy()
        server.requests.clear()
        second = connect()
        second.executor.load_state_dict(state)
        again = prepare_batch(second.executor, OneRow(), flow)
        resumed = [ids for r in server.requests for ids in r["input_ids"]]
        assert resumed[0][:-1] == asked[at] and resumed[1:] == asked[at + 1 :]
        for name in ("input_ids", "loss_mask", "logprobs", "rewards"):
            assert torch.equal(again[name], whole[name]), name
    finally:
        for client in clients:
            client.destroy()
        server.close()


# -- what is trained


def rows_by_hand(engine: Recorder) -> list[tuple[int, list[int], list[float], list[bool]]]:
    """Sample, tokens, logprobs and mask of each row, by the requests alone: a request that does not
    begin with the sample's last row begins another one."""
    rows: list[tuple[int, list[int], list[float], list[bool]]] = []
    for sample in sorted({of for of, _, _ in engine.asked}):
        last: tuple[int, list[int], list[float], list[bool]] | None = None
        for of, request, response in engine.asked:
            if of != sample:
                continue
            ids = list(request.input_ids)
            if last is None or ids[: len(last[1])] != last[1]:
                last = (sample, [], [], [])
                rows.append(last)
            _, tokens, logprobs, mask = last
            read = ids[len(tokens) :]
            tokens += [*read, *response.output_tokens]
            logprobs += [0.0] * len(read) + response.output_logprobs
            mask += [False] * len(read) + [True] * len(response.output_tokens)
    return rows


def hand_made(engine: Recorder, rewards: dict[int, float]) -> dict[str, torch.Tensor]:
    rows = rows_by_hand(engine)
    width = max(len(tokens) for _, tokens, _, _ in rows)

    def padded(values: list[Any], nothing: Any) -> torch.Tensor:
        return torch.tensor([[*v, *[nothing] * (width - len(v))] for v in values])

    mask = padded([mask for *_, mask in rows], False)
    return {
        "input_ids": padded([tokens for _, tokens, _, _ in rows], 0),
        "attention_mask": padded([[True] * len(tokens) for _, tokens, _, _ in rows], False),
        "loss_mask": mask,
        "logprobs": padded([logprobs for _, _, logprobs, _ in rows], 0.0),
        "versions": torch.where(padded([m for *_, m in rows], False), 3, -1).int(),
        "rewards": torch.tensor([rewards[sample] for sample, *_ in rows]),
        "rollout_ids": torch.tensor([sample for sample, *_ in rows]),
        "truncated": torch.zeros(len(rows), dtype=torch.bool),
    }


def compacted_episode(tokenizer: Any, pool: RewardPool) -> tuple[Recorder, dict[str, Any]]:
    """Four samples; sample i calls the tool i times, which takes more and more rows."""

    def write(sample: int, before: int, summary: bool) -> str:
        if summary:
            return "so far " + "s" * (3 * sample)
        calls = sum(1 for of, _, r in engine.asked if of == sample and len(r.output_tokens) > 30)
        return call(100) if calls < 2 * sample else "42" if sample % 2 else "41"

    engine = Recorder(tokenizer, write)
    return engine, run_episode(flow_of(tokenizer, pool, n=4, room=300), engine, ROW)


def trained_by(batch: dict[str, torch.Tensor], agg: str) -> tuple[dict[str, float], Any, Batch]:
    """GRPO's update of a table of bigrams, for which token ids are folded onto its vocabulary."""
    folded = batch | {"input_ids": batch["input_ids"] % VOCAB}
    episode = Episode(number=0, row={}, workflow=Scripted(), batch=folded)
    data = Batch.from_local(batch_parts([episode], group_ids=[0]))
    actor: Any = Actor(
        PPOActorConfig(adv_norm="group", loss_agg=agg), BigramEngine(), temperature=1.0
    )
    actor.compute_prox_logp(data)
    actor.compute_advantages(data)
    return actor.ppo_update(data), actor.engine.table.detach(), data


@pytest.mark.parametrize("agg", ["token-mean", "sequence-mean", "rollout-mean"])
def test_a_compacted_batch_trains_as_segments_made_by_hand(agg, tokenizer, pool) -> None:
    engine, batch = compacted_episode(tokenizer, pool)
    assert Counter(batch["rollout_ids"].tolist()) == {0: 1, 1: 2, 2: 4, 3: 6}
    rewards = {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}
    by_hand = hand_made(engine, rewards)
    assert set(by_hand) == set(batch)
    assert all(torch.equal(batch[name], values) for name, values in by_hand.items())
    stats, table, data = trained_by(batch, agg)
    other, hand_table, _ = trained_by(by_hand, agg)
    assert stats == other and torch.equal(table, hand_table)  # to the bit
    # the advantage of a group of four rollouts, whatever their rows
    std = (4 * 0.25 / 3) ** 0.5 + 1e-6
    padded = data.padded()
    x = BigramEngine().table.detach().clone().requires_grad_()
    logp = x.log_softmax(-1)
    losses: list[tuple[int, int, torch.Tensor]] = []  # rollout, row, loss of a token
    for row, mask in enumerate(padded["loss_mask"]):
        rollout = by_hand["rollout_ids"].tolist()[row]
        advantage = (rewards[rollout] - 0.5) / std
        for t in mask.nonzero().flatten().tolist():
            ids = padded["input_ids"][row]
            new = logp[ids[t - 1], ids[t]]
            losses.append((rollout, row, -advantage * (new - new.detach()).exp()))
    key = {"token-mean": lambda one: one[2], "sequence-mean": lambda one: one[1]}.get(
        agg, lambda one: one[0]
    )
    parts: dict[Any, list[torch.Tensor]] = {}
    for one in losses:
        parts.setdefault(key(one), []).append(one[2])
    loss = torch.stack([torch.stack(part).mean() for part in parts.values()]).mean()
    loss.backward()
    assert x.grad is not None
    # float32 sums of some thousand terms in another order
    torch.testing.assert_close(table, x.detach() - 0.5 * x.grad, rtol=1e-5, atol=1e-6)
    assert stats["loss"] == pytest.approx(float(loss), abs=1e-5)


def test_a_compacted_rollout_counts_once_in_metrics(tokenizer, pool) -> None:
    _, batch = compacted_episode(tokenizer, pool)
    _, _, data = trained_by(batch, "rollout-mean")
    found = rollout_metrics(data, version=3)
    assert found["reward/mean"] == 0.5
    assert found["forks/rows_per_rollout"] == 13 / 4 and found["forks/rows_max"] == 6
    assert len(data.minibatches) == 1
