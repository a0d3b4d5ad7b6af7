"""Plans a model on a cluster you need not have: memory per GPU, weight sync, layouts that fit.

    python tools/plan.py qwen3-235b-a22b --train 64x8 --tp 4 --pp 4 --ep 8 --serve 32x8
    python tools/plan.py --config configs/llama3_70b_grpo.yaml --train 8x8
    python tools/plan.py --config configs/quickstart_ppo.yaml --graph

MODEL is a directory with a config.json, such a file, or the name of a file in configs/models/.
With --config the answers are a recipe's, where no option says otherwise: its model, layout, batch
and servers. Nothing is loaded, and no GPU is needed.

With --graph the answer is the dataflow graph of an algorithm as Mermaid text: its calls, and on
which GPUs and in which layout each one runs (docs/controller.md).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, the script finds the package beside it

from megarl.config.engine import ParallelConfig  # noqa: E402
from megarl.config.loader import load_config  # noqa: E402
from megarl.dataflow.graph import allocate, draw_graph  # noqa: E402
from megarl.dataflow.graphs import GRAPHS, recipe_graph  # noqa: E402
from megarl.dataflow.mesh import Allocation, Devices  # noqa: E402
from megarl.models.hf_config import ModelConfig, parse_hf_config  # noqa: E402
from megarl.parallel.layout import Layout  # noqa: E402
from megarl.planning import advice, job, memory, sync  # noqa: E402
from megarl.planning.job import GIB  # noqa: E402

# memory in GiB, dense bf16 TFLOP/s, NVLink in GB/s one way: of data sheets that docs/engine.md
# names
GPUS = {
    "a100": (80, 312.0, 300),
    "h100": (80, 989.4, 450),
    "h800": (80, 989.4, 200),
    "h200": (141e9 / GIB, 989.4, 450),
    "b200": (180e9 / GIB, 2250.0, 900),
}
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
# options that are whole numbers above 0: the default, and what it counts
COUNTS = {
    **{name: (1, f"{name} of training") for name in DEGREES},
    "server-tp": (8, "GPUs of a server or replica"),
    "server-ep": (1, "ranks a server deals experts to"),
    "batch-tokens": (1 << 22, "of a step"),
    "micro-batch-tokens": (16384, "packed"),
    "sequence": (8192, "tokens of a sequence"),
    "bucket-mb": (512, "weight_sync.bucket_mb"),
    "top": (5, "layouts shown"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the plan. Exits with one line where the numbers do not fit together."""
    started = time.perf_counter()
    try:
        args = _arguments(argv)
        if args.graph:
            print(draw_graph(_graph(args)))
            return
        for line in report(args):
            print(line)
    except ValueError as e:
        raise SystemExit(f"plan: {e}") from None
    print(f"\nplanned in {time.perf_counter() - started:.1f} s")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?")
    add("--config", metavar="X.yaml", help="take what no option says from this recipe")
    add("--train", default="8x8", metavar="NODESxGPUS", help="training GPUs (default %(default)s)")
    parser.set_defaults(split=None, cfg=None)
    count = _number(int, 1 << 40, "a whole number > 0")
    for name, (default, what) in COUNTS.items():
        add(f"--{name}", type=count, default=default, help=f"{what} (default {default})")
    add("--serve", metavar="NODESxGPUS", help="GPUs of generation servers")
    add("--gpu", choices=GPUS, default="h100", help="default %(default)s")
    rate = _number(float, 1e9, "a number > 0")
    fraction = _number(float, 1, "a fraction above 0, at most 1")
    add("--nic-gbps", type=rate, default=400, help="network per GPU, Gbit/s (%(default)g)")
    add("--recompute", choices=("none", "full"), default="none", help="default %(default)s")
    add("--reference", action="store_true", help="a frozen reference model on the same GPUs")
    add("--sharded", action="store_true", help="plan a sync shard to shard, too (takes seconds)")
    add("--server-memory", type=fraction, default=0.85, help="mem_fraction_static of the servers")
    add("--server-fp8", action="store_true", help="servers hold weights of one byte")
    add("--turns", action="store_true", help="servers and trainers use the same GPUs in turn")
    _add_graph_options(parser)
    args = parser.parse_args(argv)
    if args.model and args.model.endswith((".yaml", ".yml")):
        parser.error(f"MODEL={args.model}: a configuration; write --config {args.model}")
    if args.config:
        cfg = load_config(args.config)
        parser.set_defaults(cfg=cfg, **job.questions(cfg))
        args = parser.parse_args(argv)
    if isinstance(args.graph, str):
        parser.error(f"--graph {args.graph}: the graph is printed as Mermaid text; use > FILE.mmd")
    if args.graph and not (args.algorithm or args.config):
        parser.error("say whose graph: --algorithm NAME or --config X.yaml")
    if args.place and not args.graph:
        parser.error("--place says where the calls of a --graph run: add --graph")
    if args.model is None and not args.graph:
        parser.error("give a MODEL or --config X.yaml")
    return args


