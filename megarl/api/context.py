"""Lets another model read the answers of a batch below a prompt of its own (its context), as a
teacher does that sees the solution. The tokens that follow on the prompt are the same, at other
positions: student  [q q q a a a], teacher  [c c c c c a a a].

B sequences of a batch, b of them held by this rank, n of an episode, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.tokens import MASK, PAD, seqlens

# fields: the context's tokens [n,S,w] int32, one after the other and then -1, for w is as large as
# the batch needs; how many they are [n]; the tokens of the prompt that they stand for [n]; whether
# the row failed, as its context is too long [n] bool
CONTEXT, CONTEXT_LENGTH, PROMPT_LENGTH, CONTEXT_FAILED = (
    *("context_ids", "context_length", "prompt_length", "context_failed"),
)


def prompt_lengths(batch: Padded) -> list[int]:
    """Returns how many tokens stand before the first one that the policy wrote, in n rows."""
    lengths = batch[MASK].bool().sum(1)
    written = batch["versions"] >= 0
    first = torch.where(written.any(1), written.int().argmax(1), lengths)
    numbers: list[int] = first.tolist()
    return numbers


def add_contexts(
    parts: Sequence[Padded],
    prompts: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[Sequence[int] | None]],
) -> list[Padded]:
    """Returns the batches of episodes with the fields of a context for each of their rows.

    prompts: their prompt_lengths. contexts: tokens; where they are None, the row has failed, and is
    read below its own prompt."""
    rows = [
        [ids[:n] if given is None else torch.tensor(given) for ids, n, given in zip(*episode)]
        for episode in zip((part["input_ids"] for part in parts), prompts, contexts, strict=True)
    ]
    lengths = (seqlens(part) for part in parts)
    pairs = [pair for own, given in zip(lengths, rows) for pair in zip(own, given, strict=True)]
    width = max(-(-len(ids) // n) for n, ids in pairs)
    out = []
    for part, own, given, some in zip(parts, prompts, contexts, rows, strict=True):
        field = torch.full((*part["input_ids"].shape, width), -1, dtype=torch.int32)
        for place, ids in zip(field, some, strict=True):
            place.view(-1)[: len(ids)] = ids
        fields = {
            CONTEXT: field,
            CONTEXT_LENGTH: torch.tensor([len(ids) for ids in some]),
            PROMPT_LENGTH: torch.tensor(own),
            CONTEXT_FAILED: torch.tensor([ids is None for ids in given]),
        }
        out.append(part | fields)
    return out


def in_context(batch: Batch) -> Batch:
    """Returns the tokens of the batch as they are read below their contexts, held by the same
    ranks; the batch itself where it has no contexts."""
    if CONTEXT not in batch:
        return batch
    rows = zip(*(_pieces(batch[name]) for name in (CONTEXT, "input_ids")), *_bounds(batch))
    ids = [part for c, row, n, p in rows for part in (c.flatten()[:n].to(row.dtype), row[p:])]
    lengths = batch.lengths - batch[PROMPT_LENGTH] + batch[CONTEXT_LENGTH]
    return batch.with_ids(torch.cat([batch["input_ids"].values[:0], *ids]), lengths)


def out_of_context(batch: Batch, name: str, tokens: Tokens) -> Tokens:
    """Returns values of the tokens of `in_context(batch)`, for its field `name`, at the positions
    that the tokens have in the batch. Its prompts get what the field is padded with."""
    if CONTEXT not in batch:
        return tokens
    values = [tokens.values[:0]]
    for row, n, p in zip(_pieces(tokens), *_bounds(batch), strict=True):
        values += [row.new_full((p, *row.shape[1:]), PAD.get(name, 0)), row[n:]]
    return Tokens(torch.cat(values), batch.lengths[batch.rows])


def _pieces(tokens: Tokens) -> list[Tensor]:
    return tokens.pieces(torch.arange(len(tokens.lengths)))


def _bounds(batch: Batch) -> tuple[list[int], list[int]]:
    """Returns the lengths of the contexts and prompts of the held rows."""
    contexts, prompts = (batch[name][batch.rows] for name in (CONTEXT_LENGTH, PROMPT_LENGTH))
    return contexts.tolist(), prompts.tolist()
