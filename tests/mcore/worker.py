"""Trains, saves and loads with the megatron-core that PYTHONPATH leads to; prints what came out.

python -m tests.mcore.worker save|load FOLDER VERSION
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.dist.engine_jobs import PLAIN, SP, ZERO, make_engine, save_model
from tests.dist.test_checkpoint import dist_meta, train
from tests.dist.world import World

Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
# name: family, engine settings, layout that saves, layout that loads
CASES: dict[str, Case] = {
    "dense": ("qwen3", ZERO, SP, dict(pp=2)),
    "plain": ("llama", PLAIN, dict(pp=2), SP),
    "experts": ("qwen3_moe", ZERO, dict(ep=2), SP),
    "latent": ("deepseek_v3", ZERO, SP, dict(ep=2)),
}


@contextmanager
def warnings_of_megatron() -> Iterator[list[str]]:
    """Collects what megatron-core logs as a warning or worse."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("megatron").removeHandler(handler)


def save(root: Path, writer: str) -> dict[str, Any]:
    """Saves each case after two steps; returns the figures of the third."""
    import megatron.core

    figures: dict[str, Any] = {}
    with warnings_of_megatron() as lines:
        for name, (kind, over, before, _) in CASES.items():
            engine = make_engine(save_model(root, kind, False), before, **over)
            train(engine, 2)
            engine.save(dist_meta(root / f"{name}-{writer}"))
            figures[name] = train(engine, 1)
            engine.destroy()
    return dict(figures=figures, warnings=lines, code=megatron.core.__file__)


def load(root: Path, writer: str) -> dict[str, Any]:
    """Returns the figures of the third step after each case's two, in another layout."""
    figures: dict[str, Any] = {}
    with warnings_of_megatron() as lines:
        for name, (kind, over, _, after) in CASES.items():
            engine = make_engine(save_model(root, kind, False), after, **over)
            engine.load(dist_meta(root / f"{name}-{writer}"))
            figures[name] = train(engine, 1)
            engine.destroy()
    return dict(figures=figures, warnings=lines)


def main(action: str, folder: str, writer: str) -> None:
    for kind, *_ in CASES.values():
        save_model(Path(folder), kind, False)
    with World(2) as world:
        found = world.run({"save": save, "load": load}[action], Path(folder), writer)[0]
    print(json.dumps({**found, "version": version("megatron-core")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
