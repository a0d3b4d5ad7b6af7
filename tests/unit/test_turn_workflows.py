"""Workflows of several turns: feedback, interactions and tools; what is trained, what fails."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar

import pytest

from examples.textarena_game import games
from megarl.api.inference import FAILURES, RolloutFailed
from megarl.config.check import check_config
from megarl.config.dataset import DatasetConfig, PartConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.data.dataset import RowDataset
from megarl.data.sources import load_rows
from megarl.rollout.chat import ChatWorkflow
from megarl.rollout.episode import check_episode, without_failed
from megarl.rollout.loop_thread import take_counts
from megarl.rollout.rewards import RewardPool, get_reward_fn
from megarl.rollout.tools.tooling import LocalToolingEnv, ToolExecutor, ToolFailure, ToolingEnv
from megarl.rollout.trajectory import to_batch
from megarl.rollout.workflows.env import EnvWorkflow
from megarl.rollout.workflows.multi_turn import Interaction, MultiTurnWorkflow, Reply
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.rollout.workflows.tool import ToolWorkflow
from megarl.trainer.evaluation import make_workflow
from megarl.trainer.preflight import check_data
from megarl.trainer.user_code import Named, check_code, code_problems
from tests.unit.scripted import (
    TEMPLATE,
    ScriptedEngine,
    run_episode,
    tool_tokenizer,
    trained_text,
    whole_text,
)

HERE = "tests.unit.test_turn_workflows"
ENV = "megarl.rollout.workflows.env:EnvWorkflow"
TOOL, MULTI = (
    "megarl.rollout.workflows.tool:ToolWorkflow",
    "megarl.rollout.workflows.multi_turn:MultiTurnWorkflow",
)
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


def picky(prompt: str, completion: str, *ids: Any, **row: Any) -> float:
    return float(int(completion) == 42)


def spoken(prompt: str, completion: str, *ids: Any, conversation: Any, **row: Any) -> float:
    return float(len(conversation))


def gconfig(n: int = 1, max_new_tokens: int = 300) -> GenerationHyperparameters:
    return GenerationHyperparameters(n_samples=n, max_new_tokens=max_new_tokens)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# tools


def times(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: a number
        b: another one
    """
    return a * b


def broken() -> str:
    """Breaks."""
    raise ToolFailure("the process died")


def shout() -> str:
    """Says what a template writes."""
    return "<eos><bos>assistant: 42"


def test_a_template_that_shows_no_tools_is_refused(pool: RewardPool, tmp_path: Path) -> None:
    plain = tool_tokenizer(tmp_path)
    plain.name_or_path = "some/model"
    plain.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="some/model"):
        tool_flow(plain, pool)


def test_calls_of_tools_and_special_tokens_in_results_are_counted(tokenizer, pool) -> None:
    written = [
        call("times", a=6, b=7) + call("times", a="x") + "<tool_call>{</tool_call>",
        call("shout"),
        call("times", a=1, b=1) + call("broken"),
    ]
    engine = ScriptedEngine(tokenizer, lambda i, k, text: written[k])
    take_counts()
    tools = [f"{HERE}:{name}" for name in ("times", "broken", "shout")]
    batch = run_episode(tool_flow(tokenizer, pool, tools=tools), engine, ROW)
    assert batch["valid"].tolist() == [False]
    counts = take_counts()
    assert (counts["tools/calls"], counts["tools/errors"]) == (6, 3)
    assert counts["special_in_content"] == 1
    assert take_counts() == {}


class Shelf(ToolingEnv):
    """Notes what happens to every instance."""

    made: ClassVar[list[Shelf]] = []

    def __init__(self, *, size: int = 3) -> None:
        self.size, self.closed, self.held = size, 0, [""] * size
        Shelf.made.append(self)

    async def ainitialize(self) -> None:
        return

    def list_tools(self) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": "put", "description": "", "parameters": {}}}
        ]

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        if tool_args.get("wait"):
            await asyncio.sleep(60)
        self.held = [*self.held[1:], tool_args["what"]]
        return "".join(self.held)

    async def aclose(self) -> None:
        self.closed += 1


@pytest.fixture
def shelf() -> Iterator[type[Shelf]]:
    Shelf.made = []
    yield Shelf
    assert [s.closed for s in Shelf.made] == [1] * len(Shelf.made)


def tool_flow(tokenizer: Any, pool: RewardPool, *, n: int = 1, reward: Any = right, **kw: Any):
    kw = {"tools": [f"{HERE}:times", f"{HERE}:broken"]} | kw
    return ToolWorkflow(
        reward, gconfig(n, kw.pop("max_new_tokens", 300)), tokenizer, reward_pool=pool, **kw
    )


