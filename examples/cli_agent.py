"""Coding agents that are commands: mini-swe-agent, opencode, codex, Claude Code.

    megarl launch --config configs/swe_grpo.yaml actor.path=MODEL

Each sample is a run of the command in a copy of the row's repository. It has namespaces of its own
(users, files, processes, network): it reaches the gateway and nothing else on the network, writes
to its own directory alone, and all that it started ends with it. Where the machine refuses
namespaces there is no run. The reward is the share of the repository's tests that pass afterwards.

A row holds `messages`, whose last is the task, `files` and `tests`, both texts by their paths;
instead of files, or beside them, the path `directory` of a repository to copy. The tests are
unittest's, in files test*.py. Needs Linux 5.12, unshare of util-linux 2.38, and the commands.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# where every sample finds its directory: prompts name it, and those of a group are to be equal
HERE = Path("/srv")
UNSHARE = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--mount-proc", "--fork"]
SCORING = 60.0  # seconds that the tests may take
log = logging.getLogger("megarl.examples.cli_agent")


class CommandLineAgent:
    """Runs a command as an agent; a subclass says which.

    program: its path, or its name in PATH. seconds: how long it may take; then it is ended, and the
    tests judge what it has done. Raises RuntimeError where it is not installed, or the machine
    refuses namespaces.
    """

    usual_program: str

    def __init__(self, *, program: str = "", seconds: float = 600.0) -> None:
        name = program or self.usual_program
        found = shutil.which(name)
        if found is None:
            raise RuntimeError(f"{name}: no such program in PATH; install it, or set program")
        self.program, self.seconds = os.path.abspath(found), seconds
        check_namespaces()

    def command(self, task: str) -> list[str]:
        """Returns the command line that works on a task. It is for everybody to read."""
        raise NotImplementedError

    def variables(self, base_url: str, api_key: str) -> dict[str, str]:
        """Returns the environment, beside PATH and HOME."""
        raise NotImplementedError

    def settings(self, base_url: str) -> dict[str, str]:
        """Returns the files of its home, texts by their paths."""
        return {}

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        """Returns the share of the tests that pass after the agent's work. Raises RuntimeError
        where the agent did not start, or the tests could not be run."""
        url = urlsplit(base_url)
        host, port = url.hostname or "", url.port or 80
        inner = url._replace(netloc=f"127.0.0.1:{port}").geturl()  # the relay's end
        with tempfile.TemporaryDirectory(prefix="megarl-", ignore_cleanup_errors=True) as top:
            own = Path(top, "agent")
            await asyncio.to_thread(lay_out, own, data, self.settings(inner))
            task = data["messages"][-1]["content"]
            env = own_environment() | self.variables(inner, api_key)
            job = {"command": self.command(task), "env": env, "port": port}
            async with relay(Path(top, "gateway"), host, port):
                said = await isolated(Path(top), job, self.seconds)
            if said[1:] and not said[1].startswith("ended with status 0"):
                log.info("%s: %s", self.program, said[1])
            return await share_of_passed(Path(top), data["tests"])


class MiniSweAgent(CommandLineAgent):
    """pip install mini-swe-agent mcp"""

    usual_program = "mini"

    def command(self, task: str) -> list[str]:
        end = ["-y", "--exit-immediately", "-c", "mini.yaml", "-o", str(HERE / "trajectory.json")]
        return [self.program, "-m", "openai/policy", "-t", task, *end]

    def variables(self, base_url: str, api_key: str) -> dict[str, str]:
        return {
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }


class OpenCode(CommandLineAgent):
    """npm install opencode-ai"""

    usual_program = "opencode"

    def command(self, task: str) -> list[str]:
        return [self.program, "run", "--format", "json", "--title", "task", task]

    def variables(self, base_url: str, api_key: str) -> dict[str, str]:
        limit = {"context": 200_000, "output": 4096}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "megarl",
            "options": {"baseURL": base_url, "apiKey": api_key},
            "models": {"policy": {"name": "policy", "limit": limit}},
        }
        config = {
            "model": "megarl/policy",
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "provider": {"megarl": provider},
        }
        off = "AUTOUPDATE MODELS_FETCH LSP_DOWNLOAD SHARE DEFAULT_PLUGINS CLAUDE_CODE"
        switches = {f"OPENCODE_DISABLE_{name}": "1" for name in off.split()}
        return switches | {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


class Codex(CommandLineAgent):
    """npm install @openai/codex"""

    usual_program = "codex"

    def command(self, task: str) -> list[str]:
        free = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
        return [self.program, "exec", *free, "--json", task]

    def variables(self, base_url: str, api_key: str) -> dict[str, str]:
        return {"MEGARL_KEY": api_key}

    def settings(self, base_url: str) -> dict[str, str]:
        lines = [
            'model = "policy"',
            'model_provider = "megarl"',
            'web_search = "disabled"',
            "check_for_update_on_startup = false",
            "analytics.enabled = false",
            "feedback.enabled = false",
            "features = { multi_agent = false, plugins = false, apps = false }",
            "[model_providers.megarl]",
            'name = "megarl"',
            f'base_url = "{base_url}"',
            'env_key = "MEGARL_KEY"',
            'wire_api = "responses"',
        ]
        return {".codex/config.toml": "\n".join(lines)}


class ClaudeCode(CommandLineAgent):
    """npm install @anthropic-ai/claude-code"""

    usual_program = "claude"

    def command(self, task: str) -> list[str]:
        free = ["--dangerously-skip-permissions", "--output-format", "json"]
        return [self.program, "-p", *free, task]

    def variables(self, base_url: str, api_key: str) -> dict[str, str]:
        off = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING")
        return {
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "IS_SANDBOX": "1",  # it is root in its namespace
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **dict.fromkeys(off, "1"),
        }


def check_namespaces() -> None:
    """Raises RuntimeError where the machine refuses what an agent is run in."""
    with tempfile.TemporaryDirectory() as top:
        lay_out(Path(top, "agent"), {"tests": {}}, {})
        try:
            tried = subprocess.run(
                launcher(top), input="", capture_output=True, text=True, timeout=60
            )
        except FileNotFoundError:
            why = "there is no unshare"
        else:
            if tried.stdout == "isolated\n":
                return
            why = tried.stderr.strip()
    raise RuntimeError(
        f"`{' '.join(UNSHARE)}` is refused: {why}. An agent runs in namespaces of its own, or not "
        "at all: allow them (in a container: --security-opt seccomp=unconfined)"
    )


def launcher(top: str) -> list[str]:
    """Returns the command that does a job in namespaces of its own, see `inside`."""
    return [*UNSHARE, "--kill-child", sys.executable, "-I", "-B", __file__, top]


def own_environment() -> dict[str, str]:
    """Returns what every agent gets: nothing of the job's but PATH, with this interpreter in it."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    home, scratch = str(HERE / "home"), str(HERE / "tmp")
    plain = {"LANG": "C.UTF-8", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
    return {"PATH": path, "HOME": home, "TMPDIR": scratch, **plain}


def lay_out(own: Path, data: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    """Writes a sample's directory: the repository, a home, a place for temporary files."""
    repository, home = own / "repository", own / "home"
    if "directory" in data:
        shutil.copytree(data["directory"], repository, symlinks=True)
    for at in (repository, home, own / "tmp"):
        at.mkdir(parents=True, exist_ok=True)
    write_texts(repository, {**data.get("files", {}), **data["tests"]})
    write_texts(home, settings)


def write_texts(top: Path, texts: Mapping[str, str]) -> None:
    for path, text in texts.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)


async def share_of_passed(top: Path, tests: Mapping[str, str]) -> float:
    """Returns the share of the tests that pass, as the row has them, whatever became of those in
    the repository. One that a time-out or an end of the process cut off has not passed."""
    mark = secrets.token_hex(16)  # the code under test does not know it
    job = {"tests": dict(tests), "mark": mark}
    said = await isolated(top, job, SCORING)
    if f"{mark} begins" not in said:
        raise RuntimeError("the tests of the repository were not run")
    passed = {line for line in said if line.startswith(f"{mark} passed ")}
    return len(passed) / max(1, sum(map(count_tests, tests.values())))


def count_tests(text: str) -> int:
    """Returns how many test methods a file defines."""
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        for node in ast.walk(ast.parse(text))
    )


