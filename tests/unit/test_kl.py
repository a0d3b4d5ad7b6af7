"""KL estimators against exact divergences and closed forms."""

import math

import pytest
import torch

from megarl.algos import kl_estimate


def expectation(q: torch.Tensor, p: torch.Tensor, kind: str) -> torch.Tensor:
    """E_{x~q} of the estimator, exactly, over a small vocabulary."""
    return (q.detach() * kl_estimate(q.log(), p.log(), kind)).sum()


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, generator=g, dtype=torch.float64)
    return logits[0].softmax(0), logits[1].softmax(0)


def test_values_of_one_token():
    q, p = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(q, p, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(q, p, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(q, p, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    q, p = distributions()
    exact = (q * (q / p).log()).sum()
    assert expectation(q, p, kind).item() == pytest.approx(exact.item(), abs=1e-12)


def test_k2_is_close_for_close_distributions():
    q, p = distributions()
    near = 0.98 * q + 0.02 * p
    exact = (q * (q / near).log()).sum()
    assert expectation(q, near, "k2").item() == pytest.approx(exact.item(), rel=0.05)


@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("k1", lambda q, p: 0.0 * q.sum()),
        ("k2", lambda q, p: (q * (q / p).log()).sum()),
        ("k3", lambda q, p: (p * (p / q).log()).sum()),
    ],
)
def test_gradient_as_a_loss_is_what_the_docstring_says(kind, exact):
    _, p = distributions()
    logits = torch.randn(7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.requires_grad_()
    (got,) = torch.autograd.grad(expectation(logits.softmax(0), p, kind), logits)
    (want,) = torch.autograd.grad(exact(logits.softmax(0), p), logits)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_far_apart_stays_finite_with_a_finite_gradient():
    logp = torch.tensor([-500.0], requires_grad=True)
    k3 = kl_estimate(logp, torch.tensor([0.0]), "k3")
    k3.backward()
    assert torch.isfinite(k3).all() and torch.isfinite(logp.grad).all()


def test_unknown_estimator_names_the_choices():
    with pytest.raises(ValueError, match=r"k4.*k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    """k3 = d^2/2 + ...; in fp32 exp(d) - 1 - d is rounding noise of either sign at d = 1e-5."""
    d = torch.full((4,), 1e-3)
    k3 = kl_estimate(torch.zeros(4), d, "k3")
    torch.testing.assert_close(k3, d.square() / 2, rtol=2e-3, atol=0)
