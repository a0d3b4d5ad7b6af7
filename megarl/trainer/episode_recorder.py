"""Records the episodes of training on disk (observability/episodes.py), beside training.

A record of a group has these arrays, row after row of the group, each as long as all its rows:
ids, mask (loss_mask), logprobs, versions, token_rewards where turns earn something, and of what the
step computed prox_logp, entropy and advantages, 0 in rows that were not trained. Rows of rollouts
that failed stand last, under no mask.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.api.batch import Batch, Padded
from megarl.api.inference import FAILURES
from megarl.api.tokens import REWARD_PART
from megarl.observability.episodes import append_record, pack
from megarl.observability.logging import get_logger
from megarl.observability.run_log import DiskThread
from megarl.rollout.episodes import Episode

log = get_logger(__name__)

# per-token fields that a step may have computed
COMPUTED = ("prox_logp", "entropy", "advantages")
MAX_WAITING = 8  # pieces of work that the disk may be behind, then they are left out
FETCH_TOKENS = 1 << 20  # padded tokens that travel to rank 0 at once

# field of a batch -> the array's name and dtype
_TOKENS = {
    "input_ids": ("ids", "<i4"),
    "loss_mask": ("mask", "|u1"),
    "logprobs": ("logprobs", "<f4"),
    "versions": ("versions", "<i4"),
    "token_rewards": ("token_rewards", "<f4"),
}
LONGEST = 2000  # characters of one column of the data set that are kept
SNIPPET = 160  # characters of the prompt in lists
_PROMPT = ("prompt", "prompt_ids", "messages")  # columns that the tokens show anyway
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\ufffd"

Arrays = dict[str, NDArray[Any]]
About = dict[str, Any]
Piece = str | list[int]  # text, or bytes that are not whole characters
Row = tuple[int, int]  # an episode's number, and a row's place in the episode
Computed = dict[str, Any]  # of a row: "reward", "skipped", and tensors [length] by name


class EpisodeRecorder:
    """Records the first `keep` groups (None: all) of every batch with what the step computed of
    them, and as many that were rejected because something failed. Rank 0 only. Packing and writing
    is done by a DiskThread."""

    def __init__(self, run_dir: Path, tokenizer: Any, keep: int | None) -> None:
        self._run_dir, self._keep = run_dir, keep
        self._pieces = TokenPieces(tokenizer)
        self._ended: list[Episode] = []  # since the last batch
        self._chosen: list[Episode] = []  # those to record of the batch that is trained
        self._rows: list[Row] = []  # of the batch, in its order; all of them
        self._left: dict[Row, str] = {}  # rows that left the batch, and why
        self._step = 0
        self._disk = DiskThread("megarl episodes", waiting=MAX_WAITING)

    def ended(self, episode: Episode) -> None:
        """Takes an episode that is handed out or rejected. Called from any thread."""
        if episode.batch is not None or episode.failed:
            self._ended.append(episode)

    def handed_out(self, version: int) -> None:
        """Takes note that the episodes with samples that have ended until now are the batch that
        the step after `version` trains on."""
        self._record({})  # what was computed of the batch before is not known
        self._step = version + 1
        count = len(self._ended)  # others may end meanwhile
        ended, self._ended[:count] = self._ended[:count], []
        batch = sorted((e for e in ended if e.batch is not None), key=attrgetter("number"))
        self._rows = [(e.number, k) for e in batch for k in range(_count(e))]
        self._left = {}
        self._chosen = batch[: self._keep] + [e for e in ended if e.batch is None][: self._keep]

    def dropped(self, mask: Tensor, kind: str) -> None:
        """Takes note that the rows of the batch under `mask` [B] left it, and why."""
        if not self._has_all(len(mask)):
            return
        out = mask.tolist()
        self._left |= {row: kind for row, gone in zip(self._rows, out, strict=True) if gone}
        self._rows = [row for row, gone in zip(self._rows, out, strict=True) if not gone]

    def computed(
        self, parts: Sequence[tuple[Tensor, Padded]], rewards: Tensor, skipped: Tensor | None
    ) -> None:
        """Takes what the step computed: (rows, padded fields of these rows), some rows at a time,
        and of all rows of the batch the rewards [B] and whether their update was skipped [B]."""
        if not self._has_all(len(rewards)):
            return
        by_row: dict[Row, Computed] = {}
        for numbers, padded in parts:
            lengths = padded["attention_mask"].sum(1).tolist()
            for i, row in enumerate(numbers.tolist()):
                tokens = {k: padded[k][i, : lengths[i]] for k in COMPUTED if k in padded}
                was_skipped = bool(skipped[row]) if skipped is not None else False
                about = {"reward": finite(rewards[row]), "skipped": was_skipped}
                by_row[self._rows[row]] = about | tokens
        self._record(by_row)

    def close(self) -> None:
        """Waits until all is written (DiskThread.close), also what failed since the last batch."""
        self._record({})
        self._step += 1
        self._chosen = [e for e in self._ended if e.batch is None][: self._keep]
        self._record({})
        self._disk.close()

    def _has_all(self, count: int) -> bool:
        """Returns whether a batch of `count` rows is the one that was handed out, as far as it did
        not leave; a trainer of a user's own may change it."""
        if count != len(self._rows):
            log.warning(
                "the batch has %d rows, of %d handed out: what is computed of it is not recorded",
                count,
                len(self._rows),
            )
        return count == len(self._rows)

    def _record(self, computed: Mapping[Row, Computed]) -> None:
        """Has the thread record the chosen episodes, with what was computed of their rows."""
        step, left, (chosen, self._chosen) = self._step, self._left, (self._chosen, [])

        def write() -> None:
            for episode in chosen:
                about, arrays, line = group_record(episode, step, self._pieces, computed, left)
                append_record(self._run_dir, step, line, pack(about, arrays))

        if chosen:
            self._disk.do(f"episodes of step {step}", write)


