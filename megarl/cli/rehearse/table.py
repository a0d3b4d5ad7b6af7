"""Shows a rehearsal: what was kept, what shrank, and how each part went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.cli.rehearse.construct import Constructed
from megarl.cli.rehearse.layout import DEGREES
from megarl.cli.rehearse.plan import Plan
from megarl.cli.rehearse.real import Ran
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe_engines import engines, smallest_world_size
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.config.secrets import masked
from megarl.models.hf_config import parse_hf_config
from megarl.models.value_model import language_model
from megarl.planning.memory import parameters

_SIZES = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "key/value heads": ("num_key_value_heads",),
    "latents": ("kv_lora_rank",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts of a token": ("num_experts_per_tok",),
    "vocabulary": ("vocab_size",),
}


class Report:
    """Prints a rehearsal as it goes on. `source` is the configuration's file."""

    def __init__(self, plan: Plan, source: Path, console: Console | None = None) -> None:
        self._plan, self._source = plan, source
        self._console = console or Console(highlight=False)
        self._said: list[str] = []

    def begin(self) -> None:
        """Prints what the cluster has beside what is here, and what is the same."""
        table = Table(box=SIMPLE_HEAD, title=f"rehearsal of {self._source}", title_justify="left")
        for name in ("", "the cluster", "here"):
            table.add_column(name, overflow="fold")
        for row in self._rows():
            table.add_row(*row)
        self._console.print(table)
        self._console.print(Text(f"kept: {', '.join(kept(self._plan.cfg))}"), soft_wrap=True)

    def changed(self, changes: Iterable[tuple[str, Any, Any]]) -> None:
        """Prints every key of the configuration that has another value here."""
        shown = [f"{k}={masked(old, k)} -> {masked(new, k)}" for k, old, new in changes]
        self._console.print(Text(f"changed: {len(shown)} keys of the configuration", style="bold"))
        for line in shown:
            self._console.print(Text(f"  {line}", style="dim"), soft_wrap=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Prints how the part `name` of the rehearsal went, when it has ended."""
        begun, good = time.monotonic(), False
        self._said = []
        try:
            yield
            good = True
        finally:
            seconds = f"{time.monotonic() - begun:.0f} s"
            line = Text.assemble(
                ("ok    " if good else "FAIL  ", "bold green" if good else "bold red"),
                f"{name:10} {seconds:>6}  {'; '.join(self._said)}",
            )
            self._console.print(line, soft_wrap=True)

    def constructed(self, made: Constructed) -> None:
        """Notes an engine whose ranks were constructed."""
        self._said.append(
            f"{made.engine}: {made.ranks} of {made.of} ranks, with up to "
            f"{made.parameters / 1e9:.2f}B parameters, have the shapes that the piece table says"
        )

    def ran(self, ran: Ran) -> None:
        """Notes a start of the job."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in ran.numbers.items())
        world = self._plan.layouts.world_size
        self._said.append(f"up to step {ran.steps} on {world} ranks: {numbers}")

    def failed(self, why: str, out: Path) -> None:
        """Prints why the rehearsal failed, and where everything is."""
        said = Text.assemble(("rehearsal FAILED: ", "bold red"), why, f"\neverything is in {out}")
        self._console.print(said, soft_wrap=True)

    def passed(self, out: Path | None) -> None:
        """Prints that all went well, and where it is kept."""
        where = f"; everything is in {out}" if out else ""
        self._console.print(Text(f"rehearsal passed{where}", style="bold green"), soft_wrap=True)

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        plan, cfg = self._plan, self._plan.cfg
        for name, path in plan.paths.items():
            if name == next(n for n, other in plan.paths.items() if other == path):
                yield from _model_rows(name, path, plan.raw[name], plan.small[name])
        for name, engine in engines(cfg).items():
            small = layout_text(plan.layouts.parallel[name])
            yield f"{name} layout", layout_text(engine.parallel), small
        if plan.layouts.left_out:
            yield "not run, only constructed", ", ".join(plan.layouts.left_out), "-"
        least = smallest_world_size(cfg)
        yield "trainer ranks", f"a multiple of {least}", str(plan.layouts.world_size)
        if isinstance(cfg, GRPOConfig):
            server = cfg.server
            yield (
                "servers",
                f"{server.count} {server.type}, tp{server.tp}"
                + (f" dp{server.dp}" * (server.dp > 1)),
                f"{min(2, max(1, server.count))} embedded",
            )


def _model_rows(
    name: str, path: str, raw: Mapping[str, Any], small: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    models = [parse_hf_config(language_model(r), name) for r in (raw, small)]
    yield name, Path(path).name, f"{models[0].family}, random weights"
    totals = [parameters(m)[0] for m in models]
    yield "  parameters", f"{totals[0] / 1e9:.1f}B", f"{totals[1]:,}"
    for title, keys in _SIZES.items():
        values = [next((r[k] for k in keys if r.get(k) is not None), None) for r in (raw, small)]
        if values[0] is not None:
            yield f"  {title}", str(values[0]), str(values[1])


def layout_text(p: ParallelConfig) -> str:
    """Returns a layout in a few words, such as "tp8 pp2"."""
    words = [f"{d}{getattr(p, d)}" for d in DEGREES if getattr(p, d) > 1]
    if p.pipeline_split:
        words.append(f"split {p.pipeline_split}")
    return " ".join(words) or "one rank"


def kept(cfg: BaseConfig) -> Iterator[str]:
    """Yields what a rehearsal does as the cluster does, in a few words each."""
    first = next(iter(engines(cfg).values()))
    yield f"recipe {cfg.recipe}"
    yield f"dtype {first.dtype}"
    yield f"recompute {first.recompute_granularity}"
    if first.lora is not None:
        yield "LoRA"
    if cfg.trainer.mode == "controller":
        yield "one controller"
    if isinstance(cfg, GRPOConfig):
        a = cfg.actor
        yield f"loss {a.loss.type}"
        yield f"advantages {a.advantages.type} ({a.adv_norm})"
        yield f"{a.ppo_n_minibatches} update(s) a step"
        yield f"staleness bound {cfg.rollout.max_head_offpolicyness}"
        yield f"workflow {cfg.rollout.workflow.type.rpartition(':')[2]}"
        yield f"weight sync {cfg.weight_sync.type}"