def _add_graph_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dataflow graphs").add_argument
    add("--graph", nargs="?", const=True, help="print the graph as Mermaid text, as placed")
    add("--algorithm", choices=GRAPHS, help="the graph; without it that of the recipe (--config)")
    add("--place", nargs="+", metavar="CALL=MESH", help='where calls run: "ref=g0-g3 tp2" ...')
    for name in ("--search", "--timeline", "--answer", "--critic", "--seed"):
        add(name, nargs="?", action=_Gone, help=argparse.SUPPRESS)


class _Gone(argparse.Action):
    """Refuses an option of the search for places, which there is no more."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(
            f"{self.option_strings[0]}: calls are no longer searched for, simulated or timed; say "
            "where they run (--place), and see what ran when with `megarl trace RUN`"
        )


def _number(kind: type[int] | type[float], most: float, what: str) -> Callable[[str], float]:
    """Returns a function that reads a number above 0, up to `most`; `what` names it in an error."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: must be {what}")
        return value

    return read


def report(args: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of a plan of one model's training."""
    m = read_model(args.model)
    gpus = math.prod(_grid("--train", args.train))
    cluster = _cluster(args)
    degrees = {name: getattr(args, name) for name in DEGREES}
    # a recipe's split is for as many stages as the recipe has
    split = args.split if args.split and len(args.split) == args.pp * args.vpp else None
    parallel = ParallelConfig(**degrees, sequence_parallel=args.tp > 1, pipeline_split=split)
    layout = advice.make_layout(m, gpus, parallel)
    others, resting = job.other_models(args.cfg, gpus, read_model) if args.cfg else (0, 0)
    work = job.workload(vars(args), others=others, resting=resting)
    if args.reference:
        size = memory.model_bytes(m, layout, work, trained=False)
        key = "resting" if args.turns else "others"
        work = replace(work, **{key: getattr(work, key) + size})
    total, active = memory.parameters(m)
    yield f"{m.family}: {total / 1e9:.1f}B parameters, {active / 1e9:.1f}B of them per token"
    yield f"training on {gpus} {args.gpu.upper()}: {_describe(layout, work.recompute)}\n"
    yield from job.memory_report(m, layout, work, cluster, vars(args))
    step = advice.estimate_step(m, layout, cluster, work)
    parts = ", ".join(f"{name} {x:.1f}" for name, x in vars(step).items())
    yield f"  a step of {work.batch_tokens:,} tokens: {step.seconds:.1f} s ({parts})"
    if args.serve:
        yield from _serving(m, layout, cluster, args)
    yield from _advice(m, gpus, cluster, work, layout, args.top)


def _graph(args: argparse.Namespace) -> nx.DiGraph:
    devices = Devices(*_grid("--train", args.train))
    graph = GRAPHS[args.algorithm]() if args.algorithm else recipe_graph(args.cfg, devices)
    return allocate(graph, dict(map(_placed, args.place or ())), devices)


def _placed(text: str) -> tuple[str, Allocation]:
    name, equals, where = text.partition("=")
    if not equals:
        raise ValueError(f'--place {text!r}: give a call and its mesh, such as "ref=g0-g3 tp2"')
    return name, Allocation.parse(where)


def _cluster(args: argparse.Namespace) -> advice.Cluster:
    gib, tflops, nvlink = GPUS[args.gpu]
    return advice.Cluster(
        gpus_per_node=_grid("--train", args.train)[1],
        gpu_bytes=int(gib * GIB),
        peak_flops=tflops * 1e12,
        nvlink=nvlink * 1e9,
        nic=args.nic_gbps / 8 * 1e9,
    )


def read_model(name: str) -> ModelConfig:
    """Returns the shapes of a model by the name of its file in configs/models, or by its path."""
    return parse_hf_config(job.find_shapes(name, ROOT / "configs" / "models"), name)


def _grid(option: str, value: str) -> tuple[int, int]:
    parts = value.split("x")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"{option} {value}: give nodes and GPUs of a node, such as 64x8")
    return int(parts[0]), int(parts[1])


def _describe(layout: Layout, recompute: str) -> str:
    degrees = {n: getattr(layout, n) for n in ("dp", *DEGREES)}
    said = " ".join(f"{n}{v}" for n, v in degrees.items() if v > 1) or "one GPU"
    if layout.split:
        said += f", pipeline_split {list(layout.split)}"
    return said + (", recomputing" if recompute == "full" else "")


