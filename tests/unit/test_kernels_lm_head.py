"""The kernels of the LM head, by Triton's interpreter, against fp64 and against torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from megarl.config.engine import LoRAConfig
from tests import head_kernels as cases
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
Interpreted = Callable[..., Any]


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read as triton is imported
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="triton")  # numpy's, of -inf


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    """Runs a function in a process whose kernels are interpreted: others import triton without."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_interpret) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result()


@pytest.mark.parametrize(
    ("dtype", "temperature", "tp", "spare"),
    [
        (torch.float32, 1.0, 1, 0),
        (torch.float32, 0.7, 2, 0),
        (torch.float32, 1.0, 3, 0),
        (torch.float32, 0.7, 4, 1),
        (torch.bfloat16, 0.7, 1, 0),
        (torch.bfloat16, 1.0, 2, 1),
        (torch.bfloat16, 0.7, 4, 0),
        (torch.float16, 1.0, 3, 2),
    ],
)
def test_values_and_gradients_equal_the_dense_formulas(
    interpreted: Interpreted, dtype: torch.dtype, temperature: float, tp: int, spare: int
) -> None:
    interpreted(cases.values_and_gradients, "cpu", dtype, temperature, tp, spare)


@pytest.mark.parametrize("what", cases.OF_A_CHUNK, ids=lambda fn: fn.__name__)
def test_of_a_chunk(interpreted: Interpreted, what: Callable[[str], None]) -> None:
    interpreted(what, "cpu")


def connect(store: str, rank: int, size: int) -> None:
    """Makes this process a rank of a world."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size
        )


def test_two_processes_over_gloo_equal_the_dense_formulas(tmp_path: Path) -> None:
    spawn, store, c = get_context("spawn"), str(tmp_path / "store"), cases.case(torch.float32, 0.7)
    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, spawn, _interpret)) for _ in range(2)]
        for rank in (0, 1):
            pools[rank].submit(connect, store, rank, 2)
        running = [pools[rank].submit(cases.of_process, c, rank) for rank in (0, 1)]
        found = cases.together(c, [x.result(120) for x in running])
    out, grad = cases.exact(c)
    cases.close(found.out, out, 0, cases.VALUES)
    cases.close(found.logits, grad, cases.ROUNDING[torch.float32], cases.LEAST)


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)], ids=["full", "lora"])
def test_an_update_of_an_engine_is_torchs(
    interpreted: Interpreted, tmp_path: Path, lora: LoRAConfig | None
) -> None:
    model = str(save_tiny(tmp_path / "m", "qwen3"))
    interpreted(connect, str(tmp_path / "store"), 0, 1)
    interpreted(cases.an_update_of_an_engine, model, lora)


def test_without_triton_torch_reduces_the_logits_and_says_so_once() -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "from megarl.parallel.vocab_parallel import by_kernels\n"
        "print(by_kernels(torch.ones(1)), by_kernels(torch.ones(2)))"
    )
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
    assert done.stderr.count("triton") == 1


def compiled(*args: str) -> subprocess.CompletedProcess[str]:
    """Without the interpreter, and without what was compiled before."""
    with TemporaryDirectory() as cache:
        env = os.environ | {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
        command = [sys.executable, *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)


def test_kernels_compile_for_gpus_and_spill_nothing() -> None:
    done = compiled("-m", "tests.kernel_variants", "--all")
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\w+) .* ALIGN=8: \w+\(registers=(\d+)", done.stdout)
    # a multiprocessor has 65,536: at 256 threads four programs that read, three of the gradient
    for kernel, bound in (("read_kernel", 64), ("gradient_kernel", 80)):
        registers = [int(n) for name, n in found if name == kernel]
        assert len(registers) >= 8 and max(registers) <= bound, kernel


def test_a_kernel_that_spills_is_seen() -> None:
    """One that has half of the registers that it takes."""
    done = compiled(
        "-c",
        "from tests.kernel_variants import costs, variants\n"
        "variant = next(v for v in variants(False) if v.kernel == 'gradient_kernel')\n"
        "print(costs(variant, maxnreg=24))",
    )
    assert int(re.findall(r"stack=(\d+)", done.stdout)[0]) > 0, done.stderr
