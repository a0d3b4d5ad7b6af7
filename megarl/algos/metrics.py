"""How far trainer and server disagree about the same tokens. Pure functions of [B,S] tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algos.kl import kl_estimate


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


@dataclass(frozen=True)
class LogpGap:
    """One token on which trainer and server disagree."""

    row: int
    position: int
    trainer: float
    server: float

    def __str__(self) -> str:
        return (
            f"row {self.row} position {self.position}: "
            f"trainer {self.trainer:.4f}, server {self.server:.4f}"
        )


def worst_logp_gaps(
    prox_logp: Tensor, logprobs: Tensor, loss_mask: Tensor, k: int = 5
) -> list[LogpGap]:
    """The k trained tokens of largest |trainer - server|, worst first; NaN is worst of all."""
    mask = loss_mask.bool()
    gap = (prox_logp.double() - logprobs.double()).abs().nan_to_num(nan=float("inf"))
    gap = gap.masked_fill(~mask, -1.0).flatten()
    order = gap.topk(min(k, int(mask.sum()))).indices.tolist()
    width = mask.shape[1]
    return [
        LogpGap(
            row=i // width,
            position=i % width,
            trainer=float(prox_logp.flatten()[i]),
            server=float(logprobs.flatten()[i]),
        )
        for i in order
    ]