def _serving(
    m: ModelConfig, layout: Layout, cluster: advice.Cluster, args: argparse.Namespace
) -> Iterator[str]:
    gpus = math.prod(_grid("--serve", args.serve))
    receivers = sync.Receivers(gpus=gpus, tp=args.server_tp)
    if receivers.gpus % receivers.tp:
        raise ValueError(f"--server-tp {receivers.tp} does not divide {receivers.gpus} GPUs")
    if args.turns and layout.world_size <= cluster.gpus_per_node:
        cluster = replace(cluster, nic=cluster.nvlink)  # all of it stays on one node
    weights = memory.server_weights(m, args.server_tp) // (2 if args.server_fp8 else 1)
    per_token = memory.kv_bytes_per_token(m, args.server_tp)
    room = args.server_memory * cluster.gpu_bytes - weights
    yield f"\nserving on {receivers.gpus} GPUs, {receivers.servers} servers of tp{receivers.tp}"
    kv = f"{room / GIB:.1f} GiB of KV cache, {room / per_token:,.0f} tokens of a server"
    if states := memory.state_bytes_per_sequence(m, args.server_tp):
        kv += f" less {states / per_token:,.0f} a sequence for its states"
    if room <= 0:
        kv = "which does NOT fit: raise --server-tp or take larger GPUs"
    yield f"  {weights / GIB:.1f} GiB of weights per GPU, {kv}"
    broadcast = sync.estimate_broadcast(m, layout, receivers, cluster, args.bucket_mb << 20)
    yield from _broadcast(broadcast, layout)
    if args.sharded:
        yield from _sharded(m, layout, receivers, cluster, args)


def _broadcast(e: sync.BroadcastEstimate, layout: Layout) -> Iterator[str]:
    def gb(n: float) -> str:
        return f"{n / 1e9:,.1f} GB"

    yield f"\none weight sync: {gb(e.nbytes)} in {e.buckets} buckets"
    yield f"  gather to the sender   NVLink {gb(e.gather_nvlink)}, network {gb(e.gather_nic)}"
    yield f"  broadcast to servers   NVLink {gb(e.broadcast_nvlink)}, network {gb(e.broadcast_nic)}"
    yield (
        f"  busy                   gather {e.gather_seconds:.1f} s, broadcast "
        f"{e.broadcast_seconds:.1f} s, servers' loading {e.load_seconds:.1f} s"
    )
    yield f"  estimate {e.seconds:.1f} s, bound by the {e.bottleneck}"
    yield (
        f"  no less than {e.bound:.1f} s by the links; {e.sharded_bound:.1f} s if every server GPU "
        f"fetched its own slice from {layout.world_size} GPUs"
    )


def _sharded(
    m: ModelConfig,
    layout: Layout,
    receivers: sync.Receivers,
    cluster: advice.Cluster,
    args: argparse.Namespace,
) -> Iterator[str]:
    size = (args.bucket_mb << 20) // 2  # one round is copied, the next under way
    started = time.perf_counter()
    plan = sync.plan_sharded(m, layout, receivers, server_ep=args.server_ep, round_bytes=size)
    planned = time.perf_counter() - started
    e = sync.estimate_sharded(plan, cluster)
    yield f"\nshard to shard: {e.total / 1e9:,.1f} GB in {e.rounds} rounds of {size:,} bytes"
    yield (
        f"  a server GPU takes     {e.received / 1e9:.1f} GB in {e.messages:,} messages (largest "
        f"{e.largest / 1e6:.1f} MB), senders: {e.senders}"
    )
    yield f"  a training GPU sends   {e.sent / 1e9:.1f} GB"
    yield (
        f"  busy                   network {e.network_seconds:.2f} s, copies {e.copy_seconds:.2f} s"
    )
    yield f"  estimate {e.seconds:.2f} s; tables and plan took {planned:.1f} s here"


def _advice(
    m: ModelConfig,
    gpus: int,
    cluster: advice.Cluster,
    work: memory.Workload,
    layout: Layout,
    top: int,
) -> Iterator[str]:
    found = list(advice.candidates(m, gpus, cluster, work, cp=layout.cp))
    fit = advice.best(found, cluster)
    yield f"\nadvice: of {len(found)} layouts tried, {len(fit)} fit"
    if not fit and found:
        least = min(found, key=lambda c: c.bytes)
        yield f"  the smallest takes {least.bytes / GIB:.0f} GiB per GPU: {_line(least)}"
        yield "  use more GPUs, larger ones, or smaller micro-batches (--micro-batch-tokens)"
    for c in fit[:top]:
        yield f"  {c.step.seconds:8.1f} s a step, {c.bytes / GIB:5.0f} GiB: {_line(c)}"


def _line(c: advice.Candidate) -> str:
    return _describe(replace(c.layout, split=None), c.recompute)


if __name__ == "__main__":
    main()
