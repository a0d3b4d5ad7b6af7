"""Shows where the seconds of grpo_vs_trl.py's step go, down to operations.

    python benchmarks/step_profile.py [--layout 2x1] [--lengths equal] [--profiled 2]
                                      [--root runs/step_profile]

Runs megarl's side of grpo_vs_trl.py once, with TRL's work: some plain steps, then steps with
torch's profiler in trainer 0 and in the loop of server 0. Prints Markdown tables: the plain steps
by phase, the update and the rollout by kind of work (see trace_times.py), and the operations that
take longest. The profiler makes small operations slower: its tables are for shares, the seconds are
those of the plain steps.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_task import LENGTHS, ROOT, make_model
from grpo_vs_trl import CORES, Contender, breakdown, contenders, mean, run_megarl, steady
from trace_times import Spent, by_part, events_of

sys.path.insert(0, str(ROOT))

WARMUP, PLAIN = 3, 5  # steps before the profiled ones
FIRST = WARMUP + PLAIN + 1  # profiled step
OPERATIONS = 8  # rows of a table of operations
# what the server's loop does -> the methods that do it
LOOP = {
    "prefill": ("running:RunningSequences.prefill",),
    "decode": ("running:RunningSequences.decode",),
    "attention": ("kv_cache:Prefill.attend", "kv_cache:Decode.attend"),
    "sampling": ("sampler:SamplingBatch.sample",),
}
TRAIN, PREFILL, DECODE = "train", "prefill", "decode"


def serve(out: str, steps: int, flags: list[str]) -> int:
    """Serves with a profiler in the loop's thread, from the weights before step FIRST to those
    after `steps` steps."""
    import torch

    from megarl.server.app import serve as serve_app
    from megarl.server.args import parse_args
    from megarl.server.scheduler import Scheduler

    def ranged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def inside(*args: Any, **kw: Any) -> Any:
            with torch.profiler.record_function(name):
                return call(*args, **kw)

        return inside

    for name, places in LOOP.items():
        for module, _, where in (place.partition(":") for place in places):
            owner, _, method = where.partition(".")
            found = getattr(importlib.import_module(f"megarl.server.{module}"), owner)
            setattr(found, method, ranged(name, getattr(found, method)))
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    versions, set_version = [str(FIRST - 1), str(FIRST - 1 + steps)], Scheduler.set_version

    def watched(self: Scheduler, version: str) -> None:
        set_version(self, version)
        if version not in versions:
            return
        versions.remove(version)
        if versions:
            profile.start()
        else:
            profile.stop()
            profile.export_chrome_trace(out)

    Scheduler.set_version = watched  # type: ignore[method-assign]
    return serve_app(parse_args(flags))


def start_server(c: Contender, model: Path, trace: Path, steps: int) -> Any:
    from megarl.rollout.server_process import ServerProcess
    from megarl.utils.processes import free_port

    host, port = "127.0.0.1", free_port("127.0.0.1", 0)
    command = [
        *(sys.executable, __file__, "--serve", str(trace), str(steps)),
        *("--model-path", str(model), "--port", str(port), "--threads", str(c.threads)),
        *("--dtype", "float32", "--context-length", "128"),
    ]
    env = {"MEGARL_DEVICE": "cpu", "OMP_NUM_THREADS": str(c.threads)}
    return ServerProcess(command, host=host, port=port, log_path=trace.with_suffix(".log"), env=env)


def measure(c: Contender, root: Path, lengths: str, steps: int) -> tuple[Contender, Path, Path]:
    """Runs the contender with profiled servers; returns it with the rows of its steady steps, and
    the traces of trainer 0 and of server 0."""
    from megarl.utils.job_token import ensure_job_token

    ensure_job_token()
    make_model(root / "model", lengths=lengths)
    traces = [root / f"server_{i}.json.gz" for i in range(c.processes)]
    with ExitStack() as stack:
        servers = []
        for trace in traces:
            servers.append(start_server(c, root / "model", trace, steps))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.wait_healthy(120.0)
        addresses = ",".join(server.address for server in servers)
        more = (f"rollout.addresses=[{addresses}]", f"profiler.start_step={FIRST}")
        c = replace(c, overrides=(*(c.overrides or ()), *more, f"profiler.steps={steps}"))
        # one step more than is profiled, for what writing the traces takes
        rows = run_megarl(c, root / "model", root, FIRST + steps)
    [train] = (root / "run" / "profile").glob("*.rank0.json.gz")
    return replace(c, rows=steady(rows, WARMUP)[:-1]), train, traces[0]


def kinds(head: str, rows: Iterable[tuple[str, float]], whole: float, steps: int) -> None:
    print(f"\n| {head} | ms a step | % |\n| --- | --- | --- |")
    for name, micros in rows:
        print(f"| {name} | {micros / 1e3 / steps:.0f} | {100 * micros / whole:.1f} |")


def operations(part: str, spent: Spent, steps: int) -> None:
    print(f"\n| operations of {part} | calls a step | ms a step | % |\n| --- | --- | --- | --- |")
    for name in [name for name, _ in spent.operations.most_common() if "::" in name][:OPERATIONS]:
        calls, micros = spent.calls[name] / steps, spent.operations[name]
        share = 100 * micros / spent.whole
        print(f"| `{name}` | {calls:.0f} | {micros / 1e3 / steps:.0f} | {share:.1f} |")


def report(c: Contender, train: Spent, server: dict[str, Spent], steps: int) -> None:
    """Prints all tables. c: with the rows of plain steps, then of `steps` profiled ones."""
    plain, profiled = c.rows[:-steps], c.rows[-steps:]
    breakdown(replace(c, rows=plain))
    took = [f"{1e3 * mean(rows, f'timing/{phase}_s'):.0f}"
            for phase in (TRAIN, "rollout") for rows in (profiled, plain)]  # fmt: skip
    print("\nWith the profiler (without), ms: train {} ({}), rollout {} ({}).".format(*took))
    kinds("the update, trainer 0", train.kinds.most_common(), train.whole, steps)
    operations("the update", train, steps)
    rollout = 1e6 * sum(row["timing/rollout_s"] for row in profiled)
    prefill, decode = server[PREFILL].whole, server[DECODE]
    rows = [(f"decode: {kind}", micros) for kind, micros in decode.kinds.most_common()]
    rows += [("prefill", prefill)]
    rows += [("requests, HTTP, rewards, the other servers", rollout - prefill - decode.whole)]
    kinds("the rollout, server 0", rows, rollout, steps)
    operations("decode", decode, steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ours = {c.name.split()[1]: c for c in contenders() if c.name.endswith("sync, TRL's work")}
    parser.add_argument("--layout", choices=ours, default=f"{CORES}x1", help="processes x threads")
    parser.add_argument("--lengths", choices=LENGTHS, default="equal")
    parser.add_argument("--profiled", type=int, default=2, help="steps")
    parser.add_argument("--root", type=Path, default=Path("runs/step_profile"))
    args = parser.parse_args()
    root = args.root.absolute()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    os.environ["MEGARL_DEVICE"] = "cpu"
    c, train, server = measure(ours[args.layout], root, args.lengths, args.profiled)
    spent = by_part(events_of(train), [TRAIN])[TRAIN]
    report(c, spent, by_part(events_of(server), [PREFILL, DECODE]), args.profiled)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
    main()
