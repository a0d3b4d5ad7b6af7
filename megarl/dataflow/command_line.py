"""Answers tools/plan.py's questions about dataflow graphs: where calls run, pictures of both."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import networkx as nx

from megarl.dataflow.costs import ModelCosts, StepWork
from megarl.dataflow.draw import draw_graph
from megarl.dataflow.gantt import draw_timeline, text_rows
from megarl.dataflow.graph import allocate, build_graph, calls_of, trained_models
from megarl.dataflow.graphs import GRAPHS
from megarl.dataflow.mesh import Allocation, Devices
from megarl.dataflow.recipes import recipe_graph
from megarl.dataflow.schedule import Simulator
from megarl.dataflow.search import Plan, options, search
from megarl.models.hf_config import ModelConfig
from megarl.models.value_model import value_model
from megarl.planning.traffic import Cluster

GIB = 1 << 30
VALUE_MODELS = ("critic", "reward_model")
ReadModel = Callable[[str], ModelConfig]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are about graphs."""
    add = parser.add_argument_group("dataflow graphs").add_argument
    add("--algorithm", choices=GRAPHS, help="the graph; without it that of the recipe (--config)")
    add("--graph", type=Path, metavar="FILE.svg", help="draw the graph, as placed")
    add(
        "--place",
        nargs="+",
        metavar="CALL=MESH",
        help='where calls run, such as "generate=g0-g7 dp4 pp2"',
    )
    add(
        "--search",
        action="store_true",
        help="search where on the training GPUs, and in which layout, each call runs",
    )
    add("--timeline", type=Path, metavar="FILE.svg", help="draw two steps of the best plan")
    add("--answer", type=int, help="tokens of an answer (default half of --sequence)")
    add("--critic", metavar="MODEL", help="critic and reward model (default: shaped like MODEL)")
    add("--seed", type=int, default=0, help="of the search (default %(default)s)")
    parser.set_defaults(cfg=None)


