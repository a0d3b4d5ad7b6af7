"""Names and writes the files that a launcher leaves for a job's nodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megarl.launcher.job import Job
from megarl.rpc.nodes import write_environment


@dataclass(frozen=True)
class JobFiles:
    """Names the files of a job: all in <run>/launch, which only the user may read. python: the
    interpreter of its nodes."""

    directory: Path
    python: str = sys.executable

    @classmethod
    def of(cls, job: Job) -> Self:
        """Returns those of a job, as absolute paths."""
        return cls(Path(job.working_directory, job.directory, "launch"), job.python)

    @property
    def job(self) -> Path:
        """Returns the file of the records."""
        return self.directory / "job.json"

    @property
    def environment(self) -> Path:
        """Returns the file of the variables that processes get."""
        return self.directory / "environment.json"

    def agent(self, attempt: str, *number: str) -> list[str]:
        """Returns the command of a node's agent. number: the options that say which node it is."""
        words = ["-m", "megarl.launcher.node", "--job", str(self.job), "--environment"]
        return [self.python, *words, str(self.environment), "--attempt", attempt, *number]

    def write_records(self, job: Job, env: Mapping[str, str]) -> None:
        """Writes the records, and the variables that processes get, for the user's eyes only."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.job.write_text(job.to_json(), encoding="utf-8")
        write_environment(
            self.environment, {name: env[name] for name in job.forwarded if name in env}
        )
