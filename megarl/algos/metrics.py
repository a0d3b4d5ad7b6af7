"""How far two sides disagree about the same tokens. Pure functions of [B,S] tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.algos.kl import kl_estimate

Decode = Callable[[Sequence[int]], str]


def spell_ids(ids: Sequence[int]) -> str:
    """What stands in for a tokenizer's decode where there is no tokenizer."""
    return " ".join(map(str, ids))


def logp_gap_stats(prox_logp: Tensor, logprobs: Tensor, loss_mask: Tensor) -> dict[str, float]:
    """How far the trainer's and the server's logprobs of the same tokens are apart, all [B,S].

    mismatch/k1, k3 estimate KL(server || trainer): the tokens were drawn by the server. With fresh
    weights and no bug these are rounding errors. Empty if no token is trained.
    """
    mask = loss_mask.bool()
    if not mask.any():
        return {}
    trainer, server = prox_logp[mask].double(), logprobs[mask].double()
    gap = (trainer - server).abs()
    return {
        "train_rollout_logprob_abs_diff/mean": float(gap.mean()),
        "train_rollout_logprob_abs_diff/max": float(gap.max()),
        "mismatch/k1": float(kl_estimate(server, trainer, "k1").mean()),
        "mismatch/k3": float(kl_estimate(server, trainer, "k3").mean()),
    }


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over trained tokens, all [B,S]: 1 is a perfect
    critic, 0 no better than a constant. 0 where the returns are all equal.
    """
    mask = loss_mask.bool()
    spread = returns[mask].double().var(unbiased=False) if mask.any() else 0.0
    if not spread > 0:
        return 0.0
    error = (returns[mask] - values[mask]).double().var(unbiased=False)
    return float(1 - error / spread)


@dataclass(frozen=True)
class LogpGap:
    """One token about which two sides disagree: its logprob as the one and the other say it."""

    row: int
    position: int
    ours: float
    theirs: float

    def show(
        self,
        batch: dict[str, Tensor],
        *,
        decode: Decode = spell_ids,
        sides: tuple[str, str] = ("trainer", "server"),
    ) -> str:
        """With the token's text between its neighbours, as »this« in: one and one is »two«."""
        length = int(batch["attention_mask"][self.row].sum())
        ids, t = batch["input_ids"][self.row, :length].tolist(), self.position
        around = (ids[max(0, t - 12) : t], ids[t : t + 1], ids[t + 1 : t + 5])
        before, token, after = (decode(part) for part in around)
        return (
            f"row {self.row} position {t}: {sides[0]} {self.ours:.6g}, {sides[1]} "
            f"{self.theirs:.6g}, token {ids[t]} {token!r} in {f'{before}»{token}«{after}'!r}"
        )


def worst_logp_gaps(ours: Tensor, theirs: Tensor, loss_mask: Tensor, k: int = 5) -> list[LogpGap]:
    """The k trained tokens of largest |ours - theirs|, worst first; NaN is worst of all."""
    mask = loss_mask.bool()
    gap = (ours.double() - theirs.double()).abs().nan_to_num(nan=float("inf"))
    gap = gap.masked_fill(~mask, -1.0).flatten()
    order = gap.topk(min(k, int(mask.sum()))).indices.tolist()
    width = mask.shape[1]
    return [
        LogpGap(
            row=i // width,
            position=i % width,
            ours=float(ours.flatten()[i]),
            theirs=float(theirs.flatten()[i]),
        )
        for i in order
    ]
