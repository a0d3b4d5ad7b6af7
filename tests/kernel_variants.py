"""Compiles the LM head's kernels for GPUs that are not there, and says what they take of one.

    python -m tests.kernel_variants [--all]

The assembler and the reader of its output are those that triton brings along. Prints a line per
variant: kernel, dtype, compute capability, what it is compiled for, registers of a thread, bytes of
its stack (where it spills registers) and of shared memory, and how wide its loads are. The exit
status is 1 where one spills, or where rows of a multiple of 8 are not loaded by 16 bytes. Without
--all it takes a choice in which every constant has every value.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TARGETS = (90, 100)
DTYPES = ("bf16", "fp32")
READS = ("x_ptr", "out_ptr", "best_ptr", "own_ptr", "ids_ptr", "stride", "v", "n", "scale")
SLOPES = (
    "x_ptr", "label_ptr", "log_z_ptr", "factor_ptr", "g_label_ptr", "entropy_ptr", "g_entropy_ptr",
    "stride", "v", "scale",
)  # fmt: skip
TYPES = {
    "best_ptr": "*i32", "ids_ptr": "*i64", "label_ptr": "*i64", "stride": "i32", "v": "i32",
    "n": "i32", "scale": "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel's name, the dtype of logits, the compute capability, and the kernel's constants."""

    kernel: str
    dtype: str
    target: int
    constants: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        how = " ".join(f"{name}={int(value)}" for name, value in self.constants)
        return f"{self.kernel} {self.dtype} sm_{self.target} {how}"


@dataclass(frozen=True)
class Costs:
    """Registers of a thread, bytes of its stack and of shared memory, and whether the loop loads 16
    bytes at a time."""

    registers: int
    stack: int
    shared: int
    wide: bool


def variants(whole: bool) -> Iterator[Variant]:
    both = (True, False)
    for target, dtype in itertools.product(TARGETS, DTYPES):
        reads = itertools.product(both, both, (0, 64), (8, 1))
        chosen = [*reads] if whole else [(True, True, 64, 8), (False, False, 0, 8)]
        for entropy, greedy, ids, align in [*chosen, (True, True, 1024, 1)]:
            how = (("ENTROPY", entropy), ("GREEDY", greedy), ("IDS", ids), ("ALIGN", align))
            yield Variant("read_kernel", dtype, target, how)
        for entropy, align in itertools.product(both, (8, 1) if whole else (8,)):
            how = (("ENTROPY", entropy), ("ALIGN", align))
            yield Variant("gradient_kernel", dtype, target, how)


def costs(variant: Variant, **options: Any) -> Costs:
    """Compiles a variant, with options of triton's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megarl.kernels import lm_head

    kernel = getattr(lm_head, variant.kernel)
    constants = dict(variant.constants, BLOCK=lm_head.BLOCK)
    absent = {"best_ptr": "GREEDY"}
    absent["g_entropy_ptr"] = "ENTROPY"
    names = READS if variant.kernel == "read_kernel" else SLOPES
    types = {name: TYPES.get(name, "*fp32") for name in names} | {"x_ptr": f"*{variant.dtype}"}
    for name in names:
        if name in absent and not constants[absent[name]]:
            constants[name] = None
    types |= dict.fromkeys(constants, "constexpr")
    # as the launcher does: memory of torch begins at multiples of 16 bytes
    attrs = {(0,): [["tt.divisibility", 16]]}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attrs)
    target = GPUTarget("cuda", variant.target, 32)
    made = triton.compile(source, target=target, options={"num_warps": lm_head.WARPS, **options})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", said)
    assert found, said
    registers, stack, shared, local = map(int, found.groups())
    wide = bool(re.search(r"ld\.global\S*\.v4\.b32", made.asm["ptx"]))
    return Costs(registers, stack + local, shared, wide)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    chosen = list(variants(parser.parse_args().all))
    bad = 0
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), get_context("spawn")) as pool:
        for variant, cost in zip(chosen, pool.map(costs, chosen), strict=True):
            narrow = dict(variant.constants)["ALIGN"] == 8 and not cost.wide
            bad += narrow or cost.stack > 0
            print(f"{variant}: {cost}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
