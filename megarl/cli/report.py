"""Writes one self-contained HTML file about one or several runs; the first is its subject.

--live serves it to a browser on this machine instead, at an address that nobody can guess, and
renews it at every step, until Ctrl-C.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from email.message import Message
from pathlib import Path

from megarl.cli import RUN, CommandParser
from megarl.cli.status import status
from megarl.config.errors import ConfigError
from megarl.observability.report import render_report, write_report

NO_PAGE = "no page: the address needs the secret path that `megarl report --live` printed\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or serves the report that `argv` asks for and returns 0. Raises ConfigError for a
    wrong command line, or a directory without a run."""
    parser = CommandParser("report", __doc__)
    parser.add_argument("runs", metavar="[LABEL=]RUN", nargs="+", help=RUN)
    parser.option("out", str, "the file to write (report.html)", "report.html")
    parser.option("title", str, "headline (the first run's label)")
    parser.switch("live", "serve it, and renew it at every step")
    parser.option("port", int, "with --live (a free one)", 0)
    args = parser.read(argv)
    try:
        if args.live:
            serve(args.runs, args.title, args.port)
        else:
            print(write_report(args.out, args.runs, title=args.title))
    except (ValueError, OSError) as e:
        raise ConfigError(str(e)) from e
    return 0


def serve(runs: Sequence[str], title: str | None, port: int) -> None:
    """Serves the report of `runs` until Ctrl-C, and prints where. Its page asks for the state of
    the runs, and is loaded again where that has changed. Raises what write_report does, ConfigError
    if the port is taken."""
    from megarl.observability.pages import PageServer  # here, as most reports are files

    root = f"/{secrets.token_urlsafe(16)}/"
    places = [Path(r if Path(r).exists() else r.rpartition("=")[2]) for r in runs]

    def state() -> str:
        each = map(status, places)
        return "; ".join(f"{now['run']}: step {now['step']}, {now['state']}" for now in each)

    def answer(path: str, _: Message) -> tuple[int, str]:
        if path == root:
            return 200, render_report(runs, title=title, live=state())
        return (200, state()) if path == f"{root}state" else (404, NO_PAGE)

    answer(root, Message())  # raises where a run is none
    with (
        PageServer(port, "text/html; charset=utf-8", answer, key="--port") as server,
        suppress(KeyboardInterrupt),
    ):
        print(f"http://127.0.0.1:{server.server_port}{root}", flush=True)
        server.serve_forever()
