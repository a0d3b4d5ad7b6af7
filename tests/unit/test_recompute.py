"""What is recomputed, in megatron-core's words."""

from __future__ import annotations

import pytest

from megarl.models.options import EngineOptions, recompute_fields
from megarl.parallel.layout import Layout


def fields(layout: Layout = Layout(pp=2), *, recompute_granularity="none", **kw):  # noqa: B008
    return recompute_fields(recompute_granularity, EngineOptions(**kw), layout, 8)


def test_methods_belong_to_whole_layers():
    assert fields() == {"recompute_granularity": None}
    only = dict(recompute_granularity="selective")
    assert fields(**only, recompute_num_layers=3) == only
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    assert fields(**full) == full


def test_uniform_steps_must_end_with_the_chunk():
    kw = dict(recompute_granularity="full", recompute_num_layers=3)
    with pytest.raises(ValueError, match=r"recompute_num_layers=3 does not divide .* \(4\); use 1"):
        fields(**kw)
    fields(**kw, recompute_method="block")
    fields(Layout(pp=2, split=(6, 2)), **(kw | dict(recompute_num_layers=2)))
    with pytest.raises(ValueError, match=r"\(3, 5\)"):
        fields(Layout(pp=2, split=(3, 5)), **kw)
