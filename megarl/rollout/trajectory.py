"""Defines Trajectory, a rollout token by token: a tree of turns, and its way to a batch.

A turn is a piece of text that was read (a prompt, a tool's output) or written (an answer of the
policy, with its logprobs and versions). Turns follow on one another, so a conversation is a line:

    rollout = Trajectory()
    rollout.read(prompt_ids)
    rollout.wrote(response)               # the answer to exactly the tokens of rollout.head
    rollout.read(tool_ids)
    rollout.wrote(response)
    rollout.score(1.0)
    return to_batch([rollout, ...])

Where an agent goes on from an earlier turn (it forks, or shortens its history), turns form a tree.
Every call says what it follows on, or follows on the head, the turn that came last. A second turn
after the same one is a fork, so nothing is ever overwritten, and several requests may run at once:

    turn = rollout.find(token_ids)        # the longest recorded path that token_ids begin with
    asked = rollout.read(token_ids[turn.end :], after=turn)
    response = await engine.agenerate(ModelRequest(input_ids=asked.path_tokens(), ...))
    answer = rollout.wrote(response, after=asked)       # answer.number names it, see rollout.turns
    rollout.branch(rollout.root)          # the head is where everything began, for a new history
    rollout.restart(token_ids)            # the same after a summary: turns are counted on

Rows. A line is one row; a tree is one row for each leaf. Every sampled token is trained in exactly
one row: that of a turn which several rows share in the first of them, in the others it is read
like a prompt. Rows stand in the order in which their branches began (depth first). What was read
and never answered at a fork, as by a request that failed, makes no row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.api.batch import Padded
from megarl.api.inference import FAILURES
from megarl.api.records import ModelResponse
from megarl.api.tokens import REWARD_PART
from megarl.rollout.episode_context import current_episode


@dataclass(kw_only=True, eq=False)
class Turn:
    """Holds tokens that were read or written in one piece after those of `parent`.

    number: its place in the order in which turns were made; the root, which has no tokens, is 0.
    end: tokens from the beginning to its end.
    depth: written turns on the way to it, itself not counted.
    response: what the server reported of a written turn; None of one that was read.
    reward: what a written turn earned by itself; Trajectory.score adds it to the outcome.
    """

    parent: Turn | None = None
    number: int = 0
    tokens: Sequence[int] = ()
    end: int = 0
    depth: int = 0
    response: ModelResponse | None = None
    reward: float = 0.0
    children: list[Turn] = field(default_factory=list, repr=False)

    def path(self) -> list[Turn]:
        """Returns the turns from the root to this one."""
        turns, at = [self], self.parent
        while at is not None:
            turns.append(at)
            at = at.parent
        return turns[::-1]

    def routed(self) -> int:
        """Returns how many tokens, from the beginning on, have routes in an answer on the path:
        an answer that follows need not bring them again."""
        end = 0
        for response in (turn.response for turn in self.path()):
            if response and response.routed_experts is not None and response.routes_from <= end:
                end = max(end, response.routes_from + len(response.routed_experts))
        return end

    def path_tokens(self) -> list[int]:
        """Returns the tokens from the beginning to this turn's end."""
        return [token for turn in self.path() for token in turn.tokens]


