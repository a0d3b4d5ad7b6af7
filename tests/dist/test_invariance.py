"""The engine is Hugging Face's model trained by torch's AdamW, whatever the layout: see
invariance.py for the table."""

from __future__ import annotations

import pytest

from tests.dist.invariance import (
    Case,
    batch,
    check,
    drawn_cases,
    pairwise_cases,
    reference,
    save,
    train,
    worst,
)
from tests.dist.losses import LOSSES
from tests.dist.reference import hf_steps
from tests.tiny import tiny_hf

# the step itself meets 1e-6; gradients of q_norm are small sums of large terms
GRADIENTS_OF_CUTS = 2e-6


@pytest.mark.parametrize("case", pairwise_cases(), ids=str)
def test_engine_equals_hugging_face(case, worlds, models):
    b, want = reference(case.family, case.tie, case.loss)
    check(
        worlds(case.processes).run(
            train, save(models, case), case.parallel, case.loss, b, **case.settings()
        ),
        want,
    )


@pytest.mark.full
@pytest.mark.drawn
@pytest.mark.parametrize("case", drawn_cases(), ids=str)
def test_the_full_product(case, worlds, models):
    test_engine_equals_hugging_face(case, worlds, models)


def test_an_uneven_split_of_interleaved_chunks(worlds, tmp_path):
    hf, loss = tiny_hf("llama", layers=7), LOSSES["policy"]
    hf.save_pretrained(tmp_path)
    b = batch(hf)
    parallel = dict(pp=2, vpp=2, pipeline_split=[1, 3, 1, 2])
    got = worlds(2).run(train, str(tmp_path), parallel, "policy", b)
    check(got, hf_steps(hf, b, loss))


@pytest.mark.parametrize(
    ("family", "layout", "loss"),
    [
        ("qwen3", "dp2", "policy"),
        ("qwen3_moe", "tp2ep2", "gspo"),
        ("llama", "pp2vpp2", "critic"),
        ("qwen2", "cp2", "dpo"),
    ],
)
def test_a_step_does_not_depend_on_how_the_batch_is_cut(family, layout, loss, worlds, models):
    """The bounds are ratios of norms: only the order of sums differs."""
    case = Case(family=family, layout=layout, loss=loss)
    b, _ = reference(family, case.tie, loss)
    path = save(models, case)
    one, *others = (
        worlds(case.processes).run(
            train, path, case.parallel, loss, b, **{**case.settings(), "max_tokens": budget}
        )[0]
        for budget in (10**6, 30, 17, 1)
    )
    for other in others:
        for key in ("loss", "grad_norm"):
            assert other["stats"][0][key] == pytest.approx(one["stats"][0][key], rel=1e-6)
        assert worst(other["weights"], one["weights"]) < (1e-6,)
        assert worst(other["grads"], one["grads"]) < (GRADIENTS_OF_CUTS,)