def computed_part(batch: Batch, keep: int | None) -> tuple[Batch, Tensor]:
    """Returns the first `keep` groups of the batch (None: all) with the fields that the step has
    computed of each token, and the numbers of their rows in the batch."""
    names = [name for name in COMPUTED if name in batch.per_token]
    ids = batch["episode_ids"]
    chosen = torch.isin(ids, ids.unique()[:keep]).nonzero().flatten()
    return batch.select(chosen, names), chosen


def computed_tokens(part: Batch, numbers: Tensor) -> list[tuple[Tensor, Padded]]:
    """Returns the tokens of a `computed_part`, as (numbers of rows, their padded fields) of some
    rows at a time. Collective."""
    ends: list[int] = [0]
    widest = 0
    for i, n in enumerate(part.lengths.tolist()):
        if ends[-1] < i and max(widest, n) * (i + 1 - ends[-1]) > FETCH_TOKENS:
            ends.append(i)
            widest = 0
        widest = max(widest, n)
    rows = torch.arange(len(part)).tensor_split(ends[1:])
    return [(numbers[some], part.fetch(some)) for some in rows if len(some)]


def _count(episode: Episode) -> int:
    return 0 if episode.batch is None else len(episode.batch["input_ids"])


# ---- records


def group_record(
    episode: Episode,
    step: int,
    pieces: TokenPieces,
    computed: Mapping[Row, Computed],
    left: Mapping[Row, str],
) -> tuple[About, Arrays, dict[str, Any]]:
    """Returns a record of an episode's samples, its arrays, and its line for the index. computed:
    of rows that were trained; left: why rows left the batch."""
    parts = [(episode.batch, False)] if episode.batch is not None else []
    parts += [(lost, True) for lost in episode.lost]
    pairs: list[tuple[About, Arrays]] = []
    for batch, has_failed in parts:
        first = 1 + max((row["rollout"] for row, _ in pairs), default=-1)
        pairs += _rows(batch, has_failed, first, len(pairs))
    rows, tokens = [row for row, _ in pairs], [own for _, own in pairs]
    names = dict.fromkeys(k for values in computed.values() for k in values if k in COMPUTED)
    for place in range(_count(episode)):
        key, row = (episode.number, place), rows[place]
        if key in left:
            row["failure"] = left[key]
        if (values := computed.get(key)) is not None:
            row |= {"trained": True, "reward": values["reward"], "skipped": values["skipped"]}
            tokens[place] |= {k: _numbers(values[k]) for k in names if k in values}
    for row, own in zip(rows, tokens, strict=True):
        own |= {k: np.zeros(row["length"], "<f4") for k in names if k not in own}
    arrays = {name: np.concatenate([own[name] for own in tokens]) for name in _names(tokens)}
    ids = np.unique(arrays["ids"]).tolist() if rows else []
    about = {
        "step": step,
        "episode": episode.number,
        "accepted": episode.batch is not None,
        "latency": round(episode.latency, 3),
        "data": {k: _short(v) for k, v in episode.row.items() if _is_plain(k, v)},
        "rows": rows,
        "failed": [[kind, length] for kind, length in episode.failed],
        "retried": episode.retried,
        "notes": episode.notes,
        "pieces": pieces.of(ids),
        "special": pieces.special(ids),
    }
    return about, arrays, _line(about, arrays, episode)


