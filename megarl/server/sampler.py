"""The batched sampler: one token and its logprob for each of B rows of logits [B,V].

Reported logprobs are log_softmax(logits / T): what a trainer recomputes. Truncation (top-k, top-p)
and the stop tokens held back by min_new_tokens shape only what is drawn.

Randomness is counter-based: the uniform behind a token is a hash of (seed, position in the
sequence), so it depends neither on the batch nor on how the sequence was cut into requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from megarl.server.sequence import ServedSequence

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FIRST_TOPK = 1024  # rows whose kept tokens fit in here need no sort of the vocabulary
_NO_TOP_P = 2.0  # above any cumulative probability, rounding included


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies the finaliser of splitmix64 (Steele, Lea, Flood 2014) to uint64, wrapping."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def seed_keys(seeds: Sequence[int]) -> np.ndarray:
    """Returns [B] uint64 stream keys of 64-bit seeds."""
    return _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns [B] float64 in [0,1): output number `position` of each key's splitmix64 stream."""
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Sampled(NamedTuple):
    """Holds one token and its logprob for each of B sequences."""

    tokens: list[int]
    logprobs: list[float]


class SamplingBatch:
    """Holds the sampling parameters of B sequences as tensors, for as long as the batch is the
    same."""

    def __init__(
        self, seqs: Sequence[ServedSequence], device: torch.device, vocab_size: int
    ) -> None:
        params = [s.params for s in seqs]
        self.seqs = seqs
        self.keys = seed_keys([s.seed for s in seqs])
        temperatures = [1.0 if p.greedy else p.temperature for p in params]
        self.temperature = (
            torch.tensor(temperatures, device=device)[:, None]
            if any(t != 1.0 for t in temperatures)
            else None
        )
        greedy = [p.greedy or p.top_k == 1 for p in params]
        self.all_greedy, self.any_greedy = all(greedy), any(greedy)
        self.greedy = torch.tensor(greedy, device=device)
        cut = [
            i
            for i, p in enumerate(params)
            if not greedy[i] and (0 < p.top_k < vocab_size or p.top_p < 1.0)
        ]
        self.cut = torch.tensor(cut, device=device) if cut else None
        self.top_k = torch.tensor(
            [params[i].top_k if params[i].top_k > 0 else vocab_size for i in cut], device=device
        )
        self.top_p = torch.tensor(
            [params[i].top_p if params[i].top_p < 1.0 else _NO_TOP_P for i in cut], device=device
        )
        self.min_new_tokens = max((p.min_new_tokens for p in params), default=0)

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Draws one token for each row of logits [B,V]."""
        logits = logits.float()
        if self.temperature is not None:
            logits = logits / self.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        tokens = self._draw(self._hold_back(logprobs))
        return Sampled(
            tokens=tokens.tolist(),
            logprobs=logprobs.gather(1, tokens[:, None])[:, 0].tolist(),
        )

    def _hold_back(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Sets the stop tokens of sequences shorter than their min_new_tokens to -inf."""
        if not self.min_new_tokens:
            return logprobs
        held = [
            (i, token)
            for i, s in enumerate(self.seqs)
            if len(s.output) < s.params.min_new_tokens
            for token in s.stop_ids
        ]
        if not held:
            return logprobs
        rows, columns = torch.tensor(held, device=logprobs.device).T
        logprobs = logprobs.clone()
        logprobs[rows, columns] = -torch.inf
        return logprobs

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Returns [B] tokens: greedy rows take the argmax, others the inverse CDF at u(seed,
        position)."""
        if self.all_greedy:
            return logprobs.argmax(-1)
        probs = logprobs.exp()
        if self.cut is not None:
            probs[self.cut] = truncate(probs[self.cut], self.top_k, self.top_p)
        cdf = probs.cumsum(-1)
        u = uniforms(self.keys, np.array([s.length for s in self.seqs]))
        total = cdf[:, -1:]
        x = torch.from_numpy(u).to(logprobs.device)[:, None].mul(total).to(cdf.dtype)
        # u * total may round up to total, which no entry of the cdf exceeds
        x = torch.minimum(x, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cdf, x, right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)
        if self.any_greedy:
            tokens = torch.where(self.greedy, logprobs.argmax(-1), tokens)
        return tokens


def truncate(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Sets what is outside top-k and top-p [b] of probs [b,V] to 0; it does not renormalise.

    The filters are joint, as SGLang applies them: rank r is kept if r < top_k and if the mass
    before it is at most top_p.
    """
    width = min(probs.shape[1], _FIRST_TOPK)
    values, ids = probs.topk(width)
    covered = (top_k <= width) | (values.sum(-1) > top_p)
    if width < probs.shape[1] and not bool(covered.all()):
        values, ids = probs.sort(dim=-1, descending=True)
    rank = torch.arange(values.shape[1], device=probs.device)
    before = values.cumsum(-1) - values
    keep = (rank < top_k[:, None]) & (before <= top_p[:, None])
    return torch.zeros_like(probs).scatter_(1, ids, values * keep)
