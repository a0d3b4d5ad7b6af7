"""Shows what the model reads of a recipe's data: its rows after the chat template, as a run makes
them, special tokens included.

What is trained is coloured; where the output has no colours it stands in «marks». A source's last
line sums up its rows; rows above its max_length are left out, and a warning counts them. No server
is started and no model loaded.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from megarl.cli import CommandParser, positive
from megarl.config.check_parts import data_problems
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.recipe_engines import engines, model_path
from megarl.config.recipes import datasets
from megarl.data.tokenizer import run_tokenizer
from megarl.trainer.preflight import check_data, check_tokenizer, purpose_of

Row = dict[str, Any]
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # a terminal may act on such characters


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the data of the recipe that `argv` names and returns 0. Raises ConfigError for a wrong
    command line, or data that a launcher would refuse."""
    parser = CommandParser("data", __doc__)
    parser.option("show", positive, "rows of each source to show, the first ones (3)", 3)
    args, cfg = parser.recipe(argv)
    raise_if_any(data_problems(cfg))
    check_tokenizer(cfg)
    check_data(cfg, renders=True)
    from megarl.data.dataset import build_dataset  # here, so that --help is instant

    tokenizer = run_tokenizer(cfg, model_path(cfg, next(iter(engines(cfg)))))
    trained = None
    for key, data in datasets(cfg).items():
        how: Any = {"purpose": purpose_of(cfg, key), "seed": cfg.seed, "apart_from": trained}
        try:
            built = build_dataset(data, tokenizer, overlap=cfg.evaluator.overlap, **how)
        except ValueError as e:
            raise ConfigError(f"{key}: {e}") from e
        trained = trained or built
        for name, places in built.parts.items():
            source = f"{key}.parts.{name}" if name else key
            show(source, [built[i] for i in places], args.show, tokenizer)
    return 0


def show(key: str, rows: list[Row], count: int, tokenizer: Any) -> None:
    """Prints the first `count` rows of a source, and a line about all of them."""
    out = Console(highlight=False, markup=False, soft_wrap=True)
    marks = out.color_system is None or out.no_color
    for row in rows[:count]:
        for what, ids, mask in _sequences(row):
            about = f"{what} of {len(ids)} tokens, {sum(mask)} of them trained"
            out.print(f"--- {key}, row {row['row_id']}: {about}")
            out.print(_text(ids, mask, tokenizer, marks=marks))
    _, tokens, masks = zip(*(s for row in rows for s in _sequences(row)), strict=True)
    lengths = [len(ids) for ids in tokens]
    share = sum(map(sum, masks)) / sum(lengths)
    about = f"{min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):g}"
    out.print(f"=== {key}: {len(rows)} rows of {about}, {share:.1%} of them trained")


def _sequences(row: Row) -> Iterator[tuple[str, list[int], list[bool]]]:
    """Yields the sequences of a row, one or the two of a pair: what it is, the tokens, and which
    are trained: none of a prompt, but its answers."""
    for what in ("prompt", "input", "chosen", "rejected"):
        if ids := row.get(f"{what}_ids"):
            mask = row.get("loss_mask" if what == "input" else f"{what}_mask")
            yield what, ids, mask or [False] * len(ids)


def _text(ids: list[int], mask: list[bool], tokenizer: Any, *, marks: bool) -> Text:
    """Returns the text of tokens, with what is trained in colour, or between marks."""
    text, tokens, before = Text(), 0, 0
    for trained, run in groupby(mask):
        tokens += len(list(run))
        # from the beginning: some decoders leave out a space where a text begins
        whole = tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False)
        piece = re.sub(_CONTROL, lambda control: ascii(control[0])[1:-1], whole[before:])
        before = len(whole)
        shown = f"«{piece}»" if trained and marks else piece
        text.append(shown, "black on green" if trained else None)
    return text
