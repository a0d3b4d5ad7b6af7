"""Writes numbers as Prometheus reads them (text format 0.0.4), and serves those of a run at
http://127.0.0.1:<stats_logger.metrics_port>/metrics to callers who have the job's token."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Mapping
from email.message import Message

from megarl.config.errors import ConfigError
from megarl.observability.pages import PageServer
from megarl.utils.env import JOB_TOKEN, job_token
from megarl.utils.http import authorization

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# metrics that count from the start of the run; failed_samples has more of them by kind
_COUNTS = r"""steps|rollout/(submitted|accepted|rejected|failed|dropped|handed_out|lost_answers|
(trained|skipped|retried)(_samples)?|worker_deaths|failed_samples(?!/len_mean)(/.+)?)|
server/(requests|tokens)"""
_COUNTER = re.compile(_COUNTS, re.VERBOSE)
_SPECIAL = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


def exposition(values: Mapping[str, float]) -> str:
    """Returns the page of some metrics: the gauge megarl_reward_mean for "reward/mean", the counter
    megarl_rollout_submitted_total for "rollout/submitted". HELP has the name as it stands here."""
    lines: dict[str, str] = {}  # of two names that are one there, the later
    for name, value in values.items():
        kind, end = ("counter", "_total") if _COUNTER.fullmatch(name) else ("gauge", "")
        metric = f"megarl_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}{end}"
        about = name.replace("\\", r"\\").replace("\n", r"\n")
        number = _SPECIAL.get(str(float(value)), str(float(value)))
        lines[metric] = f"# HELP {metric} {about}\n# TYPE {metric} {kind}\n{metric} {number}\n"
    return "".join(lines.values())


class PrometheusSink:
    """Serves the newest value of every metric of a run, on loopback. Raises ConfigError where the
    port is taken or the environment has no token."""

    def __init__(self, port: int, from_step: int | None) -> None:
        key = "stats_logger.metrics_port"
        if job_token() is None:
            raise ConfigError(f"{key}={port}: readers send the job's token; set {JOB_TOKEN}")
        self._server = PageServer(port, MEDIA_TYPE, self._answer, key=key)
        self._values: dict[str, float] = {}
        self.write(from_step or 0, {}, None)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        """Renews the page."""
        self._values |= {"steps": step, "last_step_timestamp_seconds": time.time(), **stats}
        self._page = exposition(self._values)

    def close(self, outcome: str) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, headers: Message) -> tuple[int, str]:
        """Answers with the page, where the caller has the token."""
        given = headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, authorization()["Authorization"].encode()):
            return 401, ""
        return (200, self._page) if path == "/metrics" else (404, "")