async def isolated(top: Path, job: Mapping[str, Any], seconds: float) -> list[str]:
    """Does a job in namespaces of its own, see `inside`, and returns the lines that it said. After
    `seconds`, or where this call is cancelled, all its processes are killed. Raises RuntimeError
    where it did not begin."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *launcher(str(top)),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=own_environment(),
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    said = asyncio.gather(process.stdout.read(), process.stderr.read())
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(seconds):
                await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # and the kernel what is below: --kill-child, --pid
        out, err = await asyncio.shield(said)
        await process.wait()
    lines = out.decode(errors="replace").splitlines()
    if not lines:
        raise RuntimeError(f"no namespaces, so no run: {err.decode(errors='replace').strip()}")
    if lines[-1].startswith("not started"):
        raise RuntimeError(lines[-1])
    return lines


@contextlib.asynccontextmanager
async def relay(path: Path, host: str, port: int) -> AsyncIterator[None]:
    """Carries connections from a unix socket to an address while the context lasts."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await carried(reader, writer, asyncio.open_connection(host, port))

    async with await asyncio.start_unix_server(carry, path):
        yield


async def carried(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connecting: Any
) -> None:
    """Joins a connection and another that is about to be made, until both have ended."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await source.read(1 << 16):
                target.write(part)
                await target.drain()
        target.close()

    try:
        far_reader, far_writer = await connecting
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))


# in the namespaces, where this file is a script


def inside(top: str) -> None:
    """Takes a job from the first line of stdin and does it as the first process of its namespace:
    the tests of a repository, or a command that reaches the gateway. It ends with stdin. Without a
    job it only says that it is isolated."""
    line = sys.stdin.readline()
    job = json.loads(line) if line else {"command": [sys.executable]}
    out = os.open(top, os.O_PATH)  # what is outside is seen through it
    confine(
        Path(top, "agent"), [sys.executable, sys.base_prefix, __file__, *job.get("command", [])[:1]]
    )
    print("isolated", flush=True)
    if line:
        end = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        threading.Thread(target=lambda: (os.read(end, 1), os._exit(1)), daemon=True).start()
        os.chdir(HERE / "repository")
        if "tests" in job:
            run_tests(job["tests"], job["mark"])
        else:
            print(asyncio.run(run_command(job, f"/proc/self/fd/{out}/gateway")), flush=True)
    os._exit(0)


async def run_command(job: Mapping[str, Any], gateway: str) -> str:
    """Returns how a command ended, with the last of what it wrote."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await carried(reader, writer, asyncio.open_unix_connection(gateway))

    with open(HERE / "output", "w+b") as output:
        async with await asyncio.start_server(carry, "127.0.0.1", job["port"]):
            try:
                agent = await asyncio.create_subprocess_exec(
                    *job["command"], env=job["env"], stdout=output, stderr=output
                )
            except OSError as e:
                return f"not started: {e}; /tmp and {HERE} are the agent's own"
            status = await agent.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
            return f"ended with status {status}: {output.read().decode(errors='replace')!r}"


