"""On-policy distillation: how far the policy's distribution is from a teacher's, token by token.

At every position of the student's own rollout the teacher names its k likeliest tokens. Student p
and teacher q are compared over k + 1 outcomes: those tokens, and all others together, the tail.
With the whole vocabulary (k = V) the tail is empty, and the divergence is the exact one.

With fewer tokens it is the divergence of two coarser distributions, p and q with the tail's tokens
merged into one. Merging cannot raise a KL or a Jensen-Shannon divergence (the data processing
inequality), so each is a lower bound of the exact one, equal where p and q give the tail's tokens
the same shares of it. Two policies that differ within the tail alone are not told apart; what the
student moves into the tail as a whole is seen, and costs by the teacher's mass there. For the
forward KL the teacher's likeliest tokens are those that matter. The reverse KL weighs by p, and
sees little of what the student does among tokens that the teacher finds unlikely.

b sequences of a micro-batch, S positions, k tokens that the teacher names, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.advantages import discounted_sums, spread_over_tokens, trained_first
from megarl.algos.kl import kl_estimate
from megarl.algos.losses import (
    LOSS_WEIGHTS,
    Stats,
    aggregate,
    aggregation_needs,
    token_means,
)
from megarl.algos.specs import AdvantageSpec, LossSpec
from megarl.api.batch import Padded
from megarl.config.algo import PPOActorConfig

DIVERGENCES = ("forward", "reverse", "jsd")
# of a teacher's mass that may be on tokens that the student does not have
_ALMOST_ALL = 1.0 - 1e-6


def with_tail(logprobs: Tensor, tail: Tensor) -> Tensor:
    """Returns [...,k+1]: the logprobs [...,k] of some tokens, and the log of the probability of all
    others [...].

    >>> with_tail(torch.tensor([0.5, 0.25]).log(), torch.tensor(0.25).log()).exp()
    tensor([0.5000, 0.2500, 0.2500])
    """
    return torch.cat([logprobs, tail[..., None]], -1)


def in_students_words(
    logprobs: Tensor, tail: Tensor, student: Tensor, student_tail: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the teacher's logprobs [...,k] and tail [...] over outcomes that the student has.

    student, student_tail: the student's of the same tokens; -inf is a token that it does not have,
    of a teacher whose embedding has more rows. What the teacher gives to those counts to the
    tail. Where the student has no other tokens (its tail is
    -inf), the teacher is taken over the student's vocabulary alone.

    >>> q, p = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.9, 0.0]).log()
    >>> tails = torch.tensor([0.25, 0.1]).log()
    >>> [x.exp() for x in in_students_words(q, tails[0], p, tails[1])]
    [tensor([0.5000, 0.0000]), tensor(0.5000)]
    """
    foreign = student.isneginf()
    moved = logprobs.masked_fill(~foreign, -torch.inf).logsumexp(-1)
    logprobs, tail = logprobs.masked_fill(foreign, -torch.inf), torch.logaddexp(tail, moved)
    whole = student_tail.isneginf()
    inside = torch.log1p(-tail.exp().clamp(max=_ALMOST_ALL))
    logprobs = torch.where(whole[..., None], logprobs - inside[..., None], logprobs)
    return logprobs, tail.masked_fill(whole, -torch.inf)