def test_tool_results_are_read_and_the_models_own_tokens_are_continued(tokenizer, pool) -> None:
    """Three turns: two calls at once, one call behind a thought, the answer."""
    written = [
        call("times", a=6, b=7) + call("times", a=1, b="1"),
        "<think>so</think>" + call("times", a=2, b=21),
        "It is 42",
    ]
    engine = ScriptedEngine(tokenizer, lambda i, k, text: written[k])
    batch = run_episode(tool_flow(tokenizer, pool), engine, ROW)
    check_episode(batch, version=3, vocab_size=len(tokenizer))
    tools = LocalToolingEnv([times, broken]).list_tools()
    prompt = "<bos>tools: " + "".join(json.dumps(t) for t in tools) + "<eos>"
    prompt += "<bos>user: 6*7?<eos><bos>assistant: "
    assert whole_text(tokenizer, batch, 0) == (
        f"{prompt}{written[0]}<eos><bos>user: [42][1]<eos><bos>assistant: "
        f"{written[1]}<eos><bos>user: [42]<eos><bos>assistant: {written[2]}<eos>"
    )  # a linear episode is one row, though the template removes the thought
    assert trained_text(tokenizer, batch, 0) == "".join(f"{text}<eos>" for text in written)
    assert batch["rewards"].tolist() == [1.0] and len(engine.prompts) == 3
    assert batch["logprobs"][~batch["loss_mask"]].abs().sum() == 0


def test_a_workflow_of_ones_own_reads_results_by_the_lines_of_the_page(tokenizer, pool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (lines,) = re.findall(r"^```python\n(news = await .*?)^```$", page, re.MULTILINE | re.DOTALL)
    source = "async def read_results(self, executor, sample):\n" + indent(lines, "    ")
    exec(source, scope := {})
    executor = ToolExecutor()
    executor.register_tool(times)

    class OneRound(ChatWorkflow):
        async def arun_episode(self, engine, data):
            (sample,) = samples = self.begin(data | {"tools": executor.list_tools()})
            await self.generate(engine, samples, data)
            await scope["read_results"](self, executor, sample)
            await self.generate(engine, samples, data)
            return to_batch(samples, await self.score(samples, data))

    written = [call("times", a=6, b=7) + call("times", a=1, b=1), "It is 42"]
    engine = ScriptedEngine(tokenizer, lambda i, k, text: written[k])
    batch = run_episode(OneRound(right, gconfig(1, 300), tokenizer, reward_pool=pool), engine, ROW)
    assert whole_text(tokenizer, batch, 0).endswith(
        f"{written[0]}<eos><bos>user: [42][1]<eos><bos>assistant: It is 42<eos>"
    )
    assert trained_text(tokenizer, batch, 0) == f"{written[0]}<eos>It is 42<eos>"
    assert batch["rewards"].tolist() == [1.0]


def test_samples_share_their_first_request_and_go_their_own_ways(tokenizer, pool) -> None:
    def write(i: int, k: int, text: str) -> str:
        return call("times", a=i, b=1) if k < i else "42"

    engine = ScriptedEngine(tokenizer, write)
    flow = tool_flow(tokenizer, pool, n=3, turn_discount=0.5)
    batch = run_episode(flow, engine, ROW)
    assert [n for n, _ in engine.prompts] == [3, 1, 1, 1]
    assert batch["rewards"].tolist() == [1.0, 0.5, 0.25]
    assert "valid" not in batch


def test_what_is_wrong_with_a_call_is_told(tokenizer, pool) -> None:
    def write(i: int, k: int, text: str) -> str:
        if k:
            return "42"
        return ["<tool_call>{</tool_call>", call("divide"), call("times", a="x", b=1)][i]

    engine = ScriptedEngine(tokenizer, write)
    batch = run_episode(tool_flow(tokenizer, pool, n=3, max_result=70), engine, ROW)
    told = [whole_text(tokenizer, batch, i).partition("user: [")[2][:60] for i in range(3)]
    assert told[0].startswith("Error: a tool call is no JSON")
    assert told[1].startswith("Error: there is no tool 'divide'; the tools are: times")
    assert told[2].startswith("Error: times was called with wrong arguments: a: Input")
    assert "characters)]" in whole_text(tokenizer, batch, 2)
    assert batch["rewards"].tolist() == [1.0] * 3


def test_a_broken_tool_is_a_failure_and_not_zero(tokenizer, pool) -> None:
    engine = ScriptedEngine(tokenizer, lambda i, k, text: "42" if k or i != 1 else call("broken"))
    batch = run_episode(tool_flow(tokenizer, pool, n=3), engine, ROW)
    assert batch["valid"].tolist() == [True, False, True]
    assert FAILURES[int(batch["failure"][1])] == "tool"
    kept, failed = without_failed(batch)
    assert [kind for kind, _ in failed] == ["tool"] and kept["rewards"].tolist() == [1.0, 1.0]


def test_bounds_end_a_sample(tokenizer, pool) -> None:
    endless = ScriptedEngine(tokenizer, lambda i, k, text: call("times", a=1, b=1))
    batch = run_episode(tool_flow(tokenizer, pool, max_turns=3), endless, ROW)
    assert trained_text(tokenizer, batch, 0).count("<eos>") == 3
    assert not whole_text(tokenizer, batch, 0).endswith("assistant: ")  # nothing read in vain
    flow = tool_flow(tokenizer, pool, max_length=len(endless.prompts[0][1]) + 420)
    endless = ScriptedEngine(tokenizer, endless.write)
    batch = run_episode(flow, endless, ROW)
    assert len(endless.prompts) < 8 and batch["input_ids"].shape[1] <= flow.max_length
    cut = ScriptedEngine(tokenizer, endless.write)
    batch = run_episode(tool_flow(tokenizer, pool, max_new_tokens=20), cut, ROW)
    assert len(cut.prompts) == 1 and batch["truncated"].tolist() == [True]
    for wrong, message in (
        ({"max_turns": 0}, "max_turns=0"),
        ({"turn_discount": 2.0}, "turn_discount=2.0"),
        ({"max_length": 300}, "max_length=300 has no room"),
    ):
        with pytest.raises(ValueError, match=message):
            tool_flow(tokenizer, pool, **wrong)


def test_every_sample_has_its_own_environment(tokenizer, pool, shelf) -> None:
    def write(i: int, k: int, text: str) -> str:
        return call("put", what="abc"[i]) if k < 2 else text[-30:].partition("[")[2][:2]

    flow = tool_flow(
        tokenizer, pool, n=3, tools=[{"type": f"{HERE}:Shelf", "options": {"size": 2}}]
    )
    batch = run_episode(flow, ScriptedEngine(tokenizer, write), ROW)
    assert [trained_text(tokenizer, batch, i)[-7:] for i in range(3)] == [
        "aa<eos>",
        "bb<eos>",
        "cc<eos>",
    ]


def test_an_environment_that_does_not_start_is_a_failure(tokenizer, pool, shelf) -> None:
    flow = tool_flow(tokenizer, pool, n=2, tools=[f"{HERE}:Shelf"])

    async def one_refuses(self: Shelf) -> None:
        if self is shelf.made[0]:
            raise ToolFailure("no shelf")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "ainitialize", one_refuses)
        batch = run_episode(flow, ScriptedEngine(tokenizer, lambda *_: "42"), ROW)
    assert batch["valid"].tolist() == [False, True]
    assert batch["attention_mask"][0].any()  # it still has its prompt


