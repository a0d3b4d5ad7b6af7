"""Matrix products by oneDNN against those in double precision, forced also where MKL is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.parallel import cpu_kernels as products

# sums of up to 96 products of normal numbers: some tens of fp32 roundings of values around ten
CLOSE = dict(atol=2e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    monkeypatch.setattr(products, "by_onednn", lambda: True)
    torch.manual_seed(0)


def apart(*shape):
    """A tensor whose rows are not neighbours in memory."""
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]


@pytest.mark.parametrize("rows", [(1,), (7,), (3, 5), (0,)])
@pytest.mark.parametrize("make", [torch.randn, apart])
def test_layers_products_with_and_without_bias(rows, make):
    x, weight, bias = make(*rows, 96), make(40, 96), torch.randn(40)
    want = x.double() @ weight.double().t()
    with torch.no_grad():
        assert rows == (0,) or products.takes(x, weight)
        plain = products.linear(x, weight)
        biased = products.linear(x, weight, bias)
    torch.testing.assert_close(plain.double(), want, **CLOSE)
    torch.testing.assert_close(biased.double(), want + bias, **CLOSE)


@pytest.mark.parametrize(("wide", "narrow"), [(64, 24), (24, 64)])
def test_an_expert_without_tokens_adds_nothing(wide, narrow):
    with torch.no_grad():
        found = products.transposed_product(torch.randn(0, wide), torch.randn(0, narrow))
    assert torch.equal(found, torch.zeros(wide, narrow))


def test_a_gradient_that_repeats_one_number_is_taken():
    g, x = torch.randn(1, 1).expand(50, 24), torch.randn(50, 64)
    for a, b in ((g, x), (x, g), (g[:, :1], x), (x, torch.randn(50, 1).expand(50, 7))):
        with torch.no_grad():
            found = products.transposed_product(a, b)
        torch.testing.assert_close(found.double(), a.double().t() @ b.double(), **CLOSE)


@pytest.mark.parametrize(("wide", "narrow"), [(64, 24), (24, 64)])
def test_gradients_of_weights_are_added_up(wide, narrow):
    g, x, total = torch.randn(50, wide), torch.randn(50, narrow), torch.randn(wide, narrow)
    want = total.double() + g.double().t() @ x.double()
    with torch.no_grad():
        products.accumulate(x, g, total)
    torch.testing.assert_close(total.double(), want, **CLOSE)


class OnAGpu(TorchDispatchMode):
    """Stands for a GPU's addmm, which takes an fp32 sum of bf16 factors; keeps every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append((func, args, kwargs or {}))
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


def test_on_a_gpu_bf16_gradients_are_added_in_fp32_without_a_product_apart():
    mode = FakeTensorMode()

    def fake(dtype, *shape):
        return FakeTensor(
            mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda:0")
        )

    g, x = fake(torch.bfloat16, 50, 64), fake(torch.bfloat16, 50, 24)
    total = fake(torch.float32, 64, 24)
    with mode, OnAGpu() as gpu:
        products.accumulate(x, g, total)
    made = [func for func, *_ in gpu.called if func.namespace == "aten"]
    assert made == [torch.ops.aten.t.default, torch.ops.aten.addmm.dtype_out]
    _, (start, a, b, dtype), kw = gpu.called[-1]
    assert start is total and kw["out"] is total and b is x and dtype == torch.float32
    assert a.shape == (64, 50)


def test_autograd_goes_on_through_torchs_own_products():
    x, weight = torch.randn(6, 96, requires_grad=True), torch.randn(40, 96, requires_grad=True)
    for y in (products.linear(x, weight), products.product(x, weight.t())):
        found = torch.autograd.grad(y.sum(), (x, weight))
        torch.testing.assert_close(found[0], weight.detach().sum(0).expand_as(x), **CLOSE)


def test_other_kinds_of_products_are_torchs():
    with torch.no_grad():
        for a, b in [((2, 5, 6), (2, 6, 4)), ((5, 6), (6,)), ((6,), (6, 4)), ((2, 5, 6), (6, 4))]:
            a, b = torch.randn(a), torch.randn(b)
            torch.testing.assert_close(products.product(a, b), a @ b, **CLOSE)
            out = torch.empty((a @ b).shape)
            assert products.product(a, b, out=out) is out
            assert products.product(a.double(), b.double()).dtype == torch.float64


def test_the_environment_overrules_the_machine(monkeypatch):
    monkeypatch.undo()
    choose = products.by_onednn.__wrapped__
    for value, taken in (("0", False), ("1", True)):
        monkeypatch.setenv("MEGARL_ONEDNN", value)
        assert choose() is taken
    monkeypatch.setenv("MEGARL_ONEDNN", "yes")
    with pytest.raises(ValueError, match="MEGARL_ONEDNN=yes: use 0"):
        choose()


@pytest.mark.parametrize("given", ["0", "-1", "abc", ""])
def test_a_capacity_that_torch_crashes_on_is_refused(monkeypatch, given):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", given)
    with pytest.raises(ValueError, match=f"LRU_CACHE_CAPACITY={given}: use a number of at least 1"):
        products.remember_shapes(64)


# prints the memory that products of 60 new shapes took, and then that of 300 more
GROWTH = """
import os, pathlib, torch
from megarl.parallel import cpu_kernels as products

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.set_num_threads(1)
products.remember_shapes(50)
weight = torch.randn(96, 32)
with torch.no_grad():
    products.linear(torch.randn(9, 32), weight)
    for rows in (range(10, 70), range(70, 370)):
        before = resident()
        for n in rows:
            products.linear(torch.randn(n, 32), weight)
        print(resident() - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.mkldnn.is_available(),
    reason="reads /proc, and is about oneDNN",
)
def test_products_of_ever_new_shapes_take_no_more_memory():
    env = {k: v for k, v in os.environ.items() if not k.endswith("CACHE_CAPACITY")}
    run = subprocess.run(
        [sys.executable, "-c", GROWTH], env=env | {"MEGARL_ONEDNN": "1"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    first, later = map(int, run.stdout.split())
    assert later < first
