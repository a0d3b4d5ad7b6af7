"""Adapts verifiers (0.3 and 0.4): builds an environment, runs episodes, flattens their traces."""

import asyncio
import itertools

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class Environment:
    """Holds one environment.

    settings: env (an EnvConfig as JSON), harness (of the agents that name none; "" is the
    taskset's own), concurrent (episodes at once).
    """

    def __init__(self, settings):
        self._env = load_environment(_config(settings["env"], settings["harness"]))
        self.id = self._env.config.env_id
        self._task = type(self._env.taskset).task_type()
        self._gate = asyncio.Semaphore(settings["concurrent"])

    def serving(self):
        """Returns the context in which episodes can run."""
        return self._env.serving()

    def tasks(self, count):
        """Returns the data of the first `count` tasks, of all where it is None."""
        taskset = self._env.taskset
        if count is None and taskset.INFINITE:
            raise ValueError(f"{self.id} makes tasks without end: set the data set's size")
        return [t.data.model_dump(mode="json") for t in itertools.islice(taskset, count)]

    async def run(self, message, client):
        """Returns an episode as plain JSON; logprobs keep every digit, which `to_record` does
        not."""
        data = self._task.data_type().model_validate(message["task"])
        task = self._task(data, self._env.config.taskset.task)
        context = vf.ModelContext(
            model=message["model"],
            client=vf.TrainClientConfig.model_validate(client),
            sampling=vf.SamplingConfig.model_validate(message["sampling"]),
        )
        (slot,) = self._env.slots(task)
        episode = await self._env.run_slot(slot, context, self._gate)
        errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
        return {
            "ok": episode.ok,
            "errors": [f"{e.type}: {e.message}" for e in errors],
            "traces": [_trace(t) for t in episode.traces],
        }


def _config(data, harness):
    """Returns the config, in which every agent has a harness and runs here: verifiers' own default
    is a paid runtime elsewhere."""
    data = dict(data)
    for role in agent_config_fields(resolve_env_config(data)):
        seat = dict(data.get(role) or {})
        seat.setdefault("runtime", {"type": "subprocess"})
        if harness:
            seat.setdefault("harness", {"id": harness})
        data[role] = seat
    return resolve_env_config(data)


def _trace(trace):
    return {
        "id": trace.id,  # the X-Session-ID of its requests
        "reward": trace.reward,
        "samples": _samples(trace),
    }


def _samples(trace):
    """Returns the branches to train on. A sampled node that several share is in the first's
    mask."""
    out, seen = [], set()
    for branch in trace.branches:
        if not trace.agent.trainable or not getattr(branch, "trainable", True):  # 0.3 has none
            continue
        mask = []
        for node in branch.nodes:
            mask += [False] * len(node.mask) if id(node) in seen else list(node.mask)
            seen.add(id(node))
        if any(mask):
            sample = {"token_ids": branch.token_ids, "mask": [int(m) for m in mask]}
            out.append(sample | {"logprobs": branch.logprobs})
    return out
