"""Shows what the model reads of a recipe's data: its rows after the chat template, as a run makes
them, special tokens included.

What is trained is coloured; where the output has no colours it stands in «marks». A row longer than
its data set's max_length is shown, and said to be left out. The last line about a source is of all
of its rows. No server is started and no model loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from megarl.cli import CommandParser, positive
from megarl.config.check_parts import data_problems
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import load_config
from megarl.config.recipe_engines import engines, model_path
from megarl.config.recipes import datasets, sources
from megarl.data.tokenizer import run_tokenizer
from megarl.trainer.preflight import check_data, check_tokenizer, purpose_of
from megarl.utils.importing import add_working_directory

TRAINED = "black on green"
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the data of the recipe that `argv` names and returns 0. Raises ConfigError for a wrong
    command line, or data that a launcher would refuse."""
    parser = CommandParser("data", __doc__)
    parser.path("CONFIG", "the recipe's YAML file")
    parser.option("show", positive, "rows of each source to show, the first ones (3)", 3)
    parser.keys()
    args = parser.read(argv)
    add_working_directory()
    cfg = load_config(args.config, args.keys)
    raise_if_any(data_problems(cfg))
    check_tokenizer(cfg)
    check_data(cfg, renders=True)
    from megarl.data.dataset import build_dataset, short_enough  # here, so that --help is instant

    tokenizer = run_tokenizer(cfg, model_path(cfg, next(iter(engines(cfg)))))
    trained = None
    for key, data in datasets(cfg).items():
        parts = {name: replace(part, max_length=None) for name, part in data.parts.items()}
        how: Any = {"purpose": purpose_of(cfg, key), "seed": cfg.seed, "apart_from": trained}
        try:
            whole = replace(data, max_length=None, parts=parts)
            built = build_dataset(whole, tokenizer, overlap=cfg.evaluator.overlap, **how)
            for name, places in built.parts.items():
                source = f"{key}.parts.{name}" if name else key
                rows, bound = [built[i] for i in places], sources(cfg)[source]
                dropped = {row["row_id"] for row in rows}
                dropped -= {row["row_id"] for row in short_enough(rows, bound)}
                why = f"left out, longer than max_length={bound.max_length}"
                show(source, rows, args.show, tokenizer, dict.fromkeys(dropped, why))
        except ValueError as e:
            raise ConfigError([f"{key}: {e}"]) from e
        trained = trained or built
    return 0


def show(key: str, rows: list[Row], count: int, tokenizer: Any, left: dict[int, str]) -> None:
    """Prints the first `count` rows of a source, and a line about all of them. left: why a row is
    left out, by its row_id."""
    out = Console(highlight=False, markup=False, soft_wrap=True)
    marks = out.color_system is None or out.no_color
    for row in rows[:count]:
        for what, ids, mask in _sequences(row):
            trained = [f"{sum(mask)} of them trained"] if any(mask) else []
            about = [f"{len(ids)} tokens", *trained, *filter(None, [left.get(row["row_id"])])]
            out.print(f"--- {key}, row {row['row_id']}{what}: {', '.join(about)}")
            out.print(_text(ids, mask, tokenizer, marks=marks))
    lengths = [max(len(ids) for _, ids, _ in _sequences(row)) for row in rows]
    masks = [m for row in rows if row["row_id"] not in left for _, _, m in _sequences(row)]
    share = sum(map(sum, masks)) / sum(map(len, masks))
    about = [f"{len(rows)} rows of {min(lengths)} to {max(lengths)} tokens"]
    about += [f"median {statistics.median(lengths):g}"]
    about += [f"{len(left)} {why}" for why in set(left.values())]
    about += [f"{share:.1%} of the tokens are trained" if share else "prompts alone"]
    out.print(f"=== {key}: {', '.join(about)}")


def _sequences(row: Row) -> Iterator[tuple[str, list[int], list[bool]]]:
    """Yields the sequences of a row, one or the two of a pair: what it is, the tokens, and which
    are trained."""
    if "prompt_ids" in row:
        yield "", row["prompt_ids"], [False] * len(row["prompt_ids"])
    if "input_ids" in row:
        yield "", row["input_ids"], row["loss_mask"]
    for side in ("chosen", "rejected"):
        if f"{side}_ids" in row:
            yield f", {side}", row[f"{side}_ids"], row[f"{side}_mask"]


def _text(ids: list[int], mask: list[bool], tokenizer: Any, *, marks: bool) -> Text:
    """Returns the text of tokens, with what is trained in colour, or between marks."""
    text, tokens, before = Text(), 0, 0
    for trained, run in groupby(mask):
        tokens += len(list(run))
        # from the beginning: some decoders leave out a space where a text begins
        whole = tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False)
        piece, before = whole[before:], len(whole)
        text.append(f"«{piece}»" if trained and marks else piece, TRAINED if trained else None)
    return text
