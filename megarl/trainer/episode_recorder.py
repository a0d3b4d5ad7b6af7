"""Records the episodes of training on disk (observability/episodes.py), beside training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.api.batch import Batch, Padded
from megarl.observability.episodes import FIGURES, EpisodeStream, pack
from megarl.observability.logging import get_logger
from megarl.rollout.episode import Episode
from megarl.trainer.disk_thread import DiskThread
from megarl.trainer.episode_records import finite, group_record
from megarl.trainer.token_pieces import TokenPieces

log = get_logger(__name__)

# per-token fields that a step may have computed
COMPUTED = ("prox_logp", "entropy", "advantages")
MAX_WAITING = 8  # pieces of work that the disk may be behind, then they are left out
FETCH_TOKENS = 1 << 20  # padded tokens that travel to rank 0 at once

Row = tuple[int, int]  # an episode's number, and a row's place in the episode


class EpisodeRecorder:
    """Records the first `keep` groups (None: all) of every batch, and as many that were rejected
    because something failed. Rank 0 only. Packing and writing is done by a DiskThread."""

    def __init__(self, run_dir: Path, tokenizer: Any, keep: int | None) -> None:
        self._run_dir, self._keep = run_dir, keep
        self._pieces = TokenPieces(tokenizer)
        self._ended: list[Episode] = []  # since the last batch
        self._rows: list[Row] = []  # of the batch, in its order; all of them
        self._recorded: set[int] = set()  # episodes of the batch
        self._left: dict[Row, str] = {}  # rows that left the batch, and why
        self._step = 0
        self._disk = DiskThread("megarl episodes", waiting=MAX_WAITING)
        self._stream: EpisodeStream | None = None  # the thread's

    def ended(self, episode: Episode) -> None:
        """Takes an episode that is handed out or rejected. Called from any thread."""
        if episode.batch is not None or episode.failed:
            self._ended.append(episode)

    def handed_out(self, version: int) -> None:
        """Takes note that the episodes with samples that have ended until now are the batch that
        the step after `version` trains on."""
        self._step = step = version + 1
        count = len(self._ended)  # others may end meanwhile
        ended, self._ended[:count] = self._ended[:count], []
        batch = sorted((e for e in ended if e.batch is not None), key=_number)
        self._rows = [(e.number, k) for e in batch for k in range(_count(e))]
        self._left.clear()
        rejected = [e for e in ended if e.batch is None]
        kept = [*batch[: self._keep], *rejected[: self._keep]]
        self._recorded = {e.number for e in kept}

        def write(stream: EpisodeStream) -> None:
            for episode in kept:
                begun = time.thread_time()
                about, arrays, line = group_record(episode, step, self._pieces)
                data = pack(about, arrays)
                stream.append(line | {"seconds": round(time.thread_time() - begun, 6)}, data)

        self._do(write)

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
        step, rows, left = self._step, self._rows, dict(self._left)
        recorded = self._recorded
        if not self._has_all(len(rewards)):
            return

        def write(stream: EpisodeStream) -> None:
            found: dict[int, list[dict[str, Any]]] = {}
            for numbers, padded in parts:
                lengths = padded["attention_mask"].sum(1).tolist()
                for i, row in enumerate(numbers.tolist()):
                    number, place = rows[row]
                    about = {"row": place, "length": lengths[i], "reward": finite(rewards[row])}
                    about["skipped"] = bool(skipped[row]) if skipped is not None else False
                    tokens = {k: padded[k][i, : lengths[i]] for k in COMPUTED if k in padded}
                    found.setdefault(number, []).append(about | {"tokens": tokens})
            gone = {number for number, _ in left}
            for number in sorted(recorded & (found.keys() | gone)):
                begun = time.thread_time()
                line, data = _figures(step, number, found.get(number, []), left)
                stream.append(line | {"seconds": round(time.thread_time() - begun, 6)}, data)

        self._do(write)

    def close(self) -> None:
        """Waits until all is written (DiskThread.close)."""
        if self._disk.close() and self._stream is not None:
            self._stream.close()
            self._stream = None

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

    def _do(self, write: Callable[[EpisodeStream], None]) -> None:
        """Has the thread write to the stream, which begins with the first step that is recorded."""
        step = self._step

        def work() -> None:
            if self._stream is None:
                stream = EpisodeStream(self._run_dir)
                stream.begin(step - 1)
                self._stream = stream
            write(self._stream)

        self._disk.do(f"episodes of step {step}", work)


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


def _figures(
    step: int, number: int, rows: Sequence[dict[str, Any]], left: dict[Row, str]
) -> tuple[dict[str, Any], bytes]:
    """Returns the line and the bytes of a record of what was computed of an episode's rows."""
    gone = [[place, kind] for (episode, place), kind in left.items() if episode == number]
    line = {"kind": FIGURES, "step": step, "episode": number, "left": gone}
    line["rewards"] = [[row["row"], row["reward"]] for row in rows]
    tokens = [row["tokens"] for row in rows]
    names = list(tokens[0]) if tokens else []
    arrays = {n: np.concatenate([t[n].float().numpy() for t in tokens]) for n in names}
    about = [{k: v for k, v in row.items() if k != "tokens"} for row in rows]
    arrays = {n: np.nan_to_num(a).astype("<f4") for n, a in arrays.items()}
    return line, pack(line | {"rows": about}, arrays)


def _number(episode: Episode) -> int:
    return episode.number


def _count(episode: Episode) -> int:
    return 0 if episode.batch is None else len(episode.batch["input_ids"])
