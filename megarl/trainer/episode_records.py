"""Makes records of episodes: of a group as it was handed out, and what the trainer computed of it.

A record of a group has these arrays, row after row of the group, each as long as all its rows:
ids, mask (loss_mask), logprobs, versions, and token_rewards where turns earn something. Rows of
rollouts that failed stand last, under no mask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.api.batch import Padded
from megarl.api.inference import FAILURES
from megarl.observability.episodes import GROUP
from megarl.rollout.episode import Episode
from megarl.rollout.trajectory import REWARD_PART
from megarl.trainer.token_pieces import TokenPieces

Arrays = dict[str, NDArray[Any]]
About = dict[str, Any]

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


def group_record(
    episode: Episode, step: int, pieces: TokenPieces
) -> tuple[About, Arrays, dict[str, Any]]:
    """Returns a record of an episode's samples, its arrays, and its line for the index."""
    parts = [(episode.batch, False)] if episode.batch is not None else []
    parts += [(lost, True) for lost in episode.lost]
    made: list[tuple[About, Arrays]] = []
    for batch, has_failed in parts:
        first = 1 + max((row["rollout"] for row, _ in made), default=-1)
        made += _rows(batch, has_failed, first, len(made))
    rows, tokens = [row for row, _ in made], [own for _, own in made]
    arrays = {name: np.concatenate([own[name] for own in tokens]) for name in _names(tokens)}
    ids = np.unique(arrays["ids"]).tolist() if made else []
    about = {
        "kind": GROUP,
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
    written = _by_row(about["rows"], arrays["mask"]) if arrays else []
    whole: dict[int, float] = {}
    lengths: Counter[int] = Counter()
    turns = [0]
    for row, mask in zip(about["rows"], written, strict=True):
        turns.append(sum(1 for wrote, _ in groupby(mask.tolist()) if wrote))
        if "failure" not in row:
            whole[row["rollout"]] = row["reward"]
            lengths[row["rollout"]] += int(mask.sum())
    versions = arrays["versions"][arrays["mask"] > 0].tolist() if arrays else []
    return {
        "kind": GROUP,
        "step": about["step"],
        "episode": about["episode"],
        "row": str(episode.row.get("row_id", "")),
        "prompt": _prompt(episode.row),
        "accepted": about["accepted"],
        "rewards": list(whole.values()),
        "lengths": [lengths[rollout] for rollout in whole],
        "rows": [row["rollout"] for row in about["rows"] if "failure" not in row],
        "turns": max(turns),
        "cut": sum(row.get("truncated", False) for row in about["rows"]),
        "failures": dict(Counter(kind for kind, _ in episode.failed)),
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
    asked: Any = row.get("prompt", "")
    if messages := row.get("messages"):
        asked = messages[-1].get("content", "")
    return " ".join(str(asked).split())[-SNIPPET:]


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
