"""Brings traces of verifiers together with what the gateway recorded: what is trained is what the
server sampled, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from megarl.rollout.trajectory import Trajectory, Turn


class NotRecorded(RuntimeError):
    """Says that a trace would train a token which the policy did not sample in it."""


def trained_part(recorded: Trajectory, trace: Mapping[str, Any]) -> tuple[Trajectory, int]:
    """Returns the turns which the samples of a trace train, with all that stands before them, as a
    trajectory, and the number of recorded answers that no sample trains.

    A sample has token_ids, mask and logprobs of the same length. Raises NotRecorded where a token
    under the mask is not in `recorded` with exactly this logprob after exactly these tokens.
    """
    paths, trained = [], set()
    for number, sample in enumerate(trace["samples"]):
        found = _find(recorded, sample["token_ids"], sample["mask"], sample["logprobs"])
        if found is None:
            raise NotRecorded(
                f"trace {trace['id']}: sample {number} trains tokens that the policy did not "
                "sample in it, or with other logprobs: the environment changed them on the way"
            )
        path, masked = found
        paths.append(path)
        trained |= masked
    kept = Trajectory(index=recorded.index)
    copies = {recorded.root.number: kept.root}
    for path in paths:
        for before, turn in pairwise(path):
            if turn.number in copies:
                continue
            at = copies[before.number]
            if turn.response is not None and turn.number in trained:
                copies[turn.number] = kept.wrote(turn.response, after=at)
            else:
                copies[turn.number] = kept.read(turn.tokens, after=at)
    answers = sum(t.response is not None and len(t.tokens) > 0 for t in recorded.turns)
    return kept, answers - len(trained)


def _find(
    recorded: Trajectory, ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]
) -> tuple[list[Turn], set[int]] | None:
    """Returns a path of turns that accounts for every masked token, and the numbers of those turns
    that are masked; None where there is none."""
    last = max((i for i, m in enumerate(mask) if m), default=-1)
    todo: list[tuple[Turn, set[int]]] = [(recorded.root, set())]
    while todo:
        turn, masked = todo.pop()
        if turn.end > last:
            return turn.path(), masked
        for child in turn.children:
            place = slice(turn.end, child.end)
            if not child.tokens or list(ids[place]) != list(child.tokens):
                continue
            if not any(mask[place]):
                todo.append((child, masked))
            elif (
                child.response is not None
                and all(mask[place])
                and list(logprobs[place]) == list(child.response.output_logprobs)
            ):
                todo.append((child, masked | {child.number}))
    return None
