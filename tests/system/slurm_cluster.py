"""A Slurm cluster on this machine: one munged, one slurmctld, several slurmd, all on loopback.

Every node is a slurmd of its own port under the host's name; all files are below one directory, and
what was started is ended by its process id. Needs Debian's slurm-wlm and munge, whose slurmd may
run several times on a machine; no root.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
CPUS, MEMORY = 8, 8192  # of a node, whatever the machine has
PATH = f"{os.environ['PATH']}:/usr/sbin"

# NoInAddrAny has the daemons listen where the host's own name points to, which is loopback.
# cred_expire is also how long a job that is queued again waits. A node that is silent for
# SlurmdTimeout is down, and comes back by itself (ReturnToService).
CONF = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SrunPortRange={srun_ports}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=10
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=60
MessageTimeout=10
TCPTimeout=2
CompleteWait=0
ReturnToService=1
JobRequeue=1
MinJobAge=600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]


class SlurmCluster:
    """Nodes n1, n2, ... from `start` to `stop`; `env` is for Slurm's commands."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root, self.nodes = root, [f"n{i + 1}" for i in range(nodes)]
        self.env = os.environ | {"SLURM_CONF": str(root / "slurm.conf"), "PATH": PATH}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.root.chmod(0o755)  # munged wants nobody else to write to the way to its socket
        for name in ("munge", "state", "spool", "run", "log"):
            (self.root / name).mkdir(mode=0o755)
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._configure()
        munge = self.root / "munge"
        self._daemon(
            "munged", "munged", "--foreground", f"--socket={munge}/socket", f"--key-file={key}",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            "--num-threads=2",
        )  # fmt: skip
        self.until(20, "munged answers", lambda: (munge / "socket").exists())
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        self.until(30, "slurmctld answers", lambda: "is UP" in self.ask("scontrol", "ping"))
        for node in self.nodes:
            self.start_node(node)
        self.until(40, "all nodes are idle", lambda: self.states() == ["idle"] * len(self.nodes))

    def _configure(self) -> None:
        port, host = free_ports(len(self.nodes) + 301), socket.gethostname().split(".")[0]
        lines = [
            f"NodeName={node} NodeHostname={host} Port={port + 1 + i} CPUs={CPUS} Sockets=1 "
            f"CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY}"
            for i, node in enumerate(self.nodes)
        ]
        first = port + 1 + len(self.nodes)
        text = CONF.format(
            host=host, port=port, srun_ports=f"{first}-{first + 299}", root=self.root,
            user=getpass.getuser(), nodes="\n".join(lines),
        )  # fmt: skip
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _daemon(self, name: str, *command: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def start_node(self, node: str) -> None:
        self._daemon(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """The daemon alone, as of a node that its network has lost: its processes run on."""
        self.daemons[node].kill()
        self.daemons[node].wait(10)

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout

    def states(self) -> list[str]:
        """Of the nodes; a star behind one says that it has not answered yet."""
        return self.ask("sinfo", "-h", "-N", "-o", "%t").split()

    def field(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "-o", "show", "job", job))
        return found[1] if found else ""

    def until(self, seconds: float, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The end of every daemon's log."""
        files = sorted((self.root / "log").glob("*"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in files)

    def stop(self) -> None:
        """Ends jobs first, since a slurmd's end does not end what runs under it."""
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self.ask("scancel", "-u", getpass.getuser())
            self.until(20, "jobs have ended", lambda: not self.ask("squeue", "-h").strip())
        for process in reversed(self.daemons.values()):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        """Processes of this cluster's steps, by their environment."""
        mark, found = f"SLURM_CONF={self.env['SLURM_CONF']}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
        return [pid for pid in found if pid != os.getpid()]


def free_ports(count: int) -> int:
    """The first of so many ports in a row of which a few were free a moment ago."""
    for first in range(21000 + os.getpid() % 50 * 200, 60000, 400):
        with contextlib.ExitStack() as stack:
            try:
                for port in (first, first + 1, first + 2, first + count - 1):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")