def asked(args: argparse.Namespace) -> bool:
    """Returns whether the question is about a graph."""
    return bool(args.search or args.graph or args.timeline or args.place)


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with a message for options that do not go together."""
    if asked(args) and not (args.algorithm or args.config):
        parser.error("say whose graph: --algorithm NAME or --config X.yaml")
    if args.timeline and not (args.search or args.place):
        parser.error("--timeline: say where calls run (--place), or --search for it")
    if args.answer is not None and not 0 < args.answer < args.sequence:
        parser.error(
            f"--answer {args.answer}: leave some of the {args.sequence} tokens to a prompt"
        )
    if args.model is None and (args.search or args.timeline):
        parser.error("give a MODEL or --config X.yaml")


def report(
    args: argparse.Namespace, devices: Devices, cluster: Cluster, read_model: ReadModel
) -> Iterator[str]:
    """Yields what is asked about a graph, and writes its pictures. Raises ValueError for calls or
    meshes that do not exist, and where nothing fits into memory."""
    graph = GRAPHS[args.algorithm]() if args.algorithm else recipe_graph(args.cfg, devices)
    title = args.algorithm.upper() if args.algorithm else f"{args.cfg.recipe}: {args.config}"
    graph = allocate(graph, dict(map(_placed, args.place or ())), devices)
    if args.model is not None and (args.search or args.place):
        title += f" of {args.model} on {args.train} {args.gpu.upper()}"
        plans = yield from _planned(graph, devices, args, cluster, read_model)
        chosen = plans["1" if args.search else "yours"]
        graph = allocate(graph, chosen.where, devices)
        if args.timeline:
            picture = draw_timeline(chosen.timeline.first(2), f"Two steps of {title}")
            yield _wrote(args.timeline, picture)
    if args.graph:
        yield _wrote(args.graph, draw_graph(graph, title))


def _placed(text: str) -> tuple[str, Allocation]:
    name, equals, where = text.partition("=")
    if not equals:
        raise ValueError(f'--place {text!r}: give a call and its mesh, such as "ref=g0-g3 tp2"')
    return name, Allocation.parse(where)


def _wrote(path: Path, picture: str) -> str:
    path.write_text(picture, encoding="utf-8")
    return f"wrote {path}"


def _planned(
    graph: nx.DiGraph,
    devices: Devices,
    args: argparse.Namespace,
    cluster: Cluster,
    read_model: ReadModel,
) -> Generator[str, None, dict[str, Plan]]:
    """Yields a table of plans and the timelines of the best, and returns the plans by name: all
    calls on all GPUs, those of --place, and what a search found. Frozen models rest in host memory
    between their calls."""
    frozen = {call.model for call in calls_of(graph)} - trained_models(graph)
    resting = [replace(c, offload=c.model in frozen) for c in calls_of(graph)]
    graph = build_graph(resting, given=graph.graph["given"], devices=devices)
    m, v = read_model(args.model), read_model(args.critic or args.model)
    value = value_model(v, v.raw, args.critic or args.model)
    models = {c.model: value if c.model in VALUE_MODELS else m for c in calls_of(graph)}
    costs, every = ModelCosts(models, cluster, _work(args)), options(graph, devices, models)
    wide = {k: [a for a in found if a.mesh == devices.all] for k, found in every.items()}
    plans = {"all GPUs": search(graph, wide, costs, keep=1, seed=args.seed)[0]}
    if args.place:
        where = {c.name: c.where for c in calls_of(graph) if c.where is not None}
        plans["yours"] = Plan(where, Simulator(graph, costs).run(where))
    if args.search:
        found = search(graph, every, costs, keep=args.top, seed=args.seed)
        plans |= {str(i): plan for i, plan in enumerate(found, 1)}
    yield from _said(list(every), plans, costs, args)
    return plans


def _work(args: argparse.Namespace) -> StepWork:
    answer = args.answer or args.sequence // 2
    return StepWork(
        answers=max(1, args.batch_tokens // args.sequence),
        prompt=args.sequence - answer,
        answer=answer,
        micro_batch_tokens=args.micro_batch_tokens,
        recompute=args.recompute or "full",
    )


def _said(
    calls: Sequence[str], plans: Mapping[str, Plan], costs: ModelCosts, args: argparse.Namespace
) -> Iterator[str]:
    work = costs.work
    yield (
        f"{len(calls)} calls on {args.train} {args.gpu.upper()}; a step has {work.answers} prompts "
        f"of {work.prompt} tokens and answers of {work.answer}"
    )
    cells = {n: [str(plan.where.get(c, "at home")) for c in calls] for n, plan in plans.items()}
    widths = [max(map(len, column)) + 2 for column in zip(calls, *cells.values(), strict=True)]
    yield f"\n{'plan':8}{'s/step':>8}{'GiB':>6}  " + _row(calls, widths)
    for name, plan in plans.items():
        size = plan.nbytes / GIB
        yield f"{name:8}{plan.seconds:8.1f}{size:6.0f}  " + _row(cells[name], widths)
        over = {call: n for call, n in plan.timeline.nbytes.items() if n > costs.capacity}
        if over:
            said = ", ".join(f"{call} takes {n / GIB:.0f} GiB" for call, n in over.items())
            yield f"{'':8}does NOT fit: {said}; {costs.capacity / GIB:.0f} GiB of a GPU may be used"
    first, *others = plans.items()
    for name, plan in (first, *others[:2]):
        yield f"\ntwo steps of plan {name}: ~ weights move, . devices wait"
        yield from text_rows(plan.timeline.first(2))
    saved = 1 - min(plan.seconds for plan in plans.values()) / first[1].seconds
    yield f"\nthe fastest takes {saved:.1%} less time than all calls on all GPUs"
    yield "these are a model's estimates: nothing here was measured"


def _row(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()
