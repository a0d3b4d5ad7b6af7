"""Computes rewards for a job's trainer, on a node without GPUs.

    python -m megarl.launcher.rewards --port P [--host H] [--workers N] [--timeout S]

    --host H       address to listen at (127.0.0.1)
    --workers N    rewards that are computed at once, each in a process of its own (2)
    --timeout S    seconds one reward may take (15)

It answers GET /health, and POST /score with the job's token: {"reward": "module:name",
"options", "args", "kw", "row_id"} is answered by {"reward": number, "parts": {name: number},
"notes": {name: text}}, or by {"error": text, "late": whether it took too long, "unavailable":
whether nobody could tell it}. Rewards are imported from this process's working directory and
PYTHONPATH. It needs MEGARL_JOB_TOKEN, since who can call it runs code of its choice here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megarl.config.command_line import parse_command_line
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.rollout.rewards import RewardError, RewardPool, RewardTimeout
from megarl.rollout.rewards.errors import RewardUnavailable
from megarl.rollout.rewards.parts import Scored
from megarl.rollout.rewards.remote import SCORE, found
from megarl.server.access import Access
from megarl.server.errors import ServerError
from megarl.server.replies import answer, guarded, read_json
from megarl.utils.importing import add_working_directory
from megarl.utils.job_token import ENV, job_token
from megarl.utils.stacks import dump_on_signal


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print((__doc__ or "").strip())
        return 0
    try:
        command = parse_command_line(argv, options=("host", "port", "workers", "timeout"))
        given = {"host": "127.0.0.1", "workers": "2", "timeout": "15"} | command.options
        try:
            port, workers = int(given["port"]), int(given["workers"])
            pool = RewardPool(workers, timeout=float(given["timeout"]))
        except (KeyError, ValueError) as e:
            raise ConfigError([f"give --port, and numbers: {e}"]) from e
        if (token := job_token()) is None:
            raise ConfigError([f"{ENV} is not set: who calls a reward worker runs code in it"])
    except ConfigError as e:
        print(e.report(), file=sys.stderr)
        return EXIT_CODE
    dump_on_signal()
    add_working_directory()
    with pool:
        _Http(uvicorn_config(pool, Access(given["host"], token), given["host"], port)).run()
    return 0


def uvicorn_config(pool: RewardPool, access: Access, host: str, port: int) -> uvicorn.Config:
    """Returns the server's settings: rewards run in `pool`, for those whom `access` lets in."""

    async def health(request: Request) -> Response:
        return Response()

    async def score(request: Request) -> Response:
        task = await read_json(request)
        try:
            fn, args, kw = found(task), tuple(task["args"]), dict(task["kw"])
        except (KeyError, TypeError, ValueError) as e:
            raise ServerError(f"no reward to compute: {type(e).__name__}: {e}") from e
        try:
            value = await pool.score(fn, args, kw, row_id=task.get("row_id", "?"))
        except RewardError as e:
            kinds = {"late": RewardTimeout, "unavailable": RewardUnavailable}
            return answer({"error": str(e)} | {k: isinstance(e, kind) for k, kind in kinds.items()})
        scored = value if isinstance(value, Scored) else Scored(value)
        return answer({"reward": float(value), "parts": scored.parts, "notes": scored.notes})

    anybody = functools.partial(access.check, control=False)
    own_job = functools.partial(access.check, control=True)
    routes = [
        Route("/health", guarded(health, anybody)),
        Route(SCORE, guarded(score, own_job), methods=["POST"]),
    ]
    return uvicorn.Config(
        Starlette(routes=routes),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )


class _Http(uvicorn.Server):
    """Ends with status 0 on a signal; uvicorn's own handler would raise it again at the end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
