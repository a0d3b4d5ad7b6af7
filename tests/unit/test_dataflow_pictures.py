"""Pictures of graphs and timelines: everything is there, and no text lies on another."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import pytest

from megarl.config.loader import load_config
from megarl.config.parallel import ParallelConfig
from megarl.controller.graph_plan import GraphPlan
from megarl.dataflow.call import INFERENCE, TRAIN_STEP, Call
from megarl.dataflow.draw import draw_graph
from megarl.dataflow.gantt import draw_timeline, rows, text_rows
from megarl.dataflow.graph import allocate, build_graph, calls_of
from megarl.dataflow.graphs import GRAPHS, ppo
from megarl.dataflow.mesh import Allocation, Devices, Mesh
from megarl.dataflow.recipes import recipe_graph
from megarl.dataflow.schedule import MOVE, RUN, Span, Timeline
from megarl.dataflow.svg import width_of
from megarl.trainer.user_code import Named, code_problems
from tools import plan as tool

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def at(first: int, count: int, **degrees: int) -> Allocation:
    return Allocation(Mesh(first, count), ParallelConfig(**degrees))


def texts(picture: str) -> list[tuple[str, Box]]:
    """Every text of a picture, with its left, top, right and bottom."""
    found = []
    for mark in ElementTree.fromstring(picture).iter(f"{SVG}text"):
        said, size = mark.text or "", float(mark.get("font-size", 12))
        x, y, width = float(mark.get("x", 0)), float(mark.get("y", 0)), width_of(said, size)
        x -= width * {"middle": 0.5, "end": 1.0}.get(mark.get("text-anchor", ""), 0.0)
        found.append((said, (x, y - 0.9 * size, x + width, y + 0.25 * size)))
    return found


def assert_readable(picture: str) -> list[str]:
    root, found = ElementTree.fromstring(picture), texts(picture)
    width, height = map(float, root.get("viewBox", "").split()[2:])
    for said, (left, top, right, bottom) in found:
        assert min(left, top) >= 0 and right <= width and bottom <= height, said
    for (a, x), (b, y) in combinations(found, 2):
        apart = x[2] <= y[0] or y[2] <= x[0] or x[3] <= y[1] or y[3] <= x[1]
        assert apart, f"{a!r} lies on {b!r}"
    return [said for said, _ in found]


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
def test_a_graph_shows_every_call_and_key_and_no_text_on_another(graph: nx.DiGraph) -> None:
    picture = draw_graph(graph, "A title")
    said = assert_readable(picture)
    keys = {key for _, _, data in graph.edges(data=True) for key in data["keys"]}
    words = {word.strip(",") for line in said for word in line.split()}
    assert words >= {*graph, *keys, "A", "title"}
    trained = {c.model for c in calls_of(graph) if c.kind == TRAIN_STEP}
    assert sum(line.endswith("next step") for line in said) >= len(trained)


def test_a_placed_graph_says_where_and_how_and_old_weights_are_dashed() -> None:
    calls = [
        Call("train", "m", TRAIN_STEP, ("prompts",), where=at(0, 4, pp=2)),
        Call("watch", "m", INFERENCE, ("prompts",), ("entropy",), where=at(2, 2)),
    ]
    picture = draw_graph(build_graph(calls))
    assert {"g0-g3 dp2 pp2", "g2-g3 dp2", "old m"} <= set(assert_readable(picture))
    assert picture.count('stroke-dasharray="5 4"') == 4  # to and from "old m", the lane, the legend


STEPS = Timeline(
    tuple(
        Span(0, call, what, meshes, start, end, hooks)
        for call, what, meshes, start, end, hooks in (
            (calls_of(ppo())[0], MOVE, (Mesh(0, 2), Mesh(0, 4)), 0.0, 1.0, 0.0),
            (calls_of(ppo())[0], RUN, (Mesh(0, 4),), 1.0, 5.0, 0.0),
            (calls_of(ppo())[1], RUN, (Mesh(1, 1),), 5.0, 10.0, 1.0),
            (calls_of(ppo())[2], RUN, (Mesh(2, 2),), 6.0, 8.0, 0.0),
        )
    ),
    {},
)
SERVED = Timeline((Span(0, calls_of(ppo())[0], RUN, (), 0.0, 3.0), *STEPS.spans), {})


def test_devices_that_do_the_same_share_a_row() -> None:
    assert [name for name, _ in rows(STEPS)] == ["g0", "g1", "g2-g3"]
    assert list(text_rows(STEPS, width=40)) == [
        "   g0 |~~~~[generate------]....................|",
        "   g1 |~~~~[generate------][reward------------]|",
        "g2-g3 |~~~~[generate------]....[ref---]........|",
        "       0 s                               10.0 s",
    ]
    assert [name for name, _ in rows(SERVED)] == ["servers", "g0", "g1", "g2-g3"]
    said = assert_readable(draw_timeline(STEPS, "Some calls"))
    assert said.count("generate") == 3 and {"g2-g3", "reward", "ref", "10"} <= set(said)


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


def test_a_recipe_without_a_graph_says_so() -> None:
    cfg = load_config(str(ROOT / "configs" / "quickstart_dpo.yaml"))
    with pytest.raises(ValueError, match="recipe=dpo: sft, rm, grpo and ppo have graphs"):
        recipe_graph(cfg, Devices(1, 4))


def test_a_plan_that_does_not_fit_says_which_call_and_by_how_much(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "llama-2-7b --train 1x8 --algorithm sft --place"
    tool.main([*words.split(), "train=g0"])
    said = capsys.readouterr().out
    assert "does NOT fit: train takes 121 GiB; 74 GiB of a GPU may be used" in said
    tool.main([*words.split(), "train=g0-g3 tp4"])
    assert "NOT fit" not in capsys.readouterr().out


def test_the_tool_searches_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graph, steps = tmp_path / "graph.svg", tmp_path / "steps.svg"
    words = f"smollm2-135m-instruct --train 1x2 --algorithm grpo --search --graph {graph}"
    words += f" --timeline {steps} --batch-tokens 262144 --place"
    places = [f"{name}=g0-g1 dp2" for name in ("generate", "ref", "train_actor")]
    tool.main([*words.split(), *places])
    said = capsys.readouterr().out
    for line in ("3 calls on 1x2 H100; a step has 32 prompts", "all GPUs", "yours", "was measured"):
        assert line in said
    assert "GRPO of smollm2-135m-instruct on 1x2 H100" in assert_readable(graph.read_text())
    assert_readable(steps.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--graph x.svg", "say whose graph: --algorithm NAME or --config"),
        ("--algorithm ppo --graph x.svg --timeline y.svg", "--timeline: say where calls run"),
        ("--algorithm ppo --search", "give a MODEL or --config"),
        ("qwen3-1.7b --algorithm ppo --search --answer 9000", "--answer 9000: leave some of the"),
        ("--algorithm sft --place train", "--place 'train': give a call and its mesh"),
        ("--algorithm sft --place ref=g0", "no call is named 'ref'; the graph's are train"),
        ("--algorithm sft --place train=g1-g2 --train 1x4", "mesh g1-g2: a mesh is whole nodes"),
    ],
)
def test_the_tool_names_what_is_wrong(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main(words.split())
    assert message in capsys.readouterr().err + str(ended.value)


def test_a_placed_graph_is_drawn_with_its_meshes() -> None:
    where = {"generate": at(0, 8, pp=2), "values": at(0, 2), "train_actor": at(0, 4, pp=2)}
    said = assert_readable(draw_graph(allocate(ppo(), where, Devices(1, 8))))
    assert {"g0-g7 dp4 pp2", "g0-g1 dp2", "g0-g3 dp2 pp2"} <= set(said)