def _numbers(values: Tensor) -> NDArray[Any]:
    return np.nan_to_num(values.float().numpy()).astype("<f4")


def _rows(
    batch: Padded, has_failed: bool, first: int, before: int
) -> Iterator[tuple[About, Arrays]]:
    """Yields what is said of each row of a batch [n,S], and its tokens. Rollouts are numbered from
    `first` on, rows from `before` on; one that failed may hold anything beside its ids."""
    n = len(batch["input_ids"])
    lengths = batch["attention_mask"].bool().sum(1).tolist()
    rollouts = batch.get("rollout_ids", torch.arange(n)).unique(return_inverse=True)[1].tolist()
    whole = {
        name: _array(batch, field, kind)
        for field, (name, kind) in _TOKENS.items()
        if field in batch or field != "token_rewards"
    }
    if has_failed:
        whole["mask"][:] = 0
    for k, length in enumerate(lengths):
        tokens = {name: values[k, :length] for name, values in whole.items()}
        row: About = {"rollout": first + rollouts[k], "length": length}
        if has_failed:
            row["failure"] = FAILURES[int(batch["failure"][k]) if "failure" in batch else 0]
        else:
            row["reward"] = finite(batch["rewards"][k])
            row["parts"] = {
                name.removeprefix(REWARD_PART): finite(value[k])
                for name, value in batch.items()
                if name.startswith(REWARD_PART)
            }
            row["truncated"] = bool(batch["truncated"][k]) if "truncated" in batch else False
        earlier = [j for j in range(k) if rollouts[j] == rollouts[k]]
        if fork := _fork(batch["input_ids"], tokens["mask"], k, earlier):
            row["fork"] = [before + fork[0], fork[1]]
        yield row, tokens


def _array(batch: Padded, field: str, kind: str) -> NDArray[Any]:
    """Returns a field [n,S]; zeros where it is missing or misshapen, as it may be of rollouts that
    failed, and in place of numbers that are not finite."""
    values, ids = batch.get(field), batch["input_ids"]
    if values is None or values.shape != ids.shape:
        return np.zeros(ids.shape, kind)
    return np.nan_to_num(values.numpy()).astype(kind)


def _fork(
    ids: Tensor, mask: NDArray[Any], row: int, earlier: Sequence[int]
) -> tuple[int, int] | None:
    """Returns (another row, token): row `row` of `ids` [n,S] has its own tokens from there on, and
    until then those of the `earlier` row that it shares most with; None for a first row."""
    if not earlier:
        return None
    differ = ids[list(earlier)] != ids[row]
    shared = torch.where(differ.any(1), differ.int().argmax(1), ids.shape[1])
    best, trained = int(shared.argmax()), np.flatnonzero(mask)
    own = int(trained[0]) if len(trained) else len(mask)  # an answer may begin as another does
    return earlier[best], min(int(shared[best]), own)


