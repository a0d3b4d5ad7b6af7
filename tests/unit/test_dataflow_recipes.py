"""Graphs of recipes, graphs as Mermaid text, and the command that prints them."""

from __future__ import annotations

import re
from pathlib import Path

import networkx as nx
import pytest

from megarl.config.engine import ParallelConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.controller.graph import GraphPlan
from megarl.dataflow.graph import (
    INFERENCE,
    TRAIN_STEP,
    Call,
    allocate,
    build_graph,
    calls_of,
    draw_graph,
    trained_models,
)
from megarl.dataflow.graphs import GRAPHS, ppo, recipe_graph
from megarl.dataflow.mesh import Allocation, Devices, Mesh
from megarl.graph_trainer import GraphTrainer
from megarl.trainer.user_code import Named, code_problems
from tools import plan as tool

ROOT = Path(__file__).parents[2]
BOX = re.compile(r' +(c\d+)(\W+)"([^"]+)"\W+')
ARROW = re.compile(r' +(c\d+) (-->|-\.->)\|"([^"]+)"\| (c\d+)')


def at(first: int, count: int, **degrees: int) -> Allocation:
    return Allocation(Mesh(first, count), ParallelConfig(**degrees))


def read(text: str) -> tuple[dict[str, list[str]], list[tuple[str, str, str, str]]]:
    """The boxes of a drawing, by name the lines of each, and its arrows: (from, arrow, label, to).
    Every line is one of them."""
    first, *lines = text.splitlines()
    assert first == "flowchart LR"
    boxes = [m for line in lines if (m := BOX.fullmatch(line))]
    arrows = [m for line in lines if (m := ARROW.fullmatch(line))]
    assert len(boxes) + len(arrows) == len(lines)
    names = {m[1]: m[3].split("<br/>") for m in boxes}
    shown = [(names[m[1]][0], m[2], m[3], names[m[4]][0]) for m in arrows]
    return {words[0]: words[1:] for words in names.values()}, shown


def many_edges() -> nx.DiGraph:
    calls = [Call("first", "m0", INFERENCE, ("prompts",), ("k0",))]
    for i in range(1, 8):
        keys = tuple(f"k{j}" for j in range(i))
        calls.append(Call(f"call_{i}", f"m{i % 3}", INFERENCE, keys, (f"k{i}",)))
    return build_graph([*calls, Call("fit", "m0", TRAIN_STEP, ("k2",))])


@pytest.mark.parametrize(
    "graph",
    [*(make() for make in GRAPHS.values()), ppo(recompute=True), many_edges()],
    ids=[*GRAPHS, "recompute", "many"],
)
def test_a_graph_shows_every_call_and_key(graph: nx.DiGraph) -> None:
    boxes, arrows = read(draw_graph(graph))
    calls = {call.name: call for call in calls_of(graph)}
    assert boxes == {name: [f"{call.model}: {call.kind}"] for name, call in calls.items()}
    data = {(a, b): label for a, arrow, label, b in arrows if arrow == "-->"}
    edges = graph.edges(data="keys")
    assert data == {(a, b): ", ".join(keys) for a, b, keys in edges if keys}
    later = {label for _, _, label, _ in arrows if label.startswith("new ")}
    assert later == {f"new {model}, next step" for model in trained_models(graph)}


def test_a_placed_graph_says_where_and_how_and_weights_are_dotted() -> None:
    calls = [
        Call("train", "m", TRAIN_STEP, ("prompts",), where=at(0, 4, pp=2)),
        Call("watch", "m", INFERENCE, ("prompts",), ("entropy",), where=at(2, 2)),
    ]
    boxes, arrows = read(draw_graph(build_graph(calls)))
    assert boxes == {
        "train": ["m: train_step", "g0-g3 dp2 pp2"],
        "watch": ["m: inference", "g2-g3 dp2"],
    }
    assert arrows == [
        ("watch", "-.->", "old m", "train"),
        ("train", "-.->", "new m, next step", "watch"),
    ]
    where = {"generate": at(0, 8, pp=2), "values": at(0, 2), "train_actor": at(0, 4, pp=2)}
    boxes, _ = read(draw_graph(allocate(ppo(), where, Devices(1, 8))))
    placed = {name: words[1] for name, words in boxes.items() if len(words) > 1}
    assert placed == {name: str(place) for name, place in where.items()}


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("quickstart_ppo", "generate ref logp values gae train_critic train_actor"),
        ("quickstart_grpo", "generate ref logp advantages train_actor"),
        ("quickstart_sft", "train"),
    ],
)
def test_the_graph_of_a_recipe_has_its_calls_and_layouts(recipe: str, names: str) -> None:
    cfg = load_config(str(ROOT / "configs" / f"{recipe}.yaml"))
    graph = recipe_graph(cfg, Devices(1, 4))
    assert [call.name for call in calls_of(graph)] == names.split()
    places = {str(call.where) for call in calls_of(graph) if call.where is not None}
    assert places and all(place.startswith("g0-g3 ") for place in places)


