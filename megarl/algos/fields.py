"""Says which fields an algorithm's step needs of a batch, and adds those that come of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.algos.minibatches import batch_shares
from megarl.algos.proximal import shares_of_policy
from megarl.algos.rollouts import rollouts_of
from megarl.algos.rows import Data, as_batch, put

# what an update adds for a loss that needs it: rollout_tokens [B], the trained tokens of each row's
# rollout; batch_share [B], the row's share of its mini-batch; kl_scale [B], the factor of
# kl_controller; prox_share [B,S], see proximal.interpolated
MADE = ("rollout_tokens", "batch_share", "kl_scale", "prox_share")

# what a teacher adds to a batch
TAUGHT = ("given_ids", "teacher_logprobs", "teacher_tail", "teacher_logp")

_HINTS = {
    "prox_logp": "actor.compute_prox_logp(batch) (recompute_logprob is on)",
    "routed_experts": "actor.compute_prox_logp(batch) (router_replay is on)",
    "ref_logp": "batch['ref_logp'] = ref.compute_logp(batch) (kl_coef is not 0)",
    "advantages": "actor.compute_advantages(batch)",
    "values": "critic.compute_values(batch)",
    **dict.fromkeys(TAUGHT, "teacher.teach(batch)"),
}


def need(batch: Data, keys: Sequence[str], *, what: str = "ppo_update") -> None:
    """Raises ValueError, naming what makes it, for one of `keys` that the batch lacks."""
    for key in keys:
        if key not in batch and key != "attention_mask":  # a Batch has lengths instead
            hint = f": call {_HINTS[key]} first" if key in _HINTS else ""
            raise ValueError(f"{what}: the batch has no {key!r}{hint}")


def shaped(made: Tensor, shape: tuple[int, ...], who: str, why: str) -> None:
    """Raises ValueError for a tensor of another shape than `who` has to give."""
    if made.shape != shape:
        raise ValueError(
            f"{who} gave a tensor of shape {tuple(made.shape)}; it must be {list(shape)}, {why}"
        )


def add_made(
    batch: Data,
    keys: Sequence[str],
    parts: Sequence[list[int]],
    trained: Tensor,
    *,
    kl_scale: float,
    version: int,
) -> None:
    """Adds those of MADE that are among `keys`.

    parts: rows of each mini-batch. trained [B]: trained tokens of every row. version: of the
    weights before the update. Collective."""
    whole = as_batch(batch)
    if "rollout_tokens" in keys:
        rollouts = rollouts_of(whole)
        batch["rollout_tokens"] = rollouts.spread(rollouts.sums(trained)).long()
    if "kl_scale" in keys:
        batch["kl_scale"] = torch.full((len(whole),), kl_scale)
    if "batch_share" in keys:
        batch["batch_share"] = batch_shares(parts, trained)
    if "prox_share" in keys:
        need(batch, ["versions"])
        put(batch, "prox_share", shares_of_policy(whole, version))