def _line(about: About, arrays: Arrays, episode: Episode) -> dict[str, Any]:
    """Returns what lists show of the group: numbers by rollout, and counts."""
    masks = _by_row(about["rows"], arrays["mask"]) if arrays else []
    handed_out = about["rows"][: _count(episode)]
    whole: dict[int, float] = {}
    lengths: Counter[int] = Counter()
    turns = [0]
    for row, mask in zip(about["rows"], masks, strict=True):
        turns.append(sum(1 for wrote, _ in groupby(mask.tolist()) if wrote))
        if "failure" not in row:
            whole[row["rollout"]] = row["reward"]
            lengths[row["rollout"]] += int(mask.sum())
    gone = {row["rollout"]: row["failure"] for row in handed_out if "failure" in row}
    versions = arrays["versions"][arrays["mask"] > 0].tolist() if arrays else []
    return {
        "episode": about["episode"],
        "row": str(episode.row.get("row_id", "")),
        "prompt": _prompt(episode.row),
        "accepted": about["accepted"],
        "rewards": list(whole.values()),
        "lengths": [lengths[rollout] for rollout in whole],
        "forks": len(handed_out) - len({row["rollout"] for row in handed_out}),
        "turns": max(turns),
        "cut": sum(row.get("truncated", False) for row in about["rows"]),
        "failures": dict(Counter([*(kind for kind, _ in episode.failed), *gone.values()])),
        "versions": [min(versions), max(versions)] if versions else [],
        "tokens": len(arrays["ids"]) if arrays else 0,
    }


def _by_row(rows: Sequence[About], values: NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum([row["length"] for row in rows])[:-1])


def _names(tokens: Sequence[Arrays]) -> list[str]:
    """Returns the arrays that every row has."""
    return [name for name in tokens[0] if all(name in own for own in tokens)] if tokens else []


def _prompt(row: Mapping[str, Any]) -> str:
    """Returns the end of what is asked, for lists."""
    text: Any = row.get("prompt", "")
    if messages := row.get("messages"):
        text = messages[-1].get("content", "")
    return " ".join(str(text).split())[-SNIPPET:]


def _is_plain(column: str, value: Any) -> bool:
    return column not in _PROMPT and isinstance(value, str | int | float | bool)


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST else value[:LONGEST] + " ..."
    return value if math.isfinite(value) else str(value)


def finite(value: Tensor) -> float | None:
    """Returns the number, or None for NaN and infinity, which JSON lacks."""
    number = float(value)
    return number if math.isfinite(number) else None


# ---- tokens as text


class TokenPieces:
    """Spells tokens one by one, so that pieces side by side are the text; each id is looked up
    once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Piece] = {}
        self._special = set(getattr(tokenizer, "all_special_ids", ()))

    def of(self, ids: Iterable[int]) -> dict[int, Piece]:
        """Returns the pieces by id."""
        return {i: self._of(i) for i in ids}

    def special(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that are special tokens."""
        return [i for i in ids if i in self._special]

    def _of(self, token: int) -> Piece:
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def _spell(self, token: int) -> Piece:
        """Returns a token's text; an id that the tokenizer does not know is <|id|>."""
        try:
            named = self._tokenizer.convert_ids_to_tokens(token)
            text = self._tokenizer.decode([token], skip_special_tokens=False)
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError):
            named = text = None
        if not isinstance(named, str) or not isinstance(text, str):
            return text or f"<|{token}|>"
        if byte := _BYTE.fullmatch(named):
            return [int(byte[1], 16)]
        if named.startswith("\u2581") and not text.startswith(" "):  # decoding drops a first space
            return " " + text
        if _BROKEN in text and all(c in _byte_characters() for c in named):
            return [_byte_characters()[c] for c in named]
        return text


@cache
def _byte_characters() -> dict[str, int]:
    """Returns the bytes that the characters of byte-level tokenizers stand for: what can be printed
    stands for itself, the others follow from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