def divergence(student: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Returns the divergence [...] of distributions over m outcomes from their log-probabilities
    [...,m]; -inf is an outcome of probability 0. Raises ValueError for an unknown `kind`.

    With student p and teacher q:
      forward   KL(q || p) = sum_j q_j (log q_j - log p_j)
      reverse   KL(p || q) = sum_j p_j (log p_j - log q_j)
      jsd       beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p: the generalised
                Jensen-Shannon divergence (GKD, arXiv 2306.13649, eq. 1), 0 < beta < 1. Over beta it
                tends to the forward KL at 0, over 1 - beta to the reverse KL at 1.

    Forward covers all that the teacher does, reverse keeps to what it does most.

    >>> p = torch.tensor([[0.6, 0.3, 0.1, 0.0], [0.25, 0.25, 0.25, 0.25]]).log()
    >>> q = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.5, 0.25, 0.125, 0.125]]).log()
    >>> divergence(p, q, "forward")
    tensor([0.5850, 0.1733])
    >>> divergence(p, q, "reverse")
    tensor([0.4982, 0.1733])
    >>> divergence(p, q, "jsd", beta=0.25)
    tensor([0.0988, 0.0320])
    """
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    if kind != "jsd":
        raise ValueError(f"divergence={kind!r}: use one of {', '.join(DIVERGENCES)}")
    none = torch.isinf(student) & torch.isinf(teacher)  # where logaddexp has no gradient
    p, q = (torch.where(none, 0.0, x) for x in (student, teacher))
    mixed = torch.logaddexp(q + math.log(beta), p + math.log(1.0 - beta))
    mixed = torch.where(none, -torch.inf, mixed)
    return beta * _kl(teacher, mixed) + (1.0 - beta) * _kl(student, mixed)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Returns KL(a || b) [...] of log-probabilities [...,m]; what a gives nothing adds nothing."""
    none = torch.isneginf(a)
    log_a, log_b = (torch.where(none, 0.0, x) for x in (a, b))
    return torch.where(none, 0.0, log_a.exp() * (log_a - log_b)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Sums the divergence of the policy from its teacher over trained tokens, and its figures;
    weight: `LOSS_WEIGHTS[loss_agg]`.

    outputs: logprobs [b,S], given_logprobs [b,S,k] and given_tail [b,S], with gradient.
    batch: loss_mask, logprobs (who wrote the tokens), teacher_logprobs [b,S,k], teacher_tail [b,S].

    kind, beta: see `divergence`. scale: multiplies the loss (1 / actor.loss_agg_length). The
    policy also draws the tokens at which it is compared; that has no part in the gradient (GKD,
    sec. 3).
    """

    kind: str = "reverse"
    beta: float = 0.5
    loss_agg: str = "token-mean"
    scale: float = 1.0

    def __call__(self, outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
        """Returns the summed loss, and {figure: (sum, weight)}."""
        mask = batch["loss_mask"].bool()
        ours = outputs["given_logprobs"], outputs["given_tail"]
        theirs = batch["teacher_logprobs"], batch["teacher_tail"]
        student, teacher = with_tail(*ours), with_tail(*in_students_words(*theirs, *ours))
        # where nothing is trained, anything may stand, and its gradient must not come through
        p, q = (torch.where(mask[..., None], x, 0.0) for x in (student, teacher))
        loss = divergence(p, q, self.kind, self.beta)
        logp = torch.where(mask, outputs["logprobs"].detach(), 0.0)
        with torch.no_grad():
            figures = {
                "logp": logp,
                "approx_kl": kl_estimate(batch["logprobs"], logp, "k3"),
                "teacher_kl_forward": divergence(p, q, "forward"),
                "teacher_kl_reverse": divergence(p, q, "reverse"),
                "teacher_tail_mass": q[..., -1].exp(),
                "student_tail_mass": p[..., -1].exp(),
            }
        return self.scale * aggregate(loss, batch, self.loss_agg), token_means(figures, mask)


def distill(config: PPOActorConfig, *, divergence: str = "reverse", beta: float = 0.5) -> LossSpec:
    """Returns the Distillation of the actor's section. Raises ValueError for an unknown divergence,
    or a beta that is not between 0 and 1."""
    if divergence not in DIVERGENCES:
        raise ValueError(
            f"actor.loss.options.divergence={divergence!r}: use one of {', '.join(DIVERGENCES)}"
        )
    if not 0.0 < beta < 1.0:
        raise ValueError(
            f"actor.loss.options.beta={beta}: must be between 0 and 1; at the ends of it jsd "
            "vanishes: take divergence=forward or reverse"
        )
    loss = Distillation(
        kind=divergence,
        beta=beta,
        loss_agg=config.loss_agg,
        scale=1.0 / config.loss_agg_length,
    )
    return LossSpec(
        fn=loss,
        weight=LOSS_WEIGHTS[config.loss_agg],
        outputs=("logprobs", "given_logprobs", "given_tail"),
        needs=(
            *("given_ids", "teacher_logprobs", "teacher_tail"),
            *aggregation_needs(config.loss_agg),
        ),
        own_prox=True,
    )


def toward_teacher(
    config: PPOActorConfig, *, reward_coef: float = 0.0, discount: float = 0.0
) -> AdvantageSpec:
    """Returns advantages that lead to the teacher by policy gradient, beside any surrogate. That of
    a token x is log q(x) - log p(x) (teacher_logp and the old logprobs), a sample of -KL(p || q),
    and `discount` times that of the next trained token; and the sample's reward times
    `reward_coef`.

    The teacher says one number per token. On policy and with discount 0 the expected gradient is
    that of the reverse KL over the whole vocabulary; its variance is larger than Distillation's.
    """
    old = config.old_logp

    def per_sample(samples: dict[str, Tensor]) -> Tensor:
        return reward_coef * samples["rewards"].float()

    def per_token(numbers: Tensor, part: Padded) -> Tensor:
        mask = part["loss_mask"].bool()
        nearer = torch.where(mask, part["teacher_logp"] - part[old], 0.0)
        place = trained_first(mask)
        steps = torch.zeros_like(nearer, dtype=torch.float64).scatter(1, place, nearer.double())
        nearer = discounted_sums(steps, discount).gather(1, place).float()
        return spread_over_tokens(numbers, mask) + nearer.where(mask, 0.0)

    return AdvantageSpec(
        per_sample=per_sample, per_token=per_token, reads=("loss_mask", "teacher_logp", old)
    )
