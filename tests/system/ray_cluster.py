"""A Ray cluster on this machine: a head without CPUs, and nodes that can be replaced.

`python -m tests.system.ray_cluster FOLDER NODES` runs it until its standard input ends: in its own
process, since Ray reads some variables when it is imported. Everything listens on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.leftovers import Mark

# 127.0.0.1 stays what it is; by default Ray takes the host's outward address in its place
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
START = 120.0
# as /proc/net has them: a state, and 127.0.0.1, ::1 and ::ffff:127.0.0.1
LISTENS = "0A"
LOOPBACK = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
}


class RayCluster:
    """Nodes of 2 CPUs from `start` to `stop`. `env` is for launchers; a line "replace PID" to the
    pipe `orders` kills the node whose raylet that is, and adds another one."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root, self.nodes, self.mark = root, nodes, Mark()
        self.orders = root / "orders"
        self.env = os.environ | LOOPBACK_ONLY
        self.dashboard = ""

    def start(self) -> None:
        os.mkfifo(self.orders)
        # not Cluster's temp_dir: Ray would note this cluster in /tmp/ray, which all users share
        own = {"RAY_TMPDIR": str(self.root), "RAY_USAGE_STATS_ENABLED": "0"}
        with (self.root / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.root), str(self.nodes)],
                env=self.env | self.mark.env | own, stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        ready, deadline = self.root / "ready", time.monotonic() + START
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.1)
        found = json.loads(ready.read_text())
        self.env, self.dashboard = self.env | {"RAY_ADDRESS": found["address"]}, found["dashboard"]

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")[-4000:]

    def written(self) -> list[str]:
        """The texts of all files that Ray has written; not of those that it takes away meanwhile,
        as it writes some under a temporary name."""
        texts = []
        for folder, _, names in os.walk(self.root):  # passes over folders that are gone
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        texts.append(path.read_text(errors="replace"))
        return texts

    def listening(self) -> set[str]:
        """The addresses, without ports, that the cluster's processes listen at."""
        sockets, found = set(), set()
        for pid in self.mark.left():
            with contextlib.suppress(OSError):
                sockets |= {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                    found.add(fields[1].partition(":")[0])
        return found

    def stop(self) -> None:
        try:
            self.process.communicate(timeout=60)
            self.mark.assert_none_left(within=20.0)
        finally:
            self.mark.kill()


def main(root: Path, count: int) -> None:
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 << 20}
    head = {"node_ip_address": "127.0.0.1", "dashboard_host": "127.0.0.1", "dashboard_port": 0}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": True,
            "_system_config": {"health_check_period_ms": 1000},  # a lost node is noticed after 5 s
            **head,
            **small,
        },
    )
    nodes = {}

    def add() -> None:
        node = cluster.add_node(num_cpus=2, wait=False, **small)
        nodes[node.all_processes["raylet"][0].process.pid] = node

    for _ in range(count):
        add()
    cluster.wait_for_nodes()
    found = {"address": cluster.address, "dashboard": f"http://{cluster.head_node.webui_url}"}
    (root / "ready.new").write_text(json.dumps(found))
    (root / "ready.new").rename(root / "ready")
    with open(os.open(root / "orders", os.O_RDWR)) as orders:  # it never ends
        while sys.stdin not in (heard := select.select([orders, sys.stdin], [], [])[0]):
            pid = int(heard[0].readline().removeprefix("replace "))
            cluster.remove_node(nodes.pop(pid), allow_graceful=False)
            add()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
