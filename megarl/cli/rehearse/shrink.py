"""Makes a cluster's configuration one that this machine can run: the same recipe, small. Pure.

overlay.yaml says what changes; parallel layouts, data sets and a few sizes follow from the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.config.dataset import GENERATED
from megarl.config.earlier_run import differences
from megarl.config.loader import checked_config, config_yaml
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe_engines import engines
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.utils.importing import is_import_path

OVERLAY = Path(__file__).with_name("overlay.yaml")
REWARD = "megarl.cli.rehearse.model:even_share"
CONTEXT = 2048  # tokens, each of which is a byte or more
PROMPTS, SEQUENCES = 4, 16  # of a step
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_LEAST_FIRST = ("etp", "cp", "ep", "tp", "pp")  # what a rehearsal can do without, first
_ENOUGH = 2  # ranks that show what a dimension does

Tree = dict[str, Any]


# layouts


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Holds the layouts of a rehearsal, by engine. `left_out` are degrees that the ranks do not
    suffice for: they are 1 here."""

    parallel: dict[str, ParallelConfig]
    world_size: int
    layers: int
    left_out: tuple[str, ...] = ()


def shrink_layouts(cluster: Mapping[str, ParallelConfig], *, ranks: int, mixed: bool) -> Layouts:
    """Returns layouts that fit at most `ranks` ranks, and how many layers a model then needs.

    Data parallelism goes first; if that is not enough every other degree becomes 2 where it was
    more; if that is not enough, degrees are left out. With ranks to spare dp is 2 again. mixed: the
    model has layers of several kinds, so that a pipeline chunk gets two.
    """
    small, left_out = dict(cluster), []
    if _world(small.values()) > ranks:
        small = {n: _at_most(p, DEGREES, _ENOUGH) for n, p in small.items()}
    for degree in _LEAST_FIRST:
        if _world(small.values()) <= ranks:
            break
        if any(getattr(p, degree) > 1 for p in small.values()):
            small = {n: _at_most(p, (degree,), 1) for n, p in small.items()}
            left_out.append(degree)
    world = _world(small.values())
    chunks = math.lcm(*(p.pp * p.vpp for p in small.values()))
    uneven = any(p.pipeline_split is not None for p in cluster.values())
    layers = chunks * (2 if mixed or uneven or chunks == 1 else 1)
    return Layouts(
        parallel={n: _settled(p, layers) for n, p in small.items()},
        world_size=2 * world if 2 * world <= ranks else world,
        layers=layers,
        left_out=tuple(left_out),
    )


def small_split(split: Sequence[int], chunks: int, layers: int) -> list[int] | None:
    """Returns `layers` layers in `chunks` chunks, uneven as `split` is: one of its ends gets a
    layer more, the other one less. None for a single chunk."""
    if chunks == 1:
        return None
    small = [layers // chunks] * chunks
    if len(set(split)) > 1:
        small[0] += 1 if split[0] >= split[-1] else -1
        small[-1] -= 1 if split[0] >= split[-1] else -1
    return small


def _world(layouts: Iterable[ParallelConfig]) -> int:
    return math.lcm(*(n for p in layouts for n in (p.dense_ranks, p.expert_ranks)))


def _at_most(p: ParallelConfig, degrees: Iterable[str], most: int) -> ParallelConfig:
    return replace(p, **{d: min(getattr(p, d), most) for d in degrees})


def _settled(p: ParallelConfig, layers: int) -> ParallelConfig:
    """Returns the layout with everything else that goes with its degrees."""
    vpp, split = p.vpp if p.pp > 1 else 1, p.pipeline_split
    return replace(
        p,
        vpp=vpp,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        pipeline_split=small_split(split, p.pp * vpp, layers) if split else None,
        cp_comm_type="auto",  # p2p is Transformer Engine's, which a CPU lacks
    )


# the configuration


def shrink_config(
    cfg: BaseConfig, layouts: Layouts, models: Mapping[str, str], *, fileroot: str
) -> BaseConfig:
    """Returns `cfg` as it runs two small steps on this machine. models: the directory of each
    engine's small model, by the engine's key."""
    tree, overlay = _tree(cfg), yaml.safe_load(OVERLAY.read_text(encoding="utf-8"))
    limit = overlay["limit"] | {
        "rollout.workflow.options.max_length": CONTEXT,
        "weight_sync.senders": layouts.world_size,
    }
    _set(tree, overlay["replace"] | {"fileroot": fileroot})
    _set(tree, limit, lambda old, most: min(old, most) if isinstance(old, int | float) else old)
    for name in engines(cfg):
        _set(tree[name], overlay["engine"])
        tree[name] |= {"path": models[name], "parallel": asdict(layouts.parallel[name])}
    reward, judged = "", False
    if isinstance(cfg, GRPOConfig):
        reward, judged = REWARD, cfg.judge is not None
        tree["server"] |= {
            "count": min(2, max(1, cfg.server.count)),
            "context_length": CONTEXT,
            "dtype": cfg.server.dtype,
            "deterministic": cfg.server.deterministic,
        }
    held_out = tree["valid_datasets"]
    sets = [(tree, "train_dataset"), (tree, "valid_dataset"), *((held_out, n) for n in held_out)]
    for section, name in sets:
        if section[name] is not None:
            split = "train" if name == "train_dataset" else "test"
            section[name] = _small_data(section[name], overlay["data"], split, reward, judged)
    if not is_import_path(cfg.train_dataset.type):
        _set(tree, {"margin": False})  # sums have none
    return checked_config(yaml.safe_dump(tree), [])


def changes(before: BaseConfig, after: BaseConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value before, value after) for each plain key that differs."""
    return differences(_tree(before), _tree(after))


def _tree(cfg: BaseConfig) -> Tree:
    return dict(yaml.safe_load(config_yaml(cfg)))


def _set(
    tree: Tree, values: Tree, value_of: Callable[[Any, Any], Any] = lambda old, new: new
) -> None:
    """Sets the dotted keys of `values` that `tree` has to value_of(old, value)."""
    for key, value in values.items():
        *sections, last = key.split(".")
        section: Any = tree
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and last in section:
            section[last] = value_of(section[last], value)


def _small_data(data: Tree, overlay: Tree, split: str, reward: str, judged: bool) -> Tree:
    """Returns a few rows of a data set, or of the parts of a mixture. A reward of the user's stays,
    where its rows do; `reward` takes the place of others, and of a judge's."""
    parts = {n: _rows(p, overlay, split, reward, judged) for n, p in data["parts"].items()}
    small = data | {"parts": parts} if parts else _rows(data, overlay, split, reward, judged)
    return small | {"batch_size": PROMPTS if reward else SEQUENCES, "num_workers": 0}


def _rows(source: Tree, overlay: Tree, split: str, reward: str, judged: bool) -> Tree:
    """Returns a source of few rows: its own where it makes them or the user's code does, else
    sums."""
    own = is_import_path(source["type"])
    small = source | {key: value for key, value in overlay.items() if key in source}
    if not own and source["type"] not in GENERATED:
        small = {"type": "arithmetic", "split": split, "options": {"level": 2}, "size": 64}
        small |= {key: source[key] for key in ("weight",) if key in source}
    if reward and (judged or not is_import_path(source["reward"]["type"])):
        small["reward"] = reward
    return small
