"""What random weights of a parameter are."""

from __future__ import annotations

import pytest
import torch

from megarl.models.params import draw
from megarl.models.piece_table import HfTensor


def drawn(initial: str, *shape: int, name: str = "model.layers.0.w") -> torch.Tensor:
    return draw(HfTensor(name, shape, (), initial=initial), 3, 0.02)


def test_a_parameter_says_how_it_is_drawn() -> None:
    assert torch.equal(drawn("zeros", 5), torch.zeros(5))
    assert torch.equal(drawn("ones", 5, 2), torch.ones(5, 2))
    assert torch.equal(drawn("", 5), torch.ones(5))  # a norm
    assert torch.equal(drawn("", 40, 50), drawn("normal", 40, 50))
    assert float(drawn("", 40, 50).std()) == pytest.approx(0.02, rel=0.1)
    uniform = drawn("log_uniform", 4000).exp()
    assert float(uniform.min()) >= 0.01 and float(uniform.max()) < 16
    assert float(uniform.mean()) == pytest.approx(8.0, rel=0.03)
    assert not torch.equal(drawn("log_uniform", 9), drawn("log_uniform", 9, name="another"))
