"""Asks for an algorithm, a model, data, a reward and GPUs; writes a configuration and checks it.

Each question has a flag and a default; --yes, or an input that is no terminal, takes the defaults.
The columns of the data say how it is read. The file is DIR/ALGORITHM.yaml; none is overwritten, and
one that does not pass `megarl launch --check` is not kept.

--from NAME asks nothing. It copies a configuration that ships with megarl to DIR/configs, with the
files that the configuration builds on, and the examples to DIR/examples.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megarl.cli import CommandParser
from megarl.config.compose import read_yaml, write_commented
from megarl.config.errors import ConfigError
from megarl.config.recipes import RECIPES, GRPOConfig, main_role

QUESTIONS = {  # flag: its default, and what to give
    "algorithm": ("grpo", "sft, dpo, rm, grpo, or a relative of GRPO: dapo, gspo, ..."),
    "model": ("Qwen/Qwen3-0.6B", "a Hugging Face directory, or a name of the hub"),
    "data": ("train.jsonl", "a .jsonl, .json or .parquet file, or a name of the hub"),
    "reward": ("exact", "exact, gsm8k, ..., file.py:function; sft, dpo and rm have none"),
    "gpus": ("0", "GPUs of this machine; 0 is the CPU"),
}
WRITTEN = ("sft", "dpo", "rm", "grpo")
PACKAGE = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the configuration that `argv` and the answers ask for, prints the commands that check
    and start it, and returns 0, or the status of a check that failed. Raises ConfigError for a file
    that exists, and for data that does not."""
    parser = CommandParser("init", __doc__)
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", default=Path(), help="(here)")
    for name, (default, what) in QUESTIONS.items():
        parser.option(name, str, f"{what} ({default})")
    parser.switch("yes", "ask nothing")
    parser.option("from", str, "a shipped configuration, such as quickstart_grpo")
    args = parser.read(argv)
    if shipped := getattr(args, "from"):
        if flags := [f"--{flag}" for flag in QUESTIONS if getattr(args, flag)]:
            raise ConfigError(f"--from {shipped}: takes no {', '.join(flags)}; edit the copy")
        return copy_shipped(shipped, args.dir)
    asks = sys.stdin.isatty() and not args.yes
    for name, (default, what) in QUESTIONS.items():
        given = getattr(args, name) or (asks and input(f"{name}: {what} [{default}] ").strip())
        setattr(args, name, given or default)
    path = args.dir / f"{args.algorithm}.yaml"
    if path.exists():
        raise ConfigError(f"{path} exists, and is not overwritten; name another DIR, or move it")
    from megarl.config.dataset import SourceConfig  # here, so that --help is instant
    from megarl.data.formats import read_as
    from megarl.data.rows import read_dataset
    from megarl.launcher import local
    from megarl.models.hf_config import read_hf_config

    recipe = args.algorithm if args.algorithm in RECIPES else "grpo"
    if recipe not in WRITTEN:
        why = f"init writes {', '.join(WRITTEN)} and relatives of grpo"
        fix = f"edit a copy of megarl init --from quickstart_{recipe}"
        raise ConfigError(f"--algorithm {recipe}: {why}; {fix}")
    role, rl = main_role(RECIPES[recipe]), issubclass(RECIPES[recipe], GRPOConfig)
    with wrong_flag("gpus", args.gpus):
        if (gpus := int(args.gpus)) < 0:
            raise ValueError("GPUs are 0 or more")
    with wrong_flag("model", args.model):
        has_config = Path(args.model, "config.json").is_file()
        longest = read_hf_config(args.model).max_position_embeddings if has_config else 2048
    with wrong_flag("data", args.data):
        kind, options, batch, unread = read_as(args.data, "answer" if rl else "response")
        if recipe in ("dpo", "rm") and kind != "preference":
            row = next(read_dataset(SourceConfig(path=args.data), None))[1]
            why = f"--algorithm {recipe} needs the columns chosen and rejected"
            raise ValueError(f"{why}; the first row has {sorted(row)}")
    left_out = f"; not in a prompt or an answer: {unread}" if unread else ""
    servers = max(1, gpus // 2) if rl else 0
    room = min(2048, longest)
    rows = [
        ("recipe", recipe, f"keys: megarl run --help --recipe {recipe}"),
        ("experiment_name", args.dir.absolute().name or "megarl", "runs/<this>/<trial_name>"),
        ("trial_name", args.algorithm, "another one for each run"),
        (f"{role}.path", args.model, "a Hugging Face directory, or a name of the hub"),
        (f"{role}.optimizer.lr", 1e-6 if rl else 1e-5, "ten times that, and more, with lora"),
        ("train_dataset.type", kind, "docs/data.md"),
        ("train_dataset.path", args.data, "in the working directory, or beside this file"),
        ("train_dataset.batch_size", max(1, batch), "rows of a step"),
        ("train_dataset.options", options, "columns by our names" + left_out),
    ]
    if rl:
        rows += [
            ("algorithm", "" if args.algorithm == recipe else args.algorithm, "docs/algorithms.md"),
            ("train_dataset.reward", args.reward, "of one answer"),
            ("gconfig.n_samples", 8, "answers to each prompt"),
            ("gconfig.max_new_tokens", room // 4, "longer answers are cut"),
            ("eval_gconfig.max_new_tokens", "${gconfig.max_new_tokens}", "of an evaluation"),
            ("server.type", "sglang" if gpus else "embedded", "what generates"),
            ("server.count", servers, "one GPU each; the others train"),
            ("server.context_length", room, "tokens of prompt and answer"),
            ("weight_sync.type", "colocated" if gpus == 1 else "distributed", "to the servers"),
        ]
    valid = {"type": kind, "path": "test.jsonl", "options": options}
    valid |= {"reward": args.reward} if rl else {}
    later = write_commented([("valid_dataset", valid, "rows to evaluate on")])
    made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{write_commented(rows)}# {later}", encoding="utf-8")
    nproc = str(max(1, gpus - servers))
    if status := local.main(["--config", str(path), "--nproc", nproc, "--check"]):
        path.unlink()
        for folder in made:
            folder.rmdir()
        return status
    launch = f"{'' if gpus else 'MEGARL_DEVICE=cpu '}megarl launch --config {path} --nproc {nproc}"
    if unread:
        print(f"{args.data}: columns{left_out[1:]}; name all that the model has to read in {path}")
    print(f"{launch} --check\n{launch}")
    return 0


@contextmanager
def wrong_flag(name: str, value: str) -> Iterator[None]:
    """Names a flag and its value in the ConfigError that it raises for a ValueError inside."""
    try:
        yield
    except ValueError as e:
        raise ConfigError(f"--{name} {value}: {e}") from e


def copy_shipped(name: str, folder: Path) -> int:
    """Copies the shipped configuration `name` and the examples into `folder`; returns 0.

    Raises ConfigError if no configuration has this name, or if a file exists with other content.
    """
    # setup.py adds `shipped` to a wheel
    root = next(p for p in (PACKAGE / "shipped", PACKAGE.parent) if p.is_dir())
    names = sorted(path.stem for path in root.glob("configs/*.yaml"))
    if name not in names:
        raise ConfigError(f"--from {name}: no such configuration; use one of {', '.join(names)}")
    files = [root / "configs" / f"{name}.yaml"]
    for path in files:  # grows by the files that each file builds on
        below = read_yaml(path.read_text(encoding="utf-8")).get("defaults", ())
        files += [path.parent / f"{file}.yaml" for file in below]
    files += [p for p in root.glob("examples/**/*") if p.is_file() and p.suffix != ".pyc"]
    copies = {folder / path.relative_to(root): path for path in files}
    for copy, path in copies.items():
        if copy.exists() and copy.read_bytes() != path.read_bytes():
            raise ConfigError(f"{copy}: exists with other content; name another DIR, or move it")
    for copy, path in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    launch = f"megarl launch --config configs/{name}.yaml"
    print(f"cd {folder}\n{launch} --check\n{launch}")
    return 0