def run_tests(texts: Mapping[str, str], mark: str) -> None:
    """Runs the tests, which say `mark` and their names as they pass. What the code under test
    prints goes nowhere."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    tests = Path(tempfile.mkdtemp(dir="/dev/shm"))
    write_texts(tests, texts)
    sys.path[:0] = [str(tests), str(HERE / "repository")]

    class Result(unittest.TestResult):
        def addSuccess(self, test: unittest.TestCase) -> None:
            print(mark, "passed", test.id(), file=said)

    print(mark, "begins", file=said)
    found = unittest.defaultTestLoader.discover(str(tests), top_level_dir=str(tests))
    found.run(Result())


def confine(own: Path, needed: list[str]) -> None:
    """Has this process find `own` at HERE, and write nowhere else but to empty directories of its
    own at /run, /dev/shm, and at /tmp, unless what is needed stands there; begins its loopback;
    gives up the rights by which it could undo that. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(what: str, *arguments: Any) -> None:
        if getattr(libc, what)(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"{what}{arguments}: {os.strerror(error)}")

    def set_attributes(path: Path, added: int, taken: int) -> None:
        attributes = struct.pack("4Q", added, taken, 0, 0)
        call("syscall", 442, -100, os.fsencode(path), 0x8000, attributes, len(attributes))

    bind, read_only = 4096, 1
    call("mount", os.fsencode(own), os.fsencode(HERE), None, bind, None)
    places = [Path("/run"), Path("/dev/shm")]  # the sockets of the machine's services are in /run
    paths = [form for path in map(Path, needed) for form in (path, path.resolve())]
    if not any(path.is_relative_to("/tmp") for path in paths):
        places.append(Path("/tmp"))
    set_attributes(Path("/"), read_only, 0)
    set_attributes(HERE, 0, read_only)
    for place in places:
        call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", 6, None)  # no devices, no setuid
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sh22x", b"lo", 1))  # up
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # no program has it again
    call("prctl", 38, 1, 0, 0, 0)  # nor any that its file would give


if __name__ == "__main__":
    inside(sys.argv[1])
