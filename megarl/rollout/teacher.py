"""Defines ServerTeacher, which asks inference servers for a teacher's logprobs of a batch.

B samples of a batch, b held by this rank, n tokens of one, k tokens that the teacher names.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import aiohttp
import torch
from torch import Tensor

from megarl.api.batch import Batch, Tokens
from megarl.api.context import CONTEXT_FAILED, in_context, out_of_context
from megarl.api.failures import on_every_rank
from megarl.observability.logging import get_logger, warn_on_rank_zero
from megarl.utils.http import (
    MAX_REST,
    HttpError,
    Retries,
    call_server,
    in_thread,
    is_final,
    open_session,
    shown,
)

log = get_logger(__name__)

AT_ONCE = 32  # requests
# what k logprobs in float32 leave to the others cannot be told from rounding below this
TAIL_FLOOR = 1e-6

Fields = dict[str, Tensor]  # of one sample: teacher_logp [n], and with k the fields beside it


class ServerTeacher:
    """Has servers compute the logprobs of samples, which it sends as prompts, with nothing to
    generate. Servers compute a prompt's logprobs at temperature 1."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        top: int,
        vocab_size: int,
        timeout: float = 120.0,
        retry_timeout: float = 300.0,
    ) -> None:
        """top: k. vocab_size: the student's; with k no less, the teacher names every token.
        timeout: seconds of one request. retry_timeout: seconds for which a sample is asked for
        again."""
        self.addresses, self.top, self.timeout = list(addresses), top, timeout
        self.retry_timeout = retry_timeout
        self.whole = top >= vocab_size

    def teach(self, batch: Batch, *, top: bool = True) -> Tensor:
        """Adds what Teacher.teach adds; returns which samples have failed, [B] bool, whose fields
        are not to be used: those that no server answered for, too. Each rank asks for the rows it
        holds. Collective."""
        read = in_context(batch)

        def of_held_rows() -> tuple[list[Fields], Tensor]:
            return self._ask(read, self.top if top else 0)

        fields, unanswered = on_every_rank("teacher", of_held_rows, batch.comm)
        for name, nothing in _nothing(0, self.top if top else 0).items():
            values = torch.cat([nothing, *(one[name] for one in fields)])
            said = Tokens(values, read.lengths[read.rows])
            batch[name] = out_of_context(batch, name, said)
        failed = batch.gather(unanswered)
        return failed | batch.get(CONTEXT_FAILED, torch.zeros_like(failed))

    def _ask(self, batch: Batch, k: int) -> tuple[list[Fields], Tensor]:
        """Returns what is said of each held row, and whether its requests failed, [b] bool."""
        held = batch.padded(names=["input_ids"])
        lengths = batch.lengths[batch.rows].tolist()
        rows = [ids[:n].tolist() for ids, n in zip(held["input_ids"], lengths, strict=True)]
        answers = in_thread(asyncio.run, self._of_rows(rows, k)).result()
        failed = torch.tensor([one is None for one in answers], dtype=torch.bool)
        fields = [
            _nothing(n, k) if one is None else one for one, n in zip(answers, lengths, strict=True)
        ]
        return fields, failed

    async def _of_rows(self, rows: Sequence[list[int]], k: int) -> list[Fields | None]:
        places, lost = asyncio.Semaphore(AT_ONCE), asyncio.Event()
        async with open_session() as session:

            async def of_row(at: int) -> Fields | None:
                async with places:
                    return await self._of_row(session, at, rows[at], k, lost)

            return list(await asyncio.gather(*map(of_row, range(len(rows)))))

    async def _of_row(
        self, session: aiohttp.ClientSession, at: int, ids: list[int], k: int, lost: asyncio.Event
    ) -> Fields | None:
        """Returns what the servers say of a sample; None, with a warning, where none answers. A
        sample that was asked for until the end of the timeout sets `lost`: with it set, each server
        is asked once."""
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
        }
        retries = Retries(self.retry_timeout)
        while True:
            for i in range(len(self.addresses)):
                server = self.addresses[(at + i) % len(self.addresses)]
                try:
                    answer = await call_server(
                        session, "POST", server, "/generate", body, timeout=self.timeout
                    )
                    return read_answer(answer, ids, k, whole=self.whole)
                except (HttpError, ValueError) as e:
                    why = e
            if not isinstance(why, HttpError) or is_final(why):
                break
            if lost.is_set() or (rest := retries.rest()) is None:
                lost.set()
                break
            await asyncio.sleep(max(rest, min(why.retry_after or 0.0, MAX_REST)))
        warn_on_rank_zero(log, "the teacher has no answer for a sample: %s", why)
        return None


def _nothing(n: int, k: int) -> Fields:
    """Returns the fields of a sample of n tokens of which nothing is said."""
    fields = {"teacher_logp": torch.zeros(n)}
    if k:
        fields |= {"teacher_logprobs": torch.zeros(n, k), "teacher_tail": torch.zeros(n)}
        fields["given_ids"] = torch.full((n, k), -1, dtype=torch.int32)
    return fields


def read_answer(answer: Any, ids: Sequence[int], k: int, *, whole: bool = False) -> Fields:
    """Returns what an answer of /generate says of the prompt `ids`; `whole`: k is the vocabulary.
    Raises ValueError for an answer that breaks SGLang's protocol, or speaks of other tokens."""
    try:
        meta = answer["meta_info"]
        own = meta["input_token_logprobs"]
        if [entry[1] for entry in own] != list(ids):
            raise ValueError(f"it speaks of tokens {shown([entry[1] for entry in own])}")
        fields = _nothing(len(ids), k)
        fields["teacher_logp"][1:] = torch.tensor([float(entry[0]) for entry in own[1:]])
        if k and len(ids) > 1:
            named = meta["input_top_logprobs"][1:]
            if any(len(at) != k for at in named):
                raise ValueError(f"it names another number of tokens than {k} at a position")
            logprobs = torch.tensor([[float(e[0]) for e in at] for at in named])
            which = torch.tensor([[int(e[1]) for e in at] for at in named], dtype=torch.int32)
            fields["teacher_logprobs"][1:], fields["given_ids"][1:] = logprobs, which
            if which.sort(-1).values.diff(dim=-1).eq(0).any():
                raise ValueError("it names a token twice at one position")
            # a teacher of more rows may name k tokens that are not the student's whole vocabulary
            fields["teacher_tail"][1:] = tail_of(logprobs, whole=whole and int(which.max()) < k)
    except (KeyError, TypeError, IndexError, RuntimeError) as e:
        raise ValueError(f"the answer {shown(answer)} has no logprobs of the prompt: {e}") from None
    if fields["teacher_logp"].isnan().any() or (k and fields["teacher_logprobs"].isnan().any()):
        raise ValueError("a logprob is NaN: the weights are broken, or overflow in their dtype")
    return fields


def tail_of(logprobs: Tensor, *, whole: bool = False) -> Tensor:
    """Returns the log of what logprobs [...,k] leave to all other tokens, [...]: at least
    TAIL_FLOOR, below which it is rounding. Of the `whole` vocabulary nothing is left, -inf.

    >>> tail_of(torch.tensor([[0.5, 0.25], [1.0, 0.0]]).log()).exp()
    tensor([2.5000e-01, 1.0000e-06])
    """
    if whole:
        return torch.full(logprobs.shape[:-1], -math.inf)
    left = 1.0 - logprobs.double().exp().sum(-1)
    return left.clamp(min=TAIL_FLOOR).log().float()