def test_the_calls_of_the_example_run_where_it_says_and_its_options_are_read() -> None:
    cfg = load_config(str(ROOT / "examples" / "ppo_graph.yaml"))
    where = cfg.trainer.options["where"]
    plan = GraphPlan(recipe_graph(cfg, Devices(1, 4), where))
    assert {str(copy) for copy in plan.copies} == {
        "actor on g0-g1 tp2",
        "critic on g2-g3 tp2",
        "ref on g2-g3 tp2",
    }
    by_name = {task.name: task for task in plan.tasks}
    assert by_name["values"].ranks == {2, 3} and by_name["gae"].ranks == {0, 1}
    for wrong, message in (
        ({"train": "g0"}, "no call is named 'train'; the graph's are"),
        ({"ref": "g1-g2 tp2"}, "mesh g1-g2: a mesh is whole nodes"),
        ({"ref": "g0-g1 dp4"}, "'g0-g1 dp4': dp4 does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe_graph(cfg, Devices(1, 4), wrong)
    for name, about in (("where", {}), ("place", {})):
        code = Named(key="trainer", target=cfg.trainer.type, kind="trainer", options={name: about})
        assert any(code_problems([code])) == (name == "place")


def test_a_mesh_for_generation_is_refused() -> None:
    cfg = load_config(str(ROOT / "examples" / "ppo_graph.yaml"))
    where = cfg.trainer.options["where"] | {"generate": "g0-g3 tp2"}
    with pytest.raises(ConfigError, match=r"where\.generate=g0-g3 tp2"):
        GraphTrainer.make_graph(None, cfg, Devices(1, 4), where)
    assert GraphTrainer.make_graph(None, cfg, Devices(1, 4), cfg.trainer.options["where"])


def test_a_recipe_without_a_graph_says_so() -> None:
    cfg = load_config(str(ROOT / "configs" / "quickstart_dpo.yaml"))
    with pytest.raises(ValueError, match="recipe=dpo: sft, rm, grpo and ppo have graphs"):
        recipe_graph(cfg, Devices(1, 4))


def test_the_tool_prints_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--train 1x2 --algorithm grpo --graph --place"
    tool.main([*words.split(), "train_actor=g0-g1 dp2"])
    boxes, _ = read(capsys.readouterr().out.rstrip())
    assert list(boxes) == ["generate", "ref", "advantages", "train_actor"]
    assert boxes["train_actor"] == ["actor: train_step", "g0-g1 dp2"]
    tool.main(["--config", str(ROOT / "configs" / "quickstart_ppo.yaml"), "--graph"])
    boxes, _ = read(capsys.readouterr().out.rstrip())
    assert boxes["train_critic"][0] == "critic: train_step" and len(boxes["train_critic"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--graph", "say whose graph: --algorithm NAME or --config"),
        ("--algorithm ppo --graph x.svg", "--graph x.svg: the graph is printed as Mermaid text"),
        ("--algorithm ppo --place train=g0", "--place says where the calls of a --graph run"),
        ("qwen3-1.7b --algorithm ppo --search", "--search: calls are no longer searched for"),
        ("qwen3-1.7b --timeline y.svg", "--timeline: calls are no longer searched for"),
        ("--algorithm sft --graph --place train", "--place 'train': give a call and its mesh"),
        ("--algorithm sft --graph --place ref=g0", "no call is named 'ref'; the graph's are train"),
        (
            "--algorithm sft --train 1x4 --graph --place train=g1-g2",
            "mesh g1-g2: a mesh is whole nodes",
        ),
    ],
)
def test_the_tool_names_what_is_wrong(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main(words.split())
    assert message in capsys.readouterr().err + str(ended.value)
