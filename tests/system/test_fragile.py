"""A run whose servers, tools, environments and reward workers are killed at random loses no
episode, trains none twice, and none with a reward that came of a kill.

CHAOS_SEED in the environment gives the order and the moments of the kills, as in test_chaos.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.tools import confine
from tests.system import fragile
from tests.system.chaos import REWARD, SERVER, TRAINER, Chaos
from tests.system.test_recover import GRPO
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

BATCH, SAMPLES, SPARE = 8, 4, 40
TOOL, SANDBOX, GAME = "tool", "sandbox", "environment"
KINDS = (SERVER, REWARD, TOOL, SANDBOX, GAME)
PAUSE = (0.1, 0.6)  # seconds between two kills
SETTLE = 2  # steps with both servers there before one is killed again
# seconds that a reward worker has, to start: three that are killed amid one reward are an error
QUIET = 10.0
COMMON = f"""
    experiment_name=e trial_name=t total_train_epochs=1 actor.parallel.tp=2 valid_dataset=null
    train_dataset.batch_size={BATCH} train_dataset.options.level=2
    train_dataset.reward=tests.system.fragile:earned
    gconfig.seed=null gconfig.n_samples={SAMPLES} gconfig.max_new_tokens=6
    server.deterministic=false server.context_length=160 server.count=2 server.restarts=1000
    recover.mode=disabled stats_logger.table=false stats_logger.report=false saver.final=false
    collective_timeout=60 weight_sync.server_timeout=10
    rollout.request_timeout=20 rollout.episode_timeout=60 rollout.reward_workers=2
    rollout.max_head_offpolicyness=1 rollout.order=completion
    rollout.workflow=tests.system.fragile:FragileWorkflow
""".split()


class Kills(Chaos):
    """A run, and kills of what its episodes need."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.when = dict.fromkeys(KINDS, (0.0, 0))  # of a kind's latest kill: seconds, steps

    def harass(self, *, least: int) -> None:
        """Kills at random until the run ends, which it may once there were `least` kills, and one
        of every kind."""
        self.start()
        while self.alive() is None:
            self.pause(self.rng.uniform(*PAUSE))
            order = self.rng.sample(KINDS, len(KINDS))
            if kind := next((k for k in order if self.ready(k) and self.hit(k)), None):
                self.struck.append(kind)
                self.when[kind] = time.monotonic(), self.trained()
                self.say(f"kill: {kind}")
            if len(self.struck) >= least and set(self.struck) == set(KINDS):
                self.peace.touch()

    def ready(self, kind: str) -> bool:
        """Whether one of the kind may be killed: never the last server."""
        second, steps = self.when[kind]
        if not self.trained() or (kind == REWARD and time.monotonic() - second < QUIET):
            return False
        since = [r for r in self.stats()[-SETTLE:] if r["step"] > steps]
        full = [r for r in since if r.get("weight_sync/servers") == 2]
        return kind != SERVER or len(full) == SETTLE

    def hit(self, kind: str) -> bool:
        """Kills one of the kind; returns whether there was one."""
        try:
            os.kill(self.one(kind), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def found(self, kind: str) -> list[int]:
        """The process ids of a kind. Tools and environments do not inherit our mark."""
        words = {
            TOOL: (str(fragile.TOOLS), str(self.root)),
            GAME: (str(fragile.GAME), str(self.root)),
            SANDBOX: (str(confine.__file__),),
        }
        if kind not in words:
            return super().found(kind)
        parents = [f'"parent": {pid},' for pid in self.found(TRAINER)] if kind == SANDBOX else [""]
        return sorted(
            pid
            for pid, line in command_lines().items()
            if all(word in line for word in words[kind]) and any(p in line for p in parents)
        )

    def returned(self) -> dict[int, list[dict[str, Any]]]:
        """What the workflow returned, run by run, for every episode."""
        found = defaultdict(list)
        for line in (self.root / "returned").read_text().splitlines():
            record = json.loads(line)
            found[record["episode"]].append(record)
        return dict(found)

    def handed_out(self) -> dict[int, list[float]]:
        """The rewards that were trained, of every episode."""
        found: dict[int, list[float]] = {}
        for line in (self.root / "rows").read_text().splitlines():
            for episode, rewards in json.loads(line)["rewards"].items():
                assert int(episode) not in found, f"episode {episode} was handed out twice"
                found[int(episode)] = rewards
        return found


def command_lines() -> dict[int, str]:
    found = {}
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(place.parent.name)] = place.read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):  # it has just ended, or is none of ours
            continue
    return found


@pytest.fixture
def run(tmp_path: Path, seed: int, request: Any) -> Iterator[Kills]:
    model = save_tiny(tmp_path / "model", "qwen3", layers=2)
    save_tokenizer(model)
    steps: int = request.param
    keys = (f"actor.path={model}", f"train_dataset.size={BATCH * steps + SPARE}")
    log = f"rollout.workflow.options.log={tmp_path / 'returned'}"
    made = Kills(tmp_path, (*GRPO, *COMMON, *keys, log), steps=steps, seed=seed)
    yield made
    made.close()
    print(Counter(made.struck))


STEPS = [
    pytest.param(4, marks=pytest.mark.timeout(300)),
    pytest.param(66, marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize("run", STEPS, indirect=True)
def test_what_is_killed_is_made_anew_or_left_out_and_never_a_reward_of_zero(run: Kills) -> None:
    run.harass(least=2 * run.steps)
    returned, trained = run.returned(), run.handed_out()
    last = run.stats()[-1]
    assert len(trained) == BATCH * run.steps == last["rollout/trained"]
    # an episode is in the batch with all that its rewards were computed for, and nothing else
    for episode, rewards in trained.items():
        runs = returned[episode]
        assert sorted(rewards) == pytest.approx(sorted(r for run in runs for r in run["earned"]))
        assert min(rewards) >= fragile.LEAST
        assert len(rewards) == SAMPLES or (len(runs) == 2 and len(rewards) >= 2)
    # each row is one episode's, and is trained unless too many of its rollouts failed
    rows = Counter(runs[0]["row"] for runs in returned.values())
    assert max(rows.values()) == 1
    left_out = returned.keys() - trained.keys()
    assert all(sum(len(r["earned"]) for r in returned[e]) < 2 for e in left_out)
    assert last["rollout/rejected"] == len(left_out)
    assert last["rollout/submitted"] == len(returned) == len(trained) + len(left_out)
    # what failed is told, by kind
    failed = Counter(kind for runs in returned.values() for r in runs for kind in r["failed"])
    assert failed and failed.keys() <= {"tool", "environment", "reward"}
    assert last["rollout/failed_samples"] == failed.total()
    assert all(last[f"rollout/failed_samples/{kind}"] == n for kind, n in failed.items())
    assert last["rollout/trained_samples"] == sum(map(len, trained.values()))
    assert max(r["staleness/max"] for r in run.stats() if r["step"]) <= 1
    run.mark.assert_none_left()
    left = [line for line in command_lines().values() if str(run.root) in line]
    assert not left, left
