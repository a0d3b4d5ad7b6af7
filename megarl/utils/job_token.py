"""Reads and makes the token that a job's own processes share."""

from __future__ import annotations

import os
import secrets
import threading

ENV = "MEGARL_JOB_TOKEN"
_making = threading.Lock()


def job_token() -> str | None:
    """Returns the job's token, None where the environment has none."""
    return os.environ.get(ENV) or None


def ensure_job_token() -> str:
    """Returns the job's token, the same to all threads, and puts a new one into the environment
    where there is none."""
    with _making:
        token = job_token()
        if token is None:
            token = os.environ[ENV] = secrets.token_hex(16)
        return token