class Trajectory:
    """Holds one rollout as a tree of turns.

    index: its place among the rollouts of its row of data.
    messages: the chat as it stands, for workflows that keep one.
    turns: all turns by number. head: the turn that the next one follows on.
    written: how many of the turns the policy wrote.
    failure: why the rollout is not valid, one of api.inference.FAILURES; None while it is.
    notes: texts that explain the reward, such as a judge's, by name.
    """

    def __init__(self, *, index: int = 0, messages: Sequence[dict[str, Any]] = ()) -> None:
        self.index, self.messages = index, list(messages)
        self.root = self.head = Turn()
        self.turns = [self.root]
        self.written = 0
        self.failure: str | None = None
        self.parts: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self._outcome: float | None = None
        self._discount = 1.0

    # -- turns

    def read(self, tokens: Sequence[int], *, after: Turn | None = None) -> Turn:
        """Appends a turn that the policy only reads, and returns it: it is not trained on, its
        tokens have logprob 0 and version -1. Without tokens it returns the turn to follow on."""
        at = self.head if after is None else after
        self.head = self._append(at, tokens, None) if tokens else at
        return self.head

    def wrote(self, response: ModelResponse, *, after: Turn | None = None) -> Turn:
        """Appends the tokens of an answer as a turn, and returns it. They are never tokenized
        again: the logprobs belong to them.

        Raises ValueError where the answer is not to the tokens of the turn it follows on, or does
        not have a logprob and a version for every token."""
        at = self.head if after is None else after
        n, asked = len(response.output_tokens), at.path_tokens()
        if list(response.input_tokens) != asked:
            raise ValueError(
                f"an answer to {len(response.input_tokens)} tokens cannot follow on turn "
                f"{at.number}, which ends {len(asked)} other tokens: what is trained must be what "
                "the server saw; ask for turn.path_tokens(), and name the turn by after="
            )
        if (len(response.output_logprobs), len(response.output_versions)) != (n, n):
            raise ValueError(
                f"an answer of {n} tokens has {len(response.output_logprobs)} logprobs and "
                f"{len(response.output_versions)} versions: it needs one of each for every token"
            )
        self.head = self._append(at, response.output_tokens, response)
        return self.head

    def branch(self, at: Turn) -> None:
        """Makes `at` the head: the next turn follows on it, whatever else does."""
        self.head = at

    def restart(self, tokens: Sequence[int]) -> Turn:
        """Begins anew after a summary, which is the head: reads `tokens` as a branch from the root.
        Later answers are numbered after those that the summary replaces."""
        answers = self.head.depth
        turn = self.read(tokens, after=self.root)
        turn.depth = answers
        return turn

    def find(self, tokens: Sequence[int]) -> Turn:
        """Returns the turn whose path is the longest that `tokens` begin with, the root at worst;
        of several the one with the fewest turns after it, then the first."""
        best, todo = self.root, [self.root]
        while todo:
            turn = todo.pop()
            for child in turn.children:
                if list(tokens[turn.end : child.end]) == list(child.tokens):
                    best = max(best, child, key=_by_reach)
                    todo.append(child)
        return best

    def _append(self, at: Turn, tokens: Sequence[int], response: ModelResponse | None) -> Turn:
        if at.number >= len(self.turns) or self.turns[at.number] is not at:
            raise ValueError(f"turn {at.number} is one of another trajectory")
        turn = Turn(
            parent=at,
            number=len(self.turns),
            tokens=list(tokens),
            end=at.end + len(tokens),
            depth=at.depth + (at.response is not None),
            response=response,
        )
        at.children.append(turn)
        self.turns.append(turn)
        self.written += response is not None
        return turn

    @property
    def tokens(self) -> list[int]:
        """Returns the tokens from the beginning to the head."""
        return self.head.path_tokens()

    @property
    def answers(self) -> list[ModelResponse]:
        """Returns the policy's turns from the beginning to the head, as the server reported
        them."""
        return [turn.response for turn in self.head.path() if turn.response is not None]

    @property
    def answered(self) -> int:
        """Returns the number of answers up to the head, those before a restart too."""
        return self.head.depth + (self.head.response is not None)

    @property
    def forks(self) -> int:
        """Returns how often the conversation forked: its rows but one."""
        return len(self.leaves()) - 1

    # -- rewards

    def score(self, outcome: float, *, discount: float = 1.0) -> None:
        """Notes what the rollout as a whole earned, and the discount per turn.

        `reward` is the sum over written turns of discount**depth times what the turn earned; the
        outcome is earned by the turn that was written last. A rewards.Scored brings its
        parts, which the batch then has, and its notes."""
        self._outcome, self._discount = float(outcome), discount
        self.parts = dict(getattr(outcome, "parts", {}))
        self.notes = dict(getattr(outcome, "notes", {}))
        if self.notes and (episode := current_episode.get()) is not None:
            episode.notes.append({"rollout": self.index, **self.notes})

    def fail(self, why: str) -> None:
        """Notes that something failed, so that the rollout is never trained on: `why` is one of
        api.inference.FAILURES. Raises ValueError for another word."""
        if why not in FAILURES:
            raise ValueError(f"failure {why!r}: use one of {', '.join(FAILURES)}")
        self.failure = why

    @property
    def reward(self) -> float:
        """Returns all that the rollout earned, see `score`. Raises ValueError before `score`, or
        where a turn earned something that the policy did not write."""
        if self._outcome is None:
            raise ValueError(f"rollout {self.index} has no reward: call score(), or fail()")
        read = [t.number for t in self.turns if t.response is None and t.reward]
        if read:
            raise ValueError(
                f"turn {read[0]} was read, so it earns nothing: give its reward to the turn that "
                "the policy wrote before it"
            )
        last = max((t for t in self.turns if t.response is not None), key=_number, default=None)
        outcome = self._discount ** (last.depth if last else 0) * self._outcome
        return outcome + sum(self.turn_reward(t) for t in self.turns)

    def turn_reward(self, turn: Turn) -> float:
        """Returns what a turn adds to `reward`, the outcome apart."""
        return self._discount**turn.depth * turn.reward if turn.reward else 0.0

    # -- rows

    def leaves(self) -> list[Turn]:
        """Returns the last turn of every row, in the order of rows; one at least."""
        answered = [turn.response is not None and len(turn.tokens) > 0 for turn in self.turns]
        for turn in reversed(self.turns[1:]):  # a turn's number is above its parent's
            if turn.parent is not None and answered[turn.number]:
                answered[turn.parent.number] = True
        found, todo = [], [self.root]
        while todo:
            turn = todo.pop()
            after = [c for c in turn.children if answered[c.number]] or turn.children[:1]
            if not after:
                found.append(turn)
            todo += reversed(after)
        return found

    def rows(self) -> Iterator[list[tuple[Turn, bool]]]:
        """Yields of every row its turns in order, each with whether the row trains it."""
        seen: set[int] = set()
        for leaf in self.leaves():
            path = leaf.path()
            yield [(t, t.response is not None and t.number not in seen) for t in path]
            seen.update(t.number for t in path)


