"""Compares trainer and server layer by layer on the same tokens, and names where they part.

    megarl gap MODEL_OR_RUN [key=value ...]
    torchrun --nproc-per-node N -m megarl.cli gap ...       (a layout of N ranks)

Of a run its configuration and newest checkpoint are taken. The embedded server reads the prompt at
once and then writes token by token. Without --tokens and --episode the tokens are those of a run's
newest recorded episode; where nothing was recorded, and of a model, a built-in text. Keys are a
recipe's, such as actor.dtype=bfloat16, actor.parallel.tp=2, server.dtype=float32.

A gap is a bug where it is several times what rounding does at the same place, measured on the same
tokens (docs/numerics.md). float32 shows most: in bfloat16, rounding hides small ones. With experts,
all programs send tokens where the trainer does, and what a router would have chosen is counted.

The exit status is 0 where all of it is rounding, 1 where something is not, 2 for a wrong command
line. It needs the memory of one model in float32, or in float64 where the trainer has float32.
"""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli import CommandParser, positive
from megarl.cli.gap import tokens
from megarl.config.earlier_run import CONFIG_FILE, checkpoints
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import BaseConfig, GRPOConfig, main_role
from megarl.models.hf_config import read_hf_config
from megarl.utils.env import quiet_libraries

if TYPE_CHECKING:
    from megarl.cli.gap.passes import Subject


def main(argv: Sequence[str] | None = None) -> int:
    """Compares what `argv` names and returns the exit status. Raises ConfigError for a wrong
    command line, model or run."""
    parser = CommandParser("gap", __doc__)
    parser.path("MODEL_OR_RUN", "a Hugging Face directory, or a run's")
    parser.add_argument("--against", choices=("server", "hf"), default="server")
    parser.option("tokens", Path, "a file: text, or JSON with one or several lists of token ids")
    parser.option("episode", str, "a run's recorded episode, STEP.NUMBER, as megarl view has it")
    parser.option("length", positive, "tokens of each sample at most (256)", 256)
    parser.switch("budget", SUPPRESS)
    parser.keys()
    args = parser.read(argv)
    if args.budget:
        parser.error("--budget: leave it out; docs/numerics.md says which gap is healthy")
    directory = args.model_or_run
    run = directory if (directory / CONFIG_FILE).is_file() else None
    if not run and not (directory / "config.json").is_file():
        parser.error(f"{directory}: neither a model's config.json nor a run's {CONFIG_FILE}")
    if args.episode and (args.tokens or not run):
        parser.error("--episode: it goes with a run, and without --tokens")
    if run:
        cfg = load_config(run / CONFIG_FILE, args.keys)
    else:
        cfg = load_config(None, [f"actor.path={directory}", *args.keys])
    return _compare(args, cfg, run)


def _compare(args: Namespace, cfg: BaseConfig, run: Path | None) -> int:
    """Compares and prints; returns the exit status, 0 on ranks but the first."""
    quiet_libraries()
    from transformers.utils.logging import disable_progress_bar

    from megarl.cli.gap.compare import compare, report
    from megarl.cli.gap.passes import run_all
    from megarl.parallel.groups import shutdown_distributed

    disable_progress_bar()
    subject = _subject(cfg, run, args.against)
    samples, which = _samples(args, subject, run)
    try:
        runs = run_all(subject, samples)
    except ValueError as e:
        raise ConfigError([str(e)]) from e
    shutdown_distributed()
    if runs is None:
        return 0
    comparison = compare(runs)
    other = "transformers" if args.against == "hf" else "server"
    model = subject.checkpoint or subject.engine.path
    print(f"{model}: trainer and {other} on {comparison.tokens} tokens, {which}")
    print("\n".join(report(comparison, other)))
    return int(comparison.first is not None)


def _subject(cfg: BaseConfig, run: Path | None, against: str) -> Subject:
    """Returns what is compared: of a run the policy's newest checkpoint, where it has one."""
    from megarl.cli.gap.passes import Subject

    role = main_role(type(cfg))
    whole = checkpoints(run)[0] if run else []
    return Subject(
        engine=getattr(cfg, role),
        checkpoint=whole[-1].path / role if whole else None,
        server_dtype=cfg.server.dtype if isinstance(cfg, GRPOConfig) else "auto",
        against=against,
    )


def _samples(
    args: Namespace, subject: Subject, run: Path | None
) -> tuple[list[tokens.Sample], str]:
    """Returns the samples, and what they are. Raises ConfigError where there are none."""
    model = subject.engine.path
    try:
        vocab = read_hf_config(model, override=subject.engine.override_config).vocab_size
    except ValueError as e:
        raise ConfigError([str(e)]) from e
    if args.tokens:
        return tokens.of_file(args.tokens, model, vocab, args.length), str(args.tokens)
    if run is not None:
        samples, name = tokens.of_episode(run, args.episode, args.length)
        if samples:
            return samples, f"episode {name}"
    return tokens.built_in(model, vocab, args.length)
