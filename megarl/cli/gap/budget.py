"""Measures which gap of log-probabilities rounding alone makes between trainer and server, by
dtype, dense and with experts. Nothing here is wrong, so this is what a healthy run may show.

The server writes the tokens itself, at temperature 1, so that they are as likely as those of a run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megarl.cli.gap.compare import LogpGaps, logp_gaps
from megarl.cli.gap.passes import Passed, Sample, differing, sampled, served, trained
from megarl.cli.gap.sides import start_server
from megarl.cli.gap.tokens import TEXT
from megarl.cli.rehearse.model import write_model
from megarl.config.engine import MoEConfig, TrainEngineConfig
from megarl.data.tokenizer import load_hf_tokenizer
from megarl.engine import MegatronEngine
from megarl.engine.probe import HEAD
from megarl.parallel.groups import init_distributed, shutdown_distributed
from megarl.server.runner import ModelRunner
from megarl.wire import block_fp8

PROMPTS, PROMPT, ANSWER = 4, 32, 64  # prompts, and tokens of each and of its answer
FP8 = "fp8"
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 262,
}
_RANDOM: dict[str, dict[str, Any]] = {
    "random, dense": {"architectures": ["Qwen3ForCausalLM"]},
    "random, 16 experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Holds a line of a model's budget. trainer, server: dtypes; replay: the trainer sent tokens to
    the experts that the server's routers chose, None without experts. flips: share of the tokens
    that go to other experts in some layer, where each side chooses."""

    trainer: str
    server: str
    replay: bool | None
    gaps: LogpGaps
    flips: float | None = None


def print_budget(models: Sequence[Path]) -> int:
    """Prints the budget of the model directories, or of random models where there are none, and
    returns 0. Raises ValueError for a model that megarl does not support."""
    init_distributed()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        for name, directory in _directories(models, Path(folder)):
            console.print(table(name, list(budget(directory))))
    shutdown_distributed()
    console.print(
        "fp8 is simulated: weights and inputs of the layers' linear maps are cast to e4m3, in "
        "blocks of 128 x 128 and groups of 128, and multiplied in bfloat16.",
        highlight=False,
    )
    return 0


def _directories(models: Sequence[Path], folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields names and directories of the models; random ones are made in `folder`."""
    yield from ((path.name, path) for path in models)
    for number, (name, raw) in enumerate(() if models else _RANDOM.items()):
        write_model(_SIZES | raw, folder / str(number), head="lm", seed=number)
        yield name, folder / str(number)


def budget(directory: Path) -> Iterator[Line]:
    """Yields the lines of a model."""
    samples = _written(directory)
    pairs = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))
    for trainer, server in (*pairs, ("bfloat16", FP8)):
        theirs = _served(directory, server, samples)
        ours, replayed = _trained(directory, trainer, samples, theirs)
        line = Line(trainer=trainer, server=server, replay=None, gaps=_gaps(ours, theirs))
        if replayed is None:
            yield line
            continue
        yield replace(line, replay=False, flips=_flips(ours, theirs))
        yield replace(line, replay=True, gaps=_gaps(replayed, theirs))


def _written(directory: Path) -> list[Sample]:
    """Returns answers that the model writes to pieces of a text."""
    ids = load_hf_tokenizer(str(directory)).encode(TEXT)
    prompts = [ids[i * PROMPT : (i + 1) * PROMPT] for i in range(PROMPTS)]
    room = [Sample([*prompt, *[0] * ANSWER], PROMPT) for prompt in prompts]
    runner = start_server(str(directory), torch.float32, room)
    generator = torch.Generator().manual_seed(0)
    return [sampled(runner, prompt, ANSWER, generator) for prompt in prompts]


def _served(directory: Path, dtype: str, samples: Sequence[Sample]) -> Passed:
    if dtype != FP8:
        return served(start_server(str(directory), getattr(torch, dtype), samples), samples)
    with simulated_fp8(start_server(str(directory), torch.bfloat16, samples)) as runner:
        return served(runner, samples)


def _trained(
    directory: Path, dtype: str, samples: Sequence[Sample], theirs: Passed
) -> tuple[Passed, Passed | None]:
    """Returns the trainer's run, and the one with the server's experts where there are some."""
    replay = "off" if theirs.routes is None else "rollout"
    config = TrainEngineConfig(
        path=str(directory), dtype=dtype, moe=MoEConfig(router_replay=replay)
    )
    engine = MegatronEngine(config)
    engine.initialize()
    free = trained(engine, samples)
    replayed = None if theirs.routes is None else trained(engine, samples, theirs.routes)
    engine.destroy()
    return free, replayed


def _gaps(ours: Passed, theirs: Passed) -> LogpGaps:
    head = next(part for part in ours.parts if part.name == HEAD)
    return logp_gaps(ours.parts[head], theirs.parts[head])


def _flips(ours: Passed, theirs: Passed) -> float:
    assert ours.routes is not None and theirs.routes is not None
    return float(differing(ours.routes, theirs.routes).any(-1).float().mean())


def table(name: str, lines: Sequence[Line]) -> Table:
    """Returns a model's budget as a table."""
    title = f"{name}: gap of log-probabilities in nats, {PROMPTS * ANSWER} sampled tokens"
    shown = Table("trainer", "server", "experts", "mean |gap|", "largest", "k3", title=title)
    for line in lines:
        free = f"free, {line.flips or 0:.0%} of tokens differ"
        experts = {None: "", False: free, True: "replayed"}[line.replay]
        numbers = (line.gaps.mean, line.gaps.largest, line.gaps.k3)
        cells = (f"{x:.1g}" if x < 1e-3 else f"{x:.2g}" for x in numbers)
        shown.add_row(line.trainer, line.server, experts, *cells)
    return shown


@contextmanager
def simulated_fp8(runner: ModelRunner) -> Iterator[ModelRunner]:
    """Yields the server's model with the numbers that block-wise FP8 leaves of its weights and of
    its activations. Its experts compute one by one, where inputs can be reached."""
    runner.model.set_experts_implementation("eager")
    for layer in runner.model.base_model.layers:
        for name, weight in layer.named_parameters():
            if weight.ndim > 1 and not _is_router(name):
                matrices = weight.data.flatten(0, -3) if weight.ndim > 2 else weight.data[None]
                for matrix in matrices:
                    matrix.copy_(block_fp8.dequantize(*block_fp8.quantize(matrix)))
    plain = {w.data_ptr() for w in _plain(runner.model)}
    with _RoundInputs(plain):
        yield runner


def _is_router(name: str) -> bool:
    return name.endswith(("gate.weight", "shared_expert_gate.weight"))


def _plain(model: Any) -> Iterator[Tensor]:
    """Yields the matrices whose products stay as they are."""
    yield model.get_output_embeddings().weight
    for layer in model.base_model.layers:
        yield from (w for name, w in layer.named_parameters() if _is_router(name))


class _RoundInputs(TorchFunctionMode):
    """Casts the inputs of linear maps to e4m3, a scale for each token and 128 numbers. plain: where
    the weights of the other linear maps begin in memory."""

    def __init__(self, plain: set[int]) -> None:
        super().__init__()
        self._plain = plain

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and args[1].data_ptr() not in self._plain:
            args = (round_to_fp8(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def round_to_fp8(x: Tensor) -> Tensor:
    """Returns x [...,H] as e4m3 keeps it, a scale for every 128 numbers of a token."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % block_fp8.BLOCK)).unflatten(
        -1, (-1, block_fp8.BLOCK)
    )
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / block_fp8.LARGEST
    kept = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return kept.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
