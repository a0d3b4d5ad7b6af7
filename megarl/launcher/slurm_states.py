"""Reads the states of Slurm's jobs, and says of each what it means for a run and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FAILED = 1  # exit status of a job that Slurm ended

_AGAIN = "start the same command again, to continue from the newest checkpoint"
# states that a job does not leave by itself
TERMINAL: Mapping[str, str] = {
    "COMPLETED": "the job is done",
    "FAILED": f"the job failed; its log says why. Then {_AGAIN}",
    "CANCELLED": f"somebody cancelled the job; {_AGAIN}",
    "TIMEOUT": (
        "the time limit came before the job had saved and queued again; raise "
        f"cluster.slurm.save_before above the time of a step and a checkpoint, then {_AGAIN}"
    ),
    "NODE_FAIL": (
        "a node was lost and the job may not queue again; set cluster.slurm.requeue=true, leave "
        f"the node out with cluster.slurm.sbatch_args=[--exclude=NODE], and {_AGAIN}"
    ),
    "PREEMPTED": (
        "a job with a higher priority took the nodes and this one may not queue again; set "
        f"cluster.slurm.requeue=true, or {_AGAIN}"
    ),
    "OUT_OF_MEMORY": (
        "a process took more host memory than the job has on a node; ask for whole nodes "
        "(cluster.slurm.exclusive) or more --mem, or lower what the servers and loaders take, "
        f"then {_AGAIN}"
    ),
    "BOOT_FAIL": f"a node did not boot; tell the administrators, and {_AGAIN}",
    "DEADLINE": (
        "the deadline of cluster.slurm.sbatch_args passed before the job could end; "
        f"change --deadline and {_AGAIN}"
    ),
    "REVOKED": f"another cluster of the federation took the job; {_AGAIN} there",
    "LAUNCH_FAILED": f"the nodes could not start the job; see Slurm's logs, then {_AGAIN}",
    "RECONFIG_FAIL": f"the nodes could not be configured as asked; {_AGAIN}",
}
# states that end by themselves, but for the held ones
PASSING = (
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "RESV_DEL_HOLD",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "EXPEDITING",
    "POWER_UP_NODE",
    "UPDATE_DB",
)
# reasons for which a job waits until somebody does something
STUCK: Mapping[str, str] = {
    "JobHeldUser": "it is held: scontrol release JOB lets it go",
    "JobHeldAdmin": "an administrator holds it; ask them",
    "DependencyNeverSatisfied": "what it depends on has failed: scancel JOB, and start it again",
    "PartitionTimeLimit": "cluster.slurm.minutes exceeds what the partition allows",
    "PartitionNodeLimit": "it wants more nodes than the partition has or allows",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionConfig": "no node of the partition is as large as asked",
    "BadConstraints": "no node meets the constraints of cluster.slurm.sbatch_args",
    "ReqNodeNotAvail": "a node it must have is drained, down or taken",
    "AssocGrpGRES": "the account's GPUs are all in use, or it may not have as many",
    "AssocMaxJobsLimit": "the account runs as many jobs as it may",
    "QOSMaxGRESPerUser": "the QOS allows a user fewer GPUs",
    "QOSMaxNodePerUserLimit": "the QOS allows a user fewer nodes",
    "QOSMaxWallDurationPerJobLimit": "cluster.slurm.minutes exceeds what the QOS allows",
    "InvalidAccount": "cluster.slurm.account may not be used here",
    "InvalidQOS": "the QOS of cluster.slurm.sbatch_args may not be used here",
    "Reservation": "it waits for the time of its reservation",
    "JobLaunchFailure": "the nodes could not start it; Slurm holds it: scontrol release JOB",
}  # fmt: skip
REASONS: Mapping[str, str] = {
    "JobLaunchFailure": (
        "Slurm could not start the script, or a signal killed it: is the log's directory there and "
        "writable on the nodes?"
    ),
    "RaisedSignal:53": "the log could not be written on the node",
}
_FIELD = re.compile(r"(?:^| )([A-Za-z]+)=(\S*)")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Holds what Slurm says of a job. exit_code and signal are those of its batch script."""

    state: str
    reason: str
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    nodes: str = ""

    @property
    def over(self) -> bool:
        """Returns whether the job has ended for good."""
        return self.state in TERMINAL

    @property
    def status(self) -> int:
        """Returns the exit status of a job that is over, as a shell gives it."""
        if self.state == "COMPLETED":
            return self.exit_code
        if self.state == "FAILED" and (self.exit_code or self.signal):
            return self.exit_code or 128 + self.signal
        return FAILED

    def sentence(self) -> str:
        """Says where the job stands and what to do about it."""
        if self.over:
            because = "" if self.reason in ("None", "") else f" ({self.reason})"
            more = REASONS.get(self.reason, "")
            return f"{self.state}{because}: {TERMINAL[self.state]}" + (f". {more}" if more else "")
        if self.state == "PENDING":
            first = self.reason.split(",")[0].strip()
            again = f", for attempt {self.restarts + 1}" if self.restarts else ""
            advice = f": {STUCK[first]}" if first in STUCK else ""
            return f"PENDING{again} ({self.reason}){advice}"
        return f"{self.state} on {self.nodes}" if self.nodes else self.state


def parse_job(text: str) -> JobState | None:
    """Reads a line of `scontrol -o show job`, the first one of a heterogeneous job's; None for
    another text."""
    line = (text.strip().splitlines() or [""])[0]
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        fields.setdefault(name, value)
    if "JobState" not in fields:
        return None
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    nodes = fields.get("NodeList", "")
    return JobState(
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        exit_code=int(code or 0),
        signal=int(number or 0),
        restarts=int(fields.get("Restarts", "0")),
        nodes="" if nodes == "(null)" else nodes,
    )