@pytest.mark.parametrize("end", ["cancelled", "timeout", "error"])
def test_environments_are_closed_when_an_episode_does_not_end(
    end: str, tokenizer, pool, shelf
) -> None:
    flow = tool_flow(tokenizer, pool, n=2, tools=[f"{HERE}:Shelf"])

    def write(i: int, k: int, text: str) -> str:
        if end == "error" and i == 1 and k == 1:
            raise KeyError("the server")
        return call("put", what="a", wait=i == 0)

    engine = ScriptedEngine(tokenizer, write)

    async def run() -> None:
        task = asyncio.ensure_future(flow.arun_episode(engine, ROW))
        if end == "timeout":
            async with asyncio.timeout(0.05):
                await task
        if end == "cancelled":
            await asyncio.sleep(0.05)
            task.cancel()
        await task

    expected = {"timeout": TimeoutError, "error": KeyError}.get(end, asyncio.CancelledError)
    with pytest.raises(expected):
        asyncio.run(run())  # the fixture sees that both are closed, once


# options of the chat template

QUIET = {"enable_thinking": False}
PLAIN = "megarl.rollout.workflows.agent:AgentWorkflow"


def workflow_for(data: Any, tokenizer: Any, pool: RewardPool, target: str, options: Any) -> Any:
    config = RolloutConfig()
    config.workflow.type, config.workflow.options = target, options
    rows = RowDataset([ROW], parts={name: range(1) for name in data.parts or {"": 0}})
    return make_workflow(config, data, rows, gconfig(), tokenizer, pool)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (MULTI, {"feedback": "No."}),
        (TOOL, {"tools": [f"{HERE}:times"]}),
        (ENV, {"env": f"{HERE}:Countdown"}),
        (PLAIN, {"agent": f"{HERE}:right"}),
    ],
)
def test_all_turns_have_the_data_sets_options_of_the_template(
    target: str, options: Any, tokenizer: Any, pool: RewardPool
) -> None:
    given = {"options": {"chat_template_kwargs": QUIET}, "reward": {"type": f"{HERE}:right"}}
    data = load_config(None, [f"train_dataset={json.dumps(given)}"]).train_dataset
    flow = workflow_for(data, tokenizer, pool, target, options)
    assert flow.chat_template_kwargs == QUIET
    part = PartConfig(options=data.options, reward=data.reward)
    mixed = DatasetConfig(type="mix", parts={"a": part})
    flow = workflow_for(mixed, tokenizer, pool, target, options)
    assert flow.workflows["a"].chat_template_kwargs == QUIET
    if target == MULTI:
        prefix = "<bos>assistant: "
        quiet = prefix + "{% if enable_thinking is false %}<think></think>{% endif %}"
        tokenizer.chat_template = TEMPLATE.replace(prefix, quiet)
        try:
            flow = workflow_for(data, tokenizer, pool, target, options)
            batch = run_episode(flow, ScriptedEngine(tokenizer, lambda i, k, text: str(k)), ROW)
            assert whole_text(tokenizer, batch, 0).count("<bos>assistant: <think></think>") == 2
        finally:
            tokenizer.chat_template = TEMPLATE


