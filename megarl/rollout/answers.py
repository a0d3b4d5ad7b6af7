"""Keeps the answers of episodes in flight, so that a run that is started again goes on with them.

A workflow runs from its beginning after a resume. A request that it made before gets the tokens it
had then, and is continued if it had not ended. All answers are kept as they were at one moment, a
*cut*: when a pause had brought in every token written so far. Keeping what had ended, and not the
beginnings of the rest, would favour short answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch

from megarl.api.records import ModelRequest
from megarl.rollout.generation import Sample

# request (a digest), tokens, logprobs, versions (tensors), stop_reason, perhaps routes (a tensor)
Answer = dict[str, Any]
Kept = list[tuple[Any, list[Answer]]]  # of each episode, the row's id and its answers


class AnswerLog:
    """Holds the answers of one episode. `kept`: those of the same episode before a resume."""

    def __init__(self, kept: Iterable[Answer] = ()) -> None:
        self._kept = list(kept)  # that no request has asked for yet
        self._requests: list[_Request] = []
        self._cut: list[tuple[_Request, int, str]] = []  # with length and stop reason
        self._kept_at_cut = self._kept

    def begin(self, sample: Sample) -> None:
        """Takes note of a sample before its first request. Where an answer to the same request
        (prompt, seed, sampling parameters) is kept, the sample begins with it."""
        request = _Request(sample)
        for answer in self._kept:
            if answer["request"] == request.key:
                self._kept = [a for a in self._kept if a is not answer]
                response = sample.response
                response.output_tokens = answer["tokens"].tolist()
                response.output_logprobs = answer["logprobs"].tolist()
                response.output_versions = answer["versions"].tolist()
                response.stop_reason = answer["stop_reason"]
                if sample.routes is not None:
                    sample.routes.begin_with(answer.get("routes"), response.output_len)
                    response.routed_experts = sample.routes.known
                break
        self._requests.append(request)

    @property
    def tokens(self) -> int:
        """Returns how many tokens the answers have so far."""
        return sum(request.progress()[0] for request in self._requests)

    def end(self) -> None:
        """Notes that the episode has ended: its answers do not change any more."""
        for request in self._requests:
            request.compact()

    def oldest_kept(self) -> int | None:
        """Returns the oldest version of the tokens of before a resume that no request has asked for
        yet; None where there are none."""
        versions = [int(a["versions"].min()) for a in self._kept if len(a["versions"])]
        return min(versions, default=None)

    def cut(self) -> None:
        """Notes how far every answer is."""
        self._cut = [(r, *r.progress()) for r in self._requests]
        self._kept_at_cut = self._kept

    def state(self) -> list[Answer]:
        """Returns the answers as of the last cut, but those without a token; plain data."""
        found = [request.upto(n, reason) for request, n, reason in self._cut if n]
        return self._kept_at_cut + found


class _Request:
    """Holds a request's answer: in a sample that grows, and after its end as tensors."""

    def __init__(self, sample: Sample) -> None:
        self.key = _digest(sample.request)
        self._sample = sample
        self._ended: Answer | None = None

    def progress(self) -> tuple[int, str]:
        """Returns the tokens there are, and the stop reason ("" while it goes on)."""
        if self._ended is not None:
            return len(self._ended["tokens"]), self._ended["stop_reason"]
        response = self._sample.response
        return response.output_len, response.stop_reason

    def compact(self) -> None:
        """Keeps the answer in 12 bytes per token, routes apart, from now on."""
        if self._ended is None:
            self._ended = self.upto(*self.progress())
            del self._sample

    def upto(self, n: int, stop_reason: str) -> Answer:
        """Returns the first `n` tokens of the answer."""
        if self._ended is not None:
            part = {m: self._ended[m][:n].clone() for m in ("tokens", "logprobs", "versions")}
            part |= self._routes(self._ended.get("routes"), len(self._ended["tokens"]) - n)
            return self._ended | part | {"stop_reason": stop_reason}
        response = self._sample.response
        routes = self._routes(response.routed_experts, response.output_len - n)
        return routes | {
            "request": self.key,
            "tokens": torch.tensor(response.output_tokens[:n], dtype=torch.int32),
            "logprobs": torch.tensor(response.output_logprobs[:n], dtype=torch.float32),
            "versions": torch.tensor(response.output_versions[:n], dtype=torch.int32),
            "stop_reason": stop_reason,
        }

    @staticmethod
    def _routes(known: torch.Tensor | None, later: int) -> Answer:
        """Returns the routes of an answer without those of its `later` tokens, if it has any."""
        return {} if known is None else {"routes": known[: max(0, len(known) - later)].clone()}


class KeptAnswers:
    """Hands the answers of earlier episodes to those that begin again, by the row's id; episodes of
    one row in their order."""

    def __init__(self, kept: Iterable[tuple[Any, list[Answer]]] = ()) -> None:
        self._kept = list(kept)

    def log_for(self, row: dict[str, Any]) -> AnswerLog:
        """Returns the log of an episode of `row` that begins, with what is kept for it."""
        for i, (row_id, answers) in enumerate(self._kept):
            if row_id == row.get("row_id"):
                del self._kept[i]
                return AnswerLog(answers)
        return AnswerLog()


# of the episode whose workflow runs; tasks that it starts inherit it
current: ContextVar[AnswerLog | None] = ContextVar("current", default=None)


def _digest(request: ModelRequest) -> str:
    """Returns a digest of all that the distribution of a request's answer depends on."""
    key = (list(request.input_ids), request.seed, request.gconfig)
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
