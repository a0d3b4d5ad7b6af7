"""Compares trainer and server layer by layer on the same tokens, and names where they part.

    megarl gap MODEL_OR_RUN [key=value ...]
    torchrun --nproc-per-node N -m megarl.cli gap ...       (a layout of N ranks)

Of a run its configuration and newest checkpoint are taken. The embedded server reads the prompt at
once and then writes token by token. Without --tokens and --episode the tokens are those of a run's
newest recorded episode; where nothing was recorded, and of a model, random ones. Keys are a
recipe's, such as actor.dtype=bfloat16, actor.parallel.tp=2, server.dtype=float32.

A gap is a bug where it is several times what rounding does at the same place, measured on the same
tokens (docs/numerics.md). float32 shows most: in bfloat16, rounding hides small ones. With experts,
all programs send tokens where the trainer does, and what a router would have chosen is compared.

The exit status is 0 where all of it is rounding, 1 where something is not, 2 for a wrong command
line. It needs the memory of one model in float32, or in float64 where the trainer has float32.
"""

from __future__ import annotations

import json
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.cli import CommandParser, positive
from megarl.config.earlier_run import CONFIG_FILE, checkpoints
from megarl.config.engine import TrainEngineConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import BaseConfig, GRPOConfig, main_role
from megarl.models.hf_config import read_hf_config
from megarl.observability.episodes import read_bytes, read_index, unpack
from megarl.utils.env import quiet_libraries

MOST = 4  # samples of an episode or a file
LEAST_ANSWER = 16  # tokens of an answer that stay behind a long prompt


class Sample(NamedTuple):
    """Holds tokens to compare on; the policy wrote those from position `prompt` on, at least 1."""

    ids: list[int]
    prompt: int


def main(argv: Sequence[str] | None = None) -> int:
    """Compares what `argv` names and returns the exit status, on ranks but the first 0. Raises
    ConfigError for a wrong command line, model or run."""
    parser = CommandParser("gap", __doc__)
    parser.path("MODEL_OR_RUN", "a Hugging Face directory, or a run's")
    parser.add_argument("--against", choices=("server", "hf"), default="server")
    parser.option("tokens", Path, "a .json file with one or several lists of token ids, or a text")
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
    keys = args.keys if run else [f"actor.path={directory}", *args.keys]
    return _compare(args, load_config(run and run / CONFIG_FILE, keys), run)


def _compare(args: Namespace, cfg: BaseConfig, run: Path | None) -> int:
    """Compares and prints; returns the exit status."""
    quiet_libraries()
    from transformers.utils.logging import disable_progress_bar

    from megarl.cli.gap import compare
    from megarl.parallel.worlds import shutdown_distributed

    disable_progress_bar()
    role = main_role(type(cfg))
    engine = getattr(cfg, role)
    whole = checkpoints(run)[0] if run else []
    checkpoint = whole[-1].path / role if whole else None
    try:
        samples, which = _samples(args, engine, run)
        runs = compare.run_all(
            engine,
            samples,
            checkpoint=checkpoint,
            server_dtype=cfg.server.dtype if isinstance(cfg, GRPOConfig) else "auto",
            against=args.against,
        )
    except ValueError as e:
        raise ConfigError(str(e)) from e
    shutdown_distributed()
    if runs is None:
        return 0
    other = "transformers" if args.against == "hf" else "server"
    count = sum(len(sample.ids) for sample in samples)
    print(f"{checkpoint or engine.path}: trainer and {other} on {count} tokens, {which}")
    gaps = compare.compare(runs)
    print("\n".join(compare.report(gaps, runs, other)))
    return int(compare.first_bug(gaps) is not None)


# tokens to compare on


def _samples(
    args: Namespace, engine: TrainEngineConfig, run: Path | None
) -> tuple[list[Sample], str]:
    """Returns the samples, and what they are. Raises ConfigError where there are none."""
    vocab = read_hf_config(engine.path, override=engine.override_config).vocab_size
    if args.tokens:
        return of_file(args.tokens, engine.path, vocab, args.length), str(args.tokens)
    if run is not None:
        samples, name = of_episode(run, args.episode, args.length)
        if samples:
            return samples, f"episode {name}"
    ids = np.random.default_rng(0).integers(vocab, size=max(2, args.length)).tolist()
    return [_cut(ids, len(ids) // 2, args.length)], "random tokens"


def of_file(path: Path, model: str, vocab: int, length: int) -> list[Sample]:
    """Returns the samples of a file, a text or of *.json one or several lists of token ids. The
    first half of each is its prompt. Raises ConfigError for a file without tokens, or with one that
    the model's `vocab` lacks."""
    from megarl.data.tokenizer import load_hf_tokenizer

    try:
        text = path.read_text(encoding="utf-8")
        is_json = path.suffix == ".json"
        ids = json.loads(text) if is_json else load_hf_tokenizer(model).encode(text)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--tokens {path}: {e}") from e
    rows = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
    for row in rows:
        if not isinstance(row, list) or len(row) < 2 or not all(type(i) is int for i in row):
            raise ConfigError(f"--tokens {path}: give at least two token ids, [1, 2, ...]")
        if outside := [i for i in row if not 0 <= i < vocab]:
            why = f"has the token id {outside[0]}, the model's vocab_size is {vocab}"
            raise ConfigError(f"--tokens {path}: {why}")
    return [_cut(row, len(row) // 2, length) for row in rows[:MOST]]


def of_episode(run: Path, name: str | None, length: int) -> tuple[list[Sample], str]:
    """Returns the first samples of a recorded episode, "STEP.NUMBER" as the viewer calls it (None:
    the newest), and its name; none where nothing was recorded and nothing named. Raises ConfigError
    for a name that no record has."""
    lines = [line for line in read_index(run) if line["tokens"]]
    records = {f"{line['step']}.{line['episode']}": line for line in lines}
    if name is None and not records:
        return [], ""
    name = name or list(records)[-1]
    if name not in records:
        some = ", ".join(list(records)[-5:]) or "none"
        raise ConfigError(f"--episode {name}: there is no such record; recorded are {some}")
    record = unpack(read_bytes(run, records[name]))
    ends = np.cumsum([row["length"] for row in record.about["rows"]])[:-1]
    samples = []
    for ids, mask in zip(*(np.split(record.arrays[field], ends) for field in ("ids", "mask"))):
        trained = np.flatnonzero(mask)
        if len(trained) and trained[0] > 0:
            samples.append(_cut(ids.tolist(), int(trained[0]), length))
    return samples[:MOST], name


def _cut(ids: list[int], prompt: int, length: int) -> Sample:
    """Returns the first `length` tokens, or more where the prompt leaves too few."""
    return Sample(ids[: max(length, prompt + LEAST_ANSWER)], prompt)