def test_two_values_of_the_templates_options_are_refused(tokenizer, pool) -> None:
    words = [
        "rollout.workflow.options.chat_template_kwargs={enable_thinking: true}",
        "train_dataset.options.chat_template_kwargs={enable_thinking: false}",
    ]
    for given in (words, words[:1]):
        with pytest.raises(ConfigError) as caught:
            check_config(load_config(None, given), 1)
        (problem,) = [p for p in caught.value.problems if "chat_template_kwargs" in p]
        assert problem.startswith("train_dataset.options.chat_template_kwargs=")
    data = DatasetConfig(options={"chat_template_kwargs": QUIET})
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        workflow_for(data, tokenizer, pool, MULTI, {"chat_template_kwargs": {}})


# text that is not UTF-8, from whoever wrote it

HALF = "a file: " + b"caf\xe9".decode("utf-8", "surrogateescape")


def listing() -> str:
    """Lists files."""
    return HALF


class Halves:
    """An environment whose texts have half a character."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return HALF, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return HALF, 1.0, action == "1", False, {}


class Speaker(Interaction):
    """An interaction whose texts have half a character."""

    async def start(self, row: dict[str, Any]) -> str | None:
        return HALF

    async def respond(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> Reply:
        return Reply(text=HALF, done=messages[-1]["content"] == "1")


@pytest.mark.parametrize("who", ["tool", "env", "interaction"])
def test_half_a_character_is_read_as_its_replacement(who: str, tokenizer: Any, pool: Any) -> None:
    common: Any = {"reward_pool": pool}
    flow: Any
    if who == "tool":
        flow = tool_flow(tokenizer, pool, tools=[f"{HERE}:listing"])
    elif who == "env":
        flow = EnvWorkflow(right, gconfig(), tokenizer, env=f"{HERE}:Halves", **common)
    else:
        flow = multi(tokenizer, pool, interaction=f"{HERE}:Speaker")
    calls = [call("listing"), "1"] if who == "tool" else ["0", "1"]
    engine = ScriptedEngine(tokenizer, lambda i, k, text: calls[k])
    seen: list[list[int]] = []
    plain = engine.agenerate_many

    async def watched(reqs: Any) -> Any:
        seen.extend(list(r.input_ids) for r in reqs)
        return await plain(reqs)

    engine.agenerate_many = watched  # type: ignore[method-assign]
    batch = run_episode(flow, engine, ROW)
    assert batch["rewards"].shape == (1,) and len(seen) == 2
    want = tokenizer("a file: caf\ufffd", add_special_tokens=False)["input_ids"]
    assert any(seen[1][i : i + len(want)] == want for i in range(len(seen[1])))


def test_brackets_of_a_policy_are_told_and_the_run_goes_on(tokenizer, pool) -> None:
    texts = ['<tool_call>{"name": "times", "arguments": {"a": ' + "[" * 2000, "42"]
    flow = ToolWorkflow(
        right, gconfig(max_new_tokens=4000), tokenizer, tools=[f"{HERE}:times"], reward_pool=pool
    )
    batch = run_episode(flow, ScriptedEngine(tokenizer, lambda i, k, text: texts[k]), ROW)
    assert batch["rewards"].tolist() == [1.0]


# feedback and interactions


def multi(tokenizer: Any, pool: RewardPool, *, n: int = 1, reward: Any = right, **kw: Any):
    return MultiTurnWorkflow(reward, gconfig(n), tokenizer, reward_pool=pool, **kw)


def test_a_wrong_answer_is_tried_again(tokenizer, pool) -> None:
    """Sample 0 is right at once, 1 at the second try, 2 never."""

    def write(i: int, k: int, text: str) -> str:
        return "42" if k >= i and i < 2 else f"{i}/{k}"

    engine = ScriptedEngine(tokenizer, write)
    flow = multi(tokenizer, pool, n=3, max_turns=3, turn_discount=0.5, feedback="No.")
    batch = run_episode(flow, engine, ROW)
    assert batch["rewards"].tolist() == [1.0, 0.5, 0.0]
    assert whole_text(tokenizer, batch, 2).endswith(
        "assistant: 2/0<eos><bos>user: No.<eos><bos>assistant: 2/1<eos><bos>user: No.<eos>"
        "<bos>assistant: 2/2<eos>"
    )
    assert trained_text(tokenizer, batch, 2) == "2/0<eos>2/1<eos>2/2<eos>"
    seen = run_episode(
        multi(tokenizer, pool, reward=spoken, solved=4), ScriptedEngine(tokenizer, write), ROW
    )
    assert seen["rewards"].tolist() == [4.0]  # user, assistant, user, assistant


class Guess(Interaction):
    """Wants numbers that rise to 3; each is worth its own value."""

    closed = 0

    def __init__(self, *, first: str = "Go!", fault: str = "") -> None:
        self.first, self.fault = first, fault

    async def start(self, row: dict[str, Any]) -> str | None:
        if self.fault == "start":
            raise OSError("no game")
        return self.first or None

    async def respond(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> Reply:
        said = int(messages[-1]["content"])
        if self.fault == "slow" and said == 2:
            await asyncio.sleep(60)
        return Reply(text=f"more than {said}", done=said == 3, reward=said)

    async def aclose(self) -> None:
        Guess.closed += 1
        raise OSError("it does not close")


def test_an_interaction_answers_the_model(tokenizer, pool) -> None:
    Guess.closed = 0
    engine = ScriptedEngine(tokenizer, lambda i, k, text: str(1 + k + i))
    flow = multi(
        *(tokenizer, pool), n=2, reward=right, max_turns=5, turn_discount=0.5,
        interaction=f"{HERE}:Guess", interaction_options={"first": "Begin."},
    )  # fmt: skip
    batch = run_episode(flow, engine, ROW)
    assert whole_text(tokenizer, batch, 1) == (
        "<bos>user: 6*7?<eos><bos>user: Begin.<eos><bos>assistant: 2<eos>"
        "<bos>user: more than 2<eos><bos>assistant: 3<eos>"
    )
    assert batch["rewards"].tolist() == [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3]
    assert Guess.closed == 2
    check_episode(batch, version=3)


@pytest.mark.parametrize("fault", ["start", "slow"])
def test_an_interaction_that_breaks_is_a_failure(fault: str, tokenizer, pool) -> None:
    Guess.closed = 0
    flow = multi(
        *(tokenizer, pool), max_turns=5, interaction_timeout=0.05,
        interaction=f"{HERE}:Guess", interaction_options={"fault": fault},
    )  # fmt: skip
    batch = run_episode(flow, ScriptedEngine(tokenizer, lambda i, k, text: str(1 + k)), ROW)
    assert batch["valid"].tolist() == [False] and Guess.closed == 1
    assert FAILURES[int(batch["failure"][0])] == "environment"


class Noted(Interaction):
    """Has attributes whose names a Partner has, too."""

    def __init__(self) -> None:
        self.scores, self.tools, self.kind, self.breaks = [0.5], ["hammer"], "kind", "breaks"

    async def respond(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> Reply:
        return Reply(done=True)


def test_an_interactions_attributes_are_its_own(tokenizer, pool) -> None:
    flow = multi(tokenizer, pool, reward=right, interaction=f"{HERE}:Noted")
    batch = run_episode(flow, ScriptedEngine(tokenizer, lambda i, k, text: "42"), ROW)
    assert batch["rewards"].tolist() == [1.0]


def test_partners_of_an_episode_that_ends_before_they_speak_are_closed(tokenizer, pool) -> None:
    """The limit comes in the turn of the loop in which the first answers are there."""
    Guess.closed = 0
    flow = multi(tokenizer, pool, n=2, max_turns=5, interaction=f"{HERE}:Guess")

    async def episode() -> None:
        task = asyncio.ensure_future(flow.arun_episode(engine, ROW))
        generate = flow.generate

        async def then_cancelled(*args: Any) -> None:
            await generate(*args)
            asyncio.get_running_loop().call_soon(task.cancel)

        flow.generate = then_cancelled
        with pytest.raises(asyncio.CancelledError):
            await task

    engine = ScriptedEngine(tokenizer, lambda i, k, text: "1")
    asyncio.run(episode())
    assert Guess.closed == 2


# options


@pytest.mark.parametrize(
    "target, options, problem",
    [
        (TOOL, {}, "rollout.workflow.options.tools: ToolWorkflow needs it"),
        (TOOL, {"tools": []}, "tools=[]: a list with one tool at least"),
        (TOOL, {"tools": ["math:nothing"]}, "math has no nothing"),
        (TOOL, {"tools": ["math:pi"]}, "tool math:pi: a float"),
        (TOOL, {"tools": [{"mpc": 1}]}, "tool {'mpc': 1}: use 'pkg.module:function'"),
        (TOOL, {"tools": [{"mcp": {"path": "x"}}]}, "it takes command, env, url, timeout"),
        (TOOL, {"tools": [{"mcp": {}}]}, "mcp: command=[], url='': give one of both"),
        (TOOL, {"tools": [f"{HERE}:times", f"{HERE}:times"]}, "'times' is registered already"),
        (
            TOOL,
            {"tools": [{"type": f"{HERE}:Shelf", "options": {"width": 1}}]},
            "Shelf has no such option; it takes size",
        ),
        (TOOL, {"tools": [f"{HERE}:times"], "call_format": "xml"}, "call_format='xml': use one of"),
        (
            TOOL,
            {"tools": [f"{HERE}:times"], "turns": 3},
            "turns=3: ToolWorkflow has no such option; did you mean max_turns?",
        ),
        (TOOL, {"tools": [f"{HERE}:times"], "max_turns": "3"}, "max_turns='3': not of type int"),
        (
            MULTI,
            {"compact_at": 100},
            "compact_at=100 has no room for a prompt, an answer and a sum",
        ),
        (MULTI, {"interaction": f"{HERE}:Shelf"}, "no subclass of megarl.rollout.workflows"),
        (ENV, {"env": f"{HERE}:Guess"}, "has no method reset"),
        (ENV, {"env": f"{HERE}:Countdown", "env_options": {"x": 1}}, "Countdown has no such"),
        (
            MULTI,
            {"interaction": f"{HERE}:Guess", "interaction_options": {"last": 1}},
            "Guess has no such option; it takes first, fault",
        ),
    ],
)
def test_options_are_checked_before_anything_starts(target, options, problem) -> None:
    named = Named(key="rollout.workflow", target=target, kind="workflow", options=options)
    problems = list(code_problems([named]))
    assert problems and problem in problems[0]


def test_sound_options_pass() -> None:
    for target, options in (
        (ENV, {"env": f"{HERE}:Countdown", "env_options": {"crash": True}}),
        (TOOL, {"tools": [f"{HERE}:times", {"mcp": {"url": "http://127.0.0.1:1/mcp"}}]}),
        (MULTI, {"interaction": f"{HERE}:Guess", "interaction_options": {"first": "x"}}),
        (MULTI, {"max_turns": 4}),
    ):
        named = Named(key="rollout.workflow", target=target, kind="workflow", options=options)
        assert list(code_problems([named])) == []


@pytest.mark.parametrize("shows", [True, False])
def test_the_run_asks_its_chat_template_for_tools_before_anything_starts(
    shows: bool, tmp_path: Path
) -> None:
    tool_tokenizer(tmp_path)
    template = tmp_path / "chosen.jinja"
    template.write_text(TEMPLATE if shows else "{% for m in messages %}{{ m.content }}{% endfor %}")
    words = [f"actor.path={tmp_path}", f"chat_template={template}", f"rollout.workflow.type={TOOL}"]
    cfg = load_config(None, [*words, f"rollout.workflow.options.tools=[{HERE}:times]"])
    if shows:
        check_code(cfg, {})
        return
    with pytest.raises(ConfigError) as caught:
        check_code(cfg, {})
    (problem,) = caught.value.problems
    assert problem.startswith("rollout.workflow.options: ") and "chat_template" in problem


@pytest.mark.parametrize("mixture", (False, True))
def test_a_prompt_with_its_tools_is_compared_with_the_limits_before_anything_starts(
    mixture: bool, tmp_path: Path
) -> None:
    tokenizer, compact = tool_tokenizer(tmp_path), "rollout.workflow.options.compact_at"
    (tmp_path / "chosen.jinja").write_text(TEMPLATE)
    rows = [{"messages": text, "answer": "2"} for text in ("1+1", "1+1+1+1+1+1")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "train_dataset.parts.a" if mixture else "train_dataset"
    base = [
        f"actor.path={tmp_path}", f"chat_template={tmp_path}/chosen.jinja",
        f"rollout.workflow.type={TOOL}", f"rollout.workflow.options.tools=[{HERE}:times]",
        "gconfig.max_new_tokens=8", *(["train_dataset.type=mix"] if mixture else []),
        f"{data}.type=chat", f"{data}.path={tmp_path}/rows.jsonl", f"{data}.reward=exact",
        "train_dataset.batch_size=1",
    ]  # fmt: skip

    def check(*words: str) -> str:
        cfg = load_config(None, [*base, *words])
        try:
            check_code(cfg, check_data(cfg, renders=True))
        except ConfigError as e:
            (problem,) = e.problems
            return problem
        return ""

    schema = LocalToolingEnv.generate_schema(times)
    chat = [{"role": "user", "content": rows[1]["messages"]}]
    text = tokenizer.apply_chat_template(
        chat, tools=[schema], tokenize=False, add_generation_prompt=True
    )
    asked = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert check(f"server.context_length={asked + 8}") == ""
    problem = check(f"server.context_length={asked + 7}")
    for word in ("rollout.workflow.options", "row 1:", f"{asked} tokens", str(asked + 7)):
        assert word in problem
    assert check(f"{compact}={asked + 400}") == ""
    problem = check(f"{compact}={asked + 2 * 8}")  # the request for a summary takes some, too
    for word in ("rollout.workflow.options", "row 1:", f"{asked} tokens", str(asked + 16)):
        assert word in problem


# environments


class Countdown:
    """Counts down from the seed; every number said right is worth 1."""

    closed = 0

    def __init__(self, *, crash: bool = False) -> None:
        self.crash, self.left = crash, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.left = seed or 0
        return f"from {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.crash:
            raise RuntimeError("the game crashed")
        self.left -= 1
        return "go on", float(action == str(self.left)), self.left == 0, False, {}

    def close(self) -> None:
        Countdown.closed += 1


NO_REWARD = get_reward_fn("none")


def test_an_environment_is_five_lines(tokenizer, pool) -> None:
    Countdown.closed = 0
    engine = ScriptedEngine(tokenizer, lambda i, k, text: str(2 - k) if k != i else "what?")
    flow = EnvWorkflow(
        NO_REWARD, gconfig(2), tokenizer, reward_pool=pool, env=f"{HERE}:Countdown",
        turn_discount=0.5,
    )  # fmt: skip
    batch = run_episode(flow, engine, {"messages": ROW["messages"], "row_id": 3})
    assert whole_text(tokenizer, batch, 1) == (
        "<bos>user: 6*7?<eos><bos>user: from 3<eos><bos>assistant: 2<eos><bos>user: go on<eos>"
        "<bos>assistant: what?<eos><bos>user: go on<eos><bos>assistant: 0<eos>"
    )
    assert batch["rewards"].tolist() == [0.5 + 0.25, 1 + 0.25] and Countdown.closed == 2


def test_an_environment_that_crashes_is_a_failure(tokenizer, pool) -> None:
    flow = EnvWorkflow(
        NO_REWARD, gconfig(1), tokenizer, reward_pool=pool, env=f"{HERE}:Countdown",
        env_options={"crash": True},
    )  # fmt: skip
    batch = run_episode(flow, ScriptedEngine(tokenizer, lambda *_: "2"), ROW)
    assert batch["valid"].tolist() == [False]
    assert FAILURES[int(batch["failure"][0])] == "environment"


def test_a_game_of_textarena(tokenizer, pool) -> None:
    """By halving, the number is found in five guesses at most; a row is one game for all."""
    low, high = [1, 1], [20, 20]

    def write(i: int, k: int, text: str) -> str:
        guess = (low[i] + high[i]) // 2
        if k:
            if "higher" in text.rpartition("[GAME]")[2]:
                low[i] = guess + 1
            else:
                high[i] = guess - 1
        return f"{'ab'[i]} [{(low[i] + high[i]) // 2}]"

    flow = EnvWorkflow(
        NO_REWARD, gconfig(2), tokenizer, reward_pool=pool, env="examples.textarena_game:Game"
    )
    (row,) = games(DatasetConfig(type="x", size=1), seed=7)
    batch = run_episode(flow, ScriptedEngine(tokenizer, write), row)
    assert batch["rewards"].tolist() == [1.0, 1.0]
    first, second = (whole_text(tokenizer, batch, i) for i in range(2))
    assert first.replace("a [", "b [") == second
    assert first.count("You are playing Guess The Number") == 1


# verl's walkthrough of GSM8K

GSM8K = [
    {"question": f"What is {i} + {i}?", "answer": f"It is <<{i}+{i}={2 * i}>>.\n#### {2 * i}"}
    for i in (3, 600)
]


@pytest.fixture(scope="module")
def verl_rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("gsm8k")
    (root / "raw").mkdir()
    for split in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in GSM8K)
        (root / "raw" / f"{split}.jsonl").write_text(lines)
    command = [sys.executable, "-m", "examples.gsm8k_tools", "--source", str(root / "raw")]
    subprocess.run([*command, "--out", str(root)], check=True, capture_output=True, timeout=120)
    columns = {"messages": "prompt", "answer": "reward_model.ground_truth"}
    options = {"columns": columns}
    cfg = DatasetConfig(type="chat", path=str(root / "train.parquet"), options=options)
    return load_rows(cfg, seed=1)


def test_verls_tool_walkthrough(tokenizer, pool, verl_rows) -> None:
    row = verl_rows[1]
    assert row["answer"] == "1200" and row["extra_info"]["question"] == "What is 600 + 600?"
    assert "calc_gsm8k_reward" in row["messages"][0]["content"]
    written = [call("calc_gsm8k_reward", answer="120"), call("calc_gsm8k_reward", answer="1,200")]
    engine = ScriptedEngine(tokenizer, lambda i, k, text: [*written, "#### 1200"][k])
    flow = tool_flow(
        tokenizer, pool, reward=get_reward_fn("gsm8k"), max_turns=5,
        tools=["examples.gsm8k_tools:calc_gsm8k_reward"],
    )  # fmt: skip
    batch = run_episode(flow, engine, row)
    text = whole_text(tokenizer, batch, 0)
    assert "answer='120' reward=0.0" in text and "answer='1,200' reward=1.0" in text
    assert "the model's answer to the question" in text and '"row"' not in text
    assert batch["rewards"].tolist() == [1.0]
    assert trained_text(tokenizer, batch, 0) == f"{written[0]}<eos>{written[1]}<eos>#### 1200<eos>"


def test_verls_interaction_answers_the_model(tokenizer, pool, verl_rows) -> None:
    engine = ScriptedEngine(tokenizer, lambda i, k, text: f"#### {4 + k}")
    flow = multi(
        *(tokenizer, pool), reward=get_reward_fn("gsm8k"), max_turns=5,
        interaction="examples.gsm8k_tools:Teacher",
    )  # fmt: skip
    batch = run_episode(flow, engine, verl_rows[0])
    assert trained_text(tokenizer, batch, 0) == "#### 4<eos>#### 5<eos>#### 6<eos>"
    assert whole_text(tokenizer, batch, 0).count("Your response is incorrect!") == 2
    assert batch["rewards"].tolist() == [1.0]


# one answer


class Drawn(ScriptedEngine):
    """Notes of every request whether it is drawn greedily."""

    greedy: ClassVar[list[bool]] = []

    async def agenerate_many(self, reqs: Any) -> Any:
        self.greedy[:] = [req.gconfig.greedy for req in reqs]
        return await super().agenerate_many(reqs)


@pytest.mark.parametrize("likeliest", ["42", "41"])
def test_a_greedy_answer_is_the_baseline_and_is_not_trained(tokenizer, pool, likeliest) -> None:
    engine = Drawn(tokenizer, lambda i, k, prompt: likeliest if i == 2 else f"4{i + 1}")
    options = dict(reward_pool=pool, greedy_baseline=True)
    batch = run_episode(RLVRWorkflow(right, gconfig(n=2), tokenizer, **options), engine, ROW)
    check_episode(batch, version=3)
    assert Drawn.greedy == [False, False, True]
    assert [trained_text(tokenizer, batch, i) for i in range(2)] == ["41<eos>", "42<eos>"]
    assert batch["rewards"].tolist() == [0.0, 1.0]
    assert batch["baseline"].tolist() == [float(likeliest == "42")] * 2


def test_without_a_greedy_reward_the_row_has_failed(tokenizer, pool) -> None:
    with RewardPool(1, timeout=30.0, on_error="reject") as rejecting:
        engine = ScriptedEngine(tokenizer, lambda i, k, prompt: "?" if i == 2 else "42")
        options = dict(reward_pool=rejecting, greedy_baseline=True)
        workflow = RLVRWorkflow(picky, gconfig(n=2), tokenizer, **options)
        with pytest.raises(RolloutFailed, match="reward: the greedy answer"):
            run_episode(workflow, engine, ROW)
