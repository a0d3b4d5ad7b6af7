"""Agents that are commands, examples/cli_agent.py: a scripted policy behind a real gateway, and a
small agent in real namespaces. Where the machine refuses namespaces these tests fail and say so."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import subprocess
import sys
import time
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.cli_agent import CommandLineAgent, share_of_passed
from examples.small_repositories import repositories
from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.rewards import no_reward
from megarl.rollout.workflows.agent import AgentWorkflow
from tests.coding_agents import ScriptedAgent, ScriptedPolicy, write
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.test_gateway import TEMPLATE

ROWS = list(repositories(DatasetConfig(), seed=1))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found.chat_template = TEMPLATE
    return found


def passed(texts: Mapping[str, str], tests: Mapping[str, str]) -> tuple[int, int]:
    """How many tests of a repository pass in this process, and how many there are."""
    with pytest.MonkeyPatch.context() as patch:
        for path, text in texts.items():
            if path not in ("README.md", "main.py"):
                module = types.ModuleType(path.removesuffix(".py"))
                exec(text, module.__dict__)
                patch.setitem(sys.modules, module.__name__, module)
        module = types.ModuleType("tests_of_it")
        try:
            for text in tests.values():
                exec(text, module.__dict__)
        except ImportError:
            return 0, 5
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    return result.testsRun - len(result.failures) - len(result.errors), result.testsRun


@pytest.mark.parametrize("seed", [1, 2])
def test_tests_fail_before_and_pass_after_the_solution(seed: int) -> None:
    rows = list(repositories(DatasetConfig(), seed=seed))
    assert len({r["messages"][0]["content"] for r in rows}) == len({r["name"] for r in rows}) == 20
    for row in rows:
        before, count = passed(row["files"], row["tests"])
        assert before < count == 5, row["name"]
        assert passed(row["files"] | row["solution"], row["tests"]) == (5, 5), row["name"]
        assert not set(row["solution"].values()) & set(row["files"].values())
    bugs = [passed(r["files"], r["tests"])[0] > 0 for r in rows]
    assert sum(bugs) == 10  # a bug fails some tests, a missing function all


def test_repositories_are_the_seeds() -> None:
    assert list(repositories(DatasetConfig(), seed=1)) == ROWS
    other = list(repositories(DatasetConfig(size=20), seed=2))
    assert all(a["tests"] != b["tests"] for a, b in zip(ROWS, other, strict=True))
    assert [r["name"] for r in repositories(DatasetConfig(size=3), seed=1)] == [
        r["name"] for r in ROWS[:3]
    ]


def run(
    tokenizer: Any,
    commands: Sequence[str],
    *,
    row: dict[str, Any] = ROWS[0],
    samples: int = 1,
    **options: Any,
) -> tuple[Any, ScriptedPolicy]:
    """A group of episodes in which the policy writes these commands. Returns its batch."""

    def script(prompt: str) -> str:
        return [*commands, "done"][prompt.count("<bos>assistant: ") - 1]

    async def inner() -> tuple[Any, ScriptedPolicy]:
        gconfig = GenerationHyperparameters(n_samples=samples, max_new_tokens=4096)
        flow = AgentWorkflow(
            no_reward, gconfig, tokenizer, agent=ScriptedAgent, agent_options=options
        )
        async with ScriptedPolicy(tokenizer, script) as policy:
            return await flow.arun_episode(policy, dict(row)), policy  # type: ignore[arg-type]

    return asyncio.run(inner())


def share(row: Mapping[str, Any]) -> float:
    """What a repository earns as it is."""
    good, count = passed(row["files"], row["tests"])
    return good / count


def test_episodes_of_a_group_are_a_row_each_and_earn_what_passes(tokenizer: Any) -> None:
    look = "pwd; ls; python -m unittest 2>&1 | tail -1"
    batch, policy = run(tokenizer, [look, write(ROWS[0]["solution"]), look], samples=2)
    assert batch["rewards"].tolist() == [1.0, 1.0]
    assert len(batch["input_ids"]) == 2
    assert int(batch["loss_mask"].sum()) == sum(w.output_len for w in policy.wrote)
    for wrote in policy.wrote:
        whole = [*wrote.input_tokens, *wrote.output_tokens]
        assert any(row[: len(whole)].tolist() == whole for row in batch["input_ids"])
    # both were at the same place, and saw the same
    assert len(policy.prompts) == 8 and len(set(policy.prompts)) <= 5  # times differ in no line
    last = max(policy.prompts, key=len)
    assert "/srv/repository" in last and "FAILED (failures=" in last and "0: /srv" in last
    assert last.rstrip().endswith("<bos>assistant:") and "OK" in last


def test_what_an_agent_may_not_do(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cret")
    row = ROWS[0]
    (name,) = row["tests"]
    always = "import os, sys, unittest\nclass T(unittest.TestCase):\n    def test_0(self): pass\n"
    connect = "python -c 'import socket; socket.create_connection((\"{}\", {}), 3)' 2>&1 | tail -1"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        batch, policy = run(
            tokenizer,
            [
                connect.format("127.0.0.1", listener.getsockname()[1]),
                connect.format("1.1.1.1", 80),
                f"touch {ROOT / 'touched'} /usr/touched ~/touched /tmp/touched 2>&1",
                "mount -o remount,rw / 2>&1; mount -t tmpfs none /usr 2>&1",
                "env; cat /proc/*/environ; ls /proc | grep -c '^[0-9]*$'; ls /run /dev/shm",
                write(
                    {name: always, "unittest.py": "", "sitecustomize.py": "import os; os._exit(0)"}
                ),
            ],
            row=row,
        )
    told = max(policy.prompts, key=len)
    assert "ConnectionRefusedError" in told and "Network is unreachable" in told
    for outside in (ROOT, Path("/usr")):
        assert f"'{outside / 'touched'}': Read-only file system" in told
        assert not (outside / "touched").exists()
    assert told.count("mount: ") == 2
    assert "s3cret" not in told and "MEGARL" not in told and "HOME=/srv/home" in told
    assert batch["rewards"].tolist() == [pytest.approx(share(row))]  # its own tests count nothing


class Paid:
    """An agent that sends a reward of its answer and of the whole, and returns `earned`."""

    def __init__(self, earned: float | None = 0.25) -> None:
        self.earned = earned

    async def run(self, data: dict[str, Any], url: str, key: str) -> float | None:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as client:
            asked = await client.post("/chat/completions", json={"messages": data["messages"]})
            for body in ({"reward": 1000.0, "id": asked.json()["id"]}, {"reward": 7.0}):
                seen.append((await client.post("/reward", json=body)).status_code)
        return self.earned


seen: list[int] = []


@pytest.mark.parametrize(
    ("agent", "status", "earned"),
    [
        (Paid, 403, 0.25),
        (Paid().run, 200, 0.25),  # what it returns is all that counts
        (Paid(None).run, 200, 1007.0),
    ],
)
def test_a_key_pays_nothing_where_the_agent_scores(
    tokenizer: Any, agent: Any, status: int, earned: float
) -> None:
    async def inner() -> Any:
        flow = AgentWorkflow(no_reward, GenerationHyperparameters(), tokenizer, agent=agent)
        async with ScriptedPolicy(tokenizer, lambda _: "done") as policy:
            return await flow.arun_episode(policy, dict(ROWS[0]))  # type: ignore[arg-type]

    seen.clear()
    assert asyncio.run(inner())["rewards"].tolist() == [earned]
    assert seen == [status, status]


@pytest.mark.parametrize(
    "text",
    ["import os\nos._exit(0)\n", "import sys\nsys.exit(0)\n", "print('0 passed x' * 9)\n", "1 +\n"],
)
def test_a_repository_cannot_say_that_it_passed(text: str, tmp_path: Path) -> None:
    repository = tmp_path / "agent" / "repository"
    repository.mkdir(parents=True)
    (repository / "middle.py").write_text(text)
    assert asyncio.run(share_of_passed(tmp_path, ROWS[0]["tests"])) == 0.0


def test_code_that_deceives_the_tests_earns_no_more_than_all_of_them(tmp_path: Path) -> None:
    repository = tmp_path / "agent" / "repository"
    repository.mkdir(parents=True)
    (repository / "middle.py").write_text(
        "import os, sys\nframe = sys._getframe()\n"
        "while 'mark' not in frame.f_locals:\n    frame = frame.f_back\n"
        "lines = [f'{frame.f_locals[\"mark\"]} passed {i}\\n' for i in range(99)]\n"
        "os.write(frame.f_locals['said'].fileno(), ''.join(lines).encode())\n"
    )
    assert asyncio.run(share_of_passed(tmp_path, ROWS[0]["tests"])) == 1.0


RUINS: dict[str, Callable[[Path], Any]] = {
    "no repository": lambda own: (own / "repository").rmdir(),
    "a closed repository": lambda own: (own / "repository").chmod(0),
    "a closed directory": lambda own: own.chmod(0),
    "no room for output": lambda own: (own / "output").mkdir(),
}


@pytest.mark.parametrize("ruin", RUINS)
def test_an_agent_that_ruins_its_directory_has_failed_the_tests(ruin: str, tmp_path: Path) -> None:
    own = tmp_path / "agent"
    (own / "repository").mkdir(parents=True)
    RUINS[ruin](own)
    try:
        assert asyncio.run(share_of_passed(tmp_path, ROWS[0]["tests"])) == 0.0
    finally:
        own.chmod(0o700)


def alive(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in command and "pytest" not in command:
            found.append(command)
    return found


def test_a_time_out_ends_all_that_an_agent_started(tokenizer: Any) -> None:
    began = time.monotonic()
    hangs = "setsid sleep 98765 & trap '' TERM; nohup sleep 98765"
    commands = [write(ROWS[0]["solution"]), hangs]
    batch, policy = run(tokenizer, commands, seconds=6.0)  # time for two answers on busy cores
    assert time.monotonic() - began < 30
    assert len(policy.wrote) == 2 and not alive("98765")
    assert batch["rewards"].tolist() == [1.0]  # what it had done counts


def test_a_cancelled_agent_ends(tokenizer: Any) -> None:
    async def inner() -> None:
        agent = ScriptedAgent()
        async with ScriptedPolicy(tokenizer, lambda _: "sleep 87654") as policy:
            gconfig = GenerationHyperparameters(max_new_tokens=64)
            async with policy.session(gconfig, tokenizer) as session:
                running = asyncio.create_task(
                    agent.run(dict(ROWS[0]), session.base_url, session.api_key)
                )
                while not alive("sleep\x0087654"):
                    assert not running.done()
                    await asyncio.sleep(0.05)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
        assert not alive("87654")

    asyncio.run(inner())


def test_an_agent_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "agent" / "repository").mkdir(parents=True)
    job = {"command": ["sleep", "76543"], "env": {"PATH": os.defpath}, "port": 1}
    code = "import asyncio, pathlib\nfrom examples.cli_agent import isolated\n"
    code += f"asyncio.run(isolated(pathlib.Path({str(tmp_path)!r}), {job!r}, 60))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as driver:
        wait_for(lambda: alive("sleep\x0076543"))
        driver.kill()
    wait_for(lambda: not alive("sleep\x0076543"))


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def refused(directory: Path) -> Path:
    """A directory with an unshare that a machine refuses."""
    fake = directory / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    return directory


def test_an_agent_never_runs_open(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = ScriptedAgent()
    touched = refused(tmp_path) / "touched"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(ScriptedAgent, "command", lambda *_: ["touch", str(touched)])
    monkeypatch.setattr("examples.cli_agent.own_environment", lambda: {"PATH": str(tmp_path)})
    with pytest.raises(RuntimeError, match=r"Operation not permitted.*namespaces"):
        ScriptedAgent()
    with pytest.raises(RuntimeError, match=r"Operation not permitted"):
        asyncio.run(agent.run(dict(ROWS[0]), "http://127.0.0.1:1/v1", "key"))
    assert not touched.exists()


def test_what_is_not_the_policys_is_a_failure_and_no_reward(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"nothing: no such program in PATH; install it"):
        ScriptedAgent(program="nothing")
    with monkeypatch.context() as patch:
        patch.setattr(ScriptedAgent, "command", lambda *_: ["/nothing/there"])
        batch, _ = run(tokenizer, [])
        assert not batch["valid"].any()
    batch, _ = run(tokenizer, ["ls"], row=ROWS[0] | {"tests": {"test_x.py": "1 +"}})
    assert not batch["valid"].any()


def test_a_repository_is_copied(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "x.py").write_text("X = 1\n")
    test = "import unittest\nfrom package.x import X\n\nclass T(unittest.TestCase):\n"
    test += "    def test_x(self):\n        self.assertEqual(X, 2)\n"
    row = {"messages": [{"role": "user", "content": "go"}], "directory": str(tmp_path)}
    row["tests"] = {"tests/__init__.py": "", "tests/test_x.py": test}
    batch, _ = run(tokenizer, ["sed -i s/1/2/ package/x.py"], row=row)
    assert batch["rewards"].tolist() == [1.0]
    assert (tmp_path / "package" / "x.py").read_text() == "X = 1\n"


def test_options_of_an_agent_are_checked(tokenizer: Any) -> None:
    gconfig = GenerationHyperparameters()
    agents: list[tuple[Any, dict[str, Any], str]] = [
        (ScriptedAgent, {"second": 3}, r"agent_options\.second.*seconds"),
        (ScriptedAgent, {"seconds": "many"}, r"agent_options\.seconds='many'"),
        (lambda data, url, key: 1.0, {"seconds": 3}, r"agent_options=.*a function takes none"),
    ]
    for agent, options, why in agents:
        with pytest.raises(ValueError, match=why):
            AgentWorkflow(no_reward, gconfig, tokenizer, agent=agent, agent_options=options)


def test_every_command_keeps_its_key_off_the_command_line() -> None:
    module = importlib.import_module("examples.cli_agent")
    kinds = [module.MiniSweAgent, module.OpenCode, module.Codex, module.ClaudeCode]
    for kind in kinds:
        agent: CommandLineAgent = kind(program=sys.executable)
        url = "http://127.0.0.1:5/s/1/v1"
        assert "do it" in agent.command("do it")
        assert "sk-1" not in " ".join(agent.command("do it"))
        shown = f"{agent.variables(url, 'sk-1')} {agent.settings(url)}"
        assert "sk-1" in shown and "127.0.0.1:5/s/1" in shown
