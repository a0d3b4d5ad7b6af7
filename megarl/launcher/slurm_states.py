"""Reads the states of Slurm's jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass

FAILED = 1  # exit status of a job that Slurm ended
# states that a job does not leave by itself
TERMINAL = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
    "LAUNCH_FAILED",
    "RECONFIG_FAIL",
)
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
        """Says where the job stands, in Slurm's words, and of one that failed how to go on."""
        reason = f" ({self.reason})" if self.reason not in ("None", "") else ""
        if self.state == "PENDING":
            again = f", for attempt {self.restarts + 1}" if self.restarts else ""
            return f"PENDING{again}{reason}"
        if not self.over:
            return f"{self.state} on {self.nodes}" if self.nodes else self.state
        ended = f"{self.state}{reason}"
        if self.status:
            ended += "; start the same command again, to continue from the newest checkpoint"
        return ended


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
