"""Starts three workers by the scheduler named in argv[1], with logs in argv[2]: calls them, loses
one, ends the others. Prints what it found as JSON; argv[3] "leave" kills this process instead."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from typing import Any

import megarl
from megarl.rpc.errors import WorkerDied
from megarl.rpc.group import GroupSpec, WorkerSpec


def main(name: str, folder: str, leave: bool) -> None:
    used: Any = {"ray": megarl.RayScheduler, "slurm": megarl.SlurmScheduler}[name](interface="lo")
    spec = GroupSpec(
        name="group",
        count=3,
        serve="tests.unit.rpc_handler:Service",
        options={"a": [1]},
        worker=WorkerSpec(cpus=1, memory=64 << 20, env={"MINE": "yes"}),
        log_dir=folder,
        start_timeout=120,
    )
    large = ""
    try:
        used.start(replace(spec, name="large", worker=WorkerSpec(memory=1 << 50), start_timeout=3))
    except (RuntimeError, TimeoutError) as e:
        large = str(e)
    group = used.start(spec)
    for client in group.clients:
        client.call("child")
    if leave:
        print("three workers have a child each", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    places = [client.call("place") for client in group.clients]
    names = ("RANK", "WORLD_SIZE", "MINE", "SLURMD_NODENAME", "RAY_RAYLET_PID")
    found: dict[str, Any] = {
        "large": large,
        "places": [
            (*place[:3], {k: place[3][k] for k in names if k in place[3]}) for place in places
        ],
        "same": len({place[3]["MASTER_PORT"] for place in places}),
        "loopback": all(w.address.startswith("127.0.0.1:") for w in group.workers),
    }
    group.clients[1].call("say", "its last words")
    dying = group.clients[1].call_async("sleep", 600)
    group.clients[1].call("at_once")
    os.kill(group.workers[1].pid, signal.SIGKILL)
    try:
        dying.result(60)
    except WorkerDied as e:
        found["died"] = str(e)
    try:
        group.clients[2].call("sleep", 600, timeout=60)
    except WorkerDied as e:
        found["others"] = str(e)
    used.close()
    found["ended"] = sorted((e.worker.name, e.status) for e in group.poll())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:] == ["leave"])
