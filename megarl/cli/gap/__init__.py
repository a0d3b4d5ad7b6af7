"""Compares trainer and server layer by layer on the same tokens, and names where they part.

    megarl gap MODEL_OR_RUN [--against hf] [--tokens FILE] [--episode STEP.NUMBER] [key=value ...]
    torchrun --nproc-per-node N -m megarl.cli gap ...       (a layout of N ranks)

    MODEL_OR_RUN   a Hugging Face directory; or a run's, whose newest checkpoint and configuration
                   are taken
    --against      server (default): the embedded server, which reads the prompt at once and then
                   writes token by token; hf: transformers itself
    --tokens       a file: text, or JSON with a list of token ids or several such lists
    --episode      of a run: a recorded episode as `megarl view` numbers it (the newest; where
                   nothing was recorded, and of a MODEL, a built-in text)
    --length       tokens of each sample at most (256)

Keys are a recipe's, such as actor.dtype=bfloat16, actor.parallel.tp=2, server.dtype=float32.

A gap is a bug where it is several times what rounding does at the same place, measured on the same
tokens (docs/numerics.md). float32 shows most: in bfloat16, rounding hides small ones. With experts,
all programs send tokens where the trainer does, and what a router would have chosen is counted.

The exit status is 0 where all of it is rounding, 1 where something is not, 2 for a wrong command
line. It needs the memory of one model in float32, or in float64 where the trainer has float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.earlier_run import CONFIG_FILE, checkpoints
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import BaseConfig, GRPOConfig, main_role
from megarl.utils.env import quiet_libraries

if TYPE_CHECKING:
    from megarl.cli.gap.passes import Sample
    from megarl.cli.gap.sides import Subject

USAGE = "megarl gap MODEL_OR_RUN [key=value ...]"
AGAINST = ("server", "hf")
LENGTH = 256  # tokens of a sample


def main(argv: Sequence[str] | None = None) -> int:
    """Compares what `argv` names and returns the exit status. Raises ConfigError for a wrong
    command line, model or run."""
    options = ("against", "tokens", "episode", "length")
    command = help_or_command_line(argv, __doc__ or "", options=options, switches=("budget",))
    if command is None:
        return 0
    if "budget" in command.switches:
        why = "docs/numerics.md says which gap is healthy; megarl gap MODEL measures rounding's own"
        raise ConfigError([f"--budget: leave it out; {why}"])
    if len(command.words) != 1:
        raise ConfigError([f"give one model or run directory: {USAGE}"])
    against = command.options.get("against", AGAINST[0])
    if against not in AGAINST:
        raise ConfigError([f"--against {against}: use one of {', '.join(AGAINST)}"])
    length = command.options.get("length", str(LENGTH))
    if not length.isdecimal() or int(length) < 2:
        raise ConfigError([f"--length {length}: use a whole number of at least 2"])
    return _compare(command, Path(command.words[0]), against, int(length))


def _compare(command: CommandLine, directory: Path, against: str, length: int) -> int:
    """Compares and prints; returns the exit status, 0 on ranks but the first."""
    is_run = (directory / CONFIG_FILE).is_file()
    source = directory / CONFIG_FILE if is_run else None
    first = [] if is_run else [f"actor.path={_model(directory)}"]
    cfg = load_config(source, [*first, *command.overrides])
    _quiet()
    from megarl.cli.gap.compare import compare
    from megarl.cli.gap.sides import run_all
    from megarl.cli.gap.table import print_comparison
    from megarl.parallel.groups import shutdown_distributed

    subject = _subject(cfg, directory if is_run else None, against)
    samples, which = _samples(command, subject, directory if is_run else None, length)
    try:
        runs = run_all(subject, samples)
    except ValueError as e:
        raise ConfigError([str(e)]) from e
    shutdown_distributed()
    if runs is None:
        return 0
    found = compare(runs)
    print_comparison(found, runs, subject, which)
    return int(found.first is not None)


def _quiet() -> None:
    """Imports transformers, which takes seconds, and hides its bars and what users cannot mend."""
    quiet_libraries()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _model(directory: Path) -> Path:
    """Returns the model directory. Raises ConfigError where it is none."""
    if not (directory / "config.json").is_file():
        why = f"holds neither a model's config.json nor a run's {CONFIG_FILE}"
        raise ConfigError([f"{directory}: {why}: {USAGE}"])
    return directory


def _subject(cfg: BaseConfig, run: Path | None, against: str) -> Subject:
    """Returns what is compared: of a run the policy's newest checkpoint, where it has one."""
    from megarl.cli.gap.sides import Subject

    role = main_role(type(cfg))
    engine = cfg.actor if isinstance(cfg, GRPOConfig) else getattr(cfg, role)
    whole = checkpoints(run)[0] if run else []
    return Subject(
        engine=engine,
        checkpoint=whole[-1].path / role if whole else None,
        server_dtype=cfg.server.dtype if isinstance(cfg, GRPOConfig) else "auto",
        against=against,
    )


def _samples(
    command: CommandLine, subject: Subject, run: Path | None, length: int
) -> tuple[list[Sample], str]:
    """Returns the samples, and what they are. Raises ConfigError where there are none."""
    from megarl.cli.gap import tokens
    from megarl.models.hf_config import read_hf_config

    given, model = command.options, subject.engine.path
    try:
        vocab = read_hf_config(model, override=subject.engine.override_config).vocab_size
    except ValueError as e:
        raise ConfigError([str(e)]) from e
    if "episode" in given and (run is None or "tokens" in given):
        raise ConfigError(["--episode: it goes with a run, and without --tokens"])
    if "tokens" in given:
        samples = tokens.of_file(Path(given["tokens"]), model, length)
        if (largest := max(max(s.ids) for s in samples)) >= vocab:
            why = f"has the token id {largest}, the model's vocab_size is {vocab}"
            raise ConfigError([f"--tokens {given['tokens']}: {why}"])
        return samples, given["tokens"]
    if run is not None:
        samples, name = tokens.of_episode(run, given.get("episode"), length)
        if samples:
            return samples, f"episode {name}"
    return tokens.built_in(model, vocab, length)