def to_batch(
    rollouts: Sequence[Trajectory],
    rewards: Sequence[float] | None = None,
    *,
    turn_rewards: bool = False,
) -> Padded:
    """Returns the batch that a workflow returns, right-padded: the rows of every rollout in turn.

    rewards: scores the rollouts with these outcomes; None: they are scored already.

    The batch has input_ids, attention_mask, loss_mask, logprobs, versions, each [n,S]; rewards [n]
    float32, the whole rollout's on each of its rows; rollout_ids [n]; truncated [n] bool, whether
    max_new_tokens cut the row's last answer. turn_rewards adds token_rewards [n,S] float32, which
    hold what turns earned (Turn.reward) at their last tokens. Where responses carry the experts
    that routers chose, so does the batch: routed_experts [n,S,L,k], -1 where unknown.

    Where rewards have parts, so does the batch: reward_part/<name> [n] float32.

    A rollout that failed is one row, with valid [n] False and its kind in failure [n]. Raises
    ValueError for a rollout without a reward.
    """
    if rewards is not None:
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.score(reward)
    # of a rollout that failed the first row alone, so that it counts once
    ends = [None if r.failure is None else 1 for r in rollouts]
    rows = [(i, row) for i, r in enumerate(rollouts) for row in list(r.rows())[: ends[i]]]
    width = max([1, *(row[-1][0].end for _, row in rows)])
    earned = [math.nan if r.failure else r.reward for r in rollouts]
    batch = _blank(len(rows), width) | {
        "rewards": torch.tensor([earned[i] for i, _ in rows], dtype=torch.float32),
        "rollout_ids": torch.tensor([i for i, _ in rows]),
        "truncated": torch.tensor([_was_cut(row) for _, row in rows]),
    }
    for name in {name: None for rollout in rollouts for name in rollout.parts}:
        parts = [rollouts[i].parts.get(name, math.nan) for i, _ in rows]
        batch[f"{REWARD_PART}{name}"] = torch.tensor(parts, dtype=torch.float32)
    if turn_rewards:
        batch["token_rewards"] = torch.zeros(len(rows), width, dtype=torch.float32)
    for k, (i, row) in enumerate(rows):
        _fill({name: values[k] for name, values in batch.items()}, row, rollouts[i])
    if (routes := _routes([row for _, row in rows], width)) is not None:
        batch["routed_experts"] = routes
    why = [rollouts[i].failure for i, _ in rows]
    if any(why):
        batch["valid"] = torch.tensor([kind is None for kind in why])
        batch["failure"] = torch.tensor([FAILURES.index(kind or FAILURES[0]) for kind in why])
    return batch


def _blank(n: int, width: int) -> Padded:
    """Returns the per-token fields of n rows without tokens."""
    return {
        "input_ids": torch.zeros(n, width, dtype=torch.int64),
        "attention_mask": torch.zeros(n, width, dtype=torch.bool),
        "loss_mask": torch.zeros(n, width, dtype=torch.bool),
        "logprobs": torch.zeros(n, width, dtype=torch.float32),
        "versions": torch.full((n, width), -1, dtype=torch.int32),
    }


def _was_cut(row: Sequence[tuple[Turn, bool]]) -> bool:
    answers = [turn.response for turn, _ in row if turn.response is not None]
    return bool(answers) and answers[-1].stop_reason == "length"


def _fill(out: Padded, row: Sequence[tuple[Turn, bool]], rollout: Trajectory) -> None:
    """Writes the turns of a row into the fields `out` of the batch, each [S]."""
    for turn, trained in row:
        place = slice(turn.end - len(turn.tokens), turn.end)
        out["input_ids"][place] = torch.tensor(turn.tokens, dtype=torch.int64)
        out["attention_mask"][place] = True
        out["loss_mask"][place] = trained
        if turn.response is not None:
            out["logprobs"][place] = torch.tensor(turn.response.output_logprobs)
            versions = torch.tensor(turn.response.output_versions, dtype=torch.int32)
            out["versions"][place] = versions
        if "token_rewards" in out and trained and turn.tokens:
            out["token_rewards"][turn.end - 1] = rollout.turn_reward(turn)


def _routes(rows: Sequence[Sequence[tuple[Turn, bool]]], width: int) -> Tensor | None:
    """Returns routed_experts [n,S,L,k] of rows; None where no response has any. A position's routes
    are those of the first response that knows them."""
    found = [
        (k, t.response.routes_from, t.response.routed_experts)
        for k, row in enumerate(rows)
        for t, _ in row
        if t.response and t.response.routed_experts is not None
    ]
    if not found:
        return None
    some = found[0][2]
    out = torch.full((len(rows), width, *some.shape[1:]), -1, dtype=some.dtype)
    for k, start, known in found:
        part = out[k, start : start + len(known)]
        part.copy_(torch.where(part < 0, known, part))
    return out


def _by_reach(turn: Turn) -> tuple[int, int, int]:
    return turn.end, -len(turn.children), -turn.number


def _number(turn: Turn) -> int:
    return turn.number
