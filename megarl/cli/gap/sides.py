"""Makes the programs that `megarl gap` compares, one after the other, and runs the tokens through
them: at any time one model is in memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megarl.api.records import SaveLoadMeta
from megarl.cli.gap.compare import Runs
from megarl.cli.gap.passes import Passed, Routes, Sample, by_transformers, served, trained
from megarl.config.engine import TrainEngineConfig
from megarl.engine import MegatronEngine
from megarl.models.hf_config import read_hf_config
from megarl.parallel.groups import init_distributed
from megarl.server.args import ServerArgs
from megarl.server.runner import ModelRunner
from megarl.utils.transformers_config import transformers_config


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Says what is compared: a Hugging Face directory as the engine's configuration names it, or
    the training checkpoint of a run, whose weights then also go to the other programs as the
    trainer saves them. server_dtype: "auto" is the trainer's. against: "server" or "hf"."""

    engine: TrainEngineConfig
    checkpoint: Path | None = None
    server_dtype: str = "auto"
    against: str = "server"


def run_all(subject: Subject, samples: Sequence[Sample]) -> Runs | None:
    """Returns the runs of all programs; on ranks but the first None. What the first rank was given
    counts. Collective. Raises ValueError where the model, the layout or the world do not fit."""
    if (recipe := subject.engine.fp8) != "none":
        raise ValueError(
            f"actor.fp8={recipe}: rounding in FP8 is not measured here; use actor.fp8=none"
        )
    init_distributed()
    if dist.get_world_size() > 1:  # a run that goes on may have written more in between
        agreed = [(subject, samples)]
        dist.broadcast_object_list(agreed)
        subject, samples = agreed[0]
    with _directory(subject) as saved:
        engine = MegatronEngine(replace(subject.engine, optimizer=None, offload=False))
        engine.initialize()
        if subject.checkpoint is not None:
            engine.load(SaveLoadMeta(path=str(subject.checkpoint), weight_format="dist"))
            engine.save(SaveLoadMeta(path=saved, weight_format="hf"))
        first, dtype = trained(engine, samples), engine.dtype
        engine.destroy()
        if dist.get_rank() != 0:
            return None
        return _runs(subject, saved, first, dtype, samples)


@contextmanager
def _directory(subject: Subject) -> Iterator[str]:
    """Yields the Hugging Face directory of the other programs, made for a checkpoint beside it,
    where all ranks find it."""
    if subject.checkpoint is None:
        yield subject.engine.path
        return
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        made = [tempfile.TemporaryDirectory(prefix=".gap-", dir=subject.checkpoint.parents[2])]
    name = [made[0].name if made[0] else ""]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(name)
    try:
        yield name[0]
    finally:
        if made[0]:
            made[0].cleanup()


def _runs(
    subject: Subject, path: str, first: Passed, dtype: torch.dtype, samples: Sequence[Sample]
) -> Runs:
    """Returns the trainer's run `first` with those of the server and of transformers."""
    override = subject.engine.override_config
    experts = read_hf_config(path, override=override).moe
    routes = None if first.routes is None or experts is None else Routes(first.routes, experts)
    other = dtype if subject.server_dtype == "auto" else getattr(torch, subject.server_dtype)
    coarse, fine = sorted((dtype, other), key=lambda d: torch.finfo(d).eps, reverse=True)

    model = load_model(path, coarse, override)
    rounded = by_transformers(model, samples, routes)
    free = by_transformers(model, samples) if routes and subject.against == "hf" else rounded
    del model
    wide = load_model(path, fine, override)
    wide = wide.double() if fine == torch.float32 else wide.float()
    exact = by_transformers(wide, samples, routes)
    del wide
    second, second_free = rounded, free
    if subject.against == "server":
        runner = start_server(path, other, samples, override)
        second = served(runner, samples, routes)
        second_free = served(runner, samples) if routes else second
    return Runs(
        first=first,
        second=second,
        second_free=second_free,
        rounded=rounded,
        exact=exact,
        unit=torch.finfo(coarse).eps / 2,
    )


def load_model(path: str, dtype: torch.dtype, override: dict[str, Any] | None = None) -> Any:
    """Returns transformers' model of a directory. Its experts compute one by one, in any dtype."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=transformers_config(path, override),
        dtype=dtype,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def start_server(
    path: str,
    dtype: torch.dtype,
    samples: Sequence[Sample],
    override: dict[str, Any] | None = None,
) -> ModelRunner:
    """Returns the model of an embedded server that has room for one sample."""
    args = ServerArgs(
        model_path=path,
        dtype=str(dtype).removeprefix("torch."),
        json_model_override_args=json.dumps(override or {}),
        context_length=max(5, *(len(s.ids) for s in samples)) + 1,
        max_running_requests=1,
    )
    return ModelRunner(args)
