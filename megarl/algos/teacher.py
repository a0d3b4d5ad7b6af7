"""Plays the frozen policy that a student is drawn to: another model, or an earlier self."""

from __future__ import annotations

from megarl.algos.ref import Ref
from megarl.algos.rows import Data, put
from megarl.api.batch import Tokens

# what a teacher says of a batch, by the name of the engine's output; k = lm_head_topk
NAMED = {"teacher_logprobs": "topk_logprobs", "teacher_tail": "topk_tail"}


class Teacher(Ref):
    """Computes what a frozen policy thinks of a batch's tokens, and of what it would have said."""

    def teach(self, batch: Data, *, top: bool = True) -> None:
        """Adds batch["teacher_logp"] [B,S], the logprobs of the batch's tokens, 0 at t=0; and with
        `top` of each position the k likeliest tokens, "given_ids" [B,S,k] int32, their
        "teacher_logprobs" [B,S,k], and "teacher_tail" [B,S], the log of the probability of all
        others. Raises ValueError for a k above the vocabulary. Collective."""
        outputs = ("logprobs", *(("topk_ids", *NAMED.values()) if top else ()))
        found = self.forward(batch, outputs, self.temperature)
        if not top:
            put(batch, "teacher_logp", found)
            return
        put(batch, "teacher_logp", found["logprobs"])
        for name, output in NAMED.items():
            put(batch, name, found[output])
        ids = found["topk_ids"]
        ids = Tokens(ids.values.int(), ids.lengths) if isinstance(ids, Tokens) else ids.int()
        put(batch, "given_ids", ids)
