"""Agents of nodes, as a scheduler starts them: two nodes of a trainer each, one of a server, and
once one of a reward worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.command_line import parse_command_line
from megarl.launcher.make import make_job
from megarl.launcher.plan import plan_cluster
from tests.system.test_launcher import TIMEOUT, TRAINER, WAIT, Stage, alive

# rank 0 asks for a reward that says who computed it: the parent of a worker's process
SCORING = """
if rank == "0":
    import asyncio
    from megarl.rollout.rewards import RewardPool
    key, _, addresses = sys.argv[-1].partition("=")
    assert key == "rollout.reward_addresses", key
    with RewardPool(1, timeout=30.0, addresses=addresses.strip("[]").split(",")) as pool:
        score = asyncio.run(pool.score(os.getppid, (), {}))
    (out / "scorer").write_text(str(int(score)))
"""


class Nodes(Stage):
    """Starts an agent for each node over the same records."""

    def begin(self, body: str, *more: str) -> list[subprocess.Popen[str]]:
        self.script.write_text(TRAINER + body)
        line = [
            str(self.script), *self.grpo, "actor.parallel.tp=2", "cluster.n_gpus_per_node=1",
            "cluster.interface=lo", "collective_timeout=60", *more,
        ]  # fmt: skip
        job = make_job(plan_cluster(parse_command_line(line)), os.environ, cluster=True)
        (self.path / "job.json").write_text(job.to_json())
        env = os.environ | {"OUT": str(self.path), "MEGARL_JOB_TOKEN": "0123456789abcdef"}
        self.agents = [
            subprocess.Popen(
                [sys.executable, "-m", "megarl.launcher.node", "--job", f"{self.path}/job.json",
                 "--attempt", "5.0", "--node-variable", "NUMBER"],
                env=env | {"NUMBER": str(node)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for node in range(len(job.pools))
        ]  # fmt: skip
        return self.agents

    def ends(self) -> tuple[list[int], str]:
        outputs = [agent.communicate(timeout=TIMEOUT)[0] for agent in self.agents]
        return [agent.returncode for agent in self.agents], "\n".join(outputs)

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait(TIMEOUT)
        super().close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


def test_nodes_meet_and_end_together(nodes: Nodes) -> None:
    nodes.begin("")
    statuses, output = nodes.ends()
    assert statuses == [0, 0, 0], output
    first, second = (facts["env"] for facts in nodes.trainers(2))
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "0")
    assert (second["GROUP_RANK"], second["LOCAL_WORLD_SIZE"]) == ("1", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "MEGARL_LLM_SERVER_ADDRS", "WORLD_SIZE"):
        assert first[name] == second[name]
    assert (nodes.path / "runs" / "e" / "t" / "logs" / "trainer_1.log").exists()
    nodes.all_gone()


def test_rewards_are_computed_on_a_node_of_their_own(nodes: Nodes) -> None:
    nodes.begin(SCORING, "cluster.reward_pool.n_nodes=1", "rollout.reward_workers=1")
    statuses, output = nodes.ends()
    assert statuses == [0, 0, 0, 0], output
    scorer, log = int((nodes.path / "scorer").read_text()), "runs/e/t/rewards_0.log"
    assert f"pid {scorer}, log {nodes.path / log}" in output
    assert not alive(scorer)
    nodes.all_gone()


def test_a_failure_on_one_node_ends_all_with_its_status(nodes: Nodes) -> None:
    nodes.begin("if rank == '1': print('the cause'); sys.exit(7)\n" + WAIT)
    statuses, output = nodes.ends()
    assert statuses == [7, 7, 7], output
    assert "trainer 1 exited with status 7" in output and "the cause" in output
    assert "node 1 ended with status 7" in output
    nodes.all_gone()


def test_sigusr1_is_a_wish_to_save_and_end(nodes: Nodes) -> None:
    """Which trainers hear as SIGTERM, and the server's node as a wait for them; a SIGUSR1 that the
    scheduler sends to every process ends none."""
    body = "signal.signal(signal.SIGTERM, lambda *a: (time.sleep(1), sys.exit(143)))\n"
    agents = nodes.begin(body + "(out / f'ready{rank}').touch()\n" + WAIT)
    nodes.until(lambda: len(list(nodes.path.glob("ready*"))) == 2, "the trainers are ready")
    for pid in nodes.pids():
        os.kill(pid, signal.SIGUSR1)
    for agent in agents:
        agent.send_signal(signal.SIGUSR1)
    statuses, output = nodes.ends()
    assert statuses == [143, 143, 143], output
    assert output.count("to save a checkpoint and end") == 2
    nodes.all_gone()
