from __future__ import annotations

import os
import subprocess
import sys

import pytest

# prints whether freed memory is kept, and the page faults of tensors that others were freed for
SCRIPT = """
import resource
import torch
from megarl.parallel import cpu_patches

torch.set_num_threads(1)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
kept = cpu_patches.keep_freed()
for _ in range(10):  # until the heap has room for all
    before = faults()
    tensors = [torch.ones(4 << 20) for _ in range(4)]
    del tensors
print(kept, faults() - before)
before = faults()
cpu_patches.give_back()
torch.ones(4 << 20)
print(faults() - before)
"""
PAGES = (16 << 20) // 4096  # of a tensor


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone is asked")
@pytest.mark.parametrize("given", ((), ("MALLOC_TRIM_THRESHOLD_",)))
def test_freed_memory_serves_the_next_tensors(given: tuple[str, ...]) -> None:
    """Unless the environment says what glibc does; what is given back has to be faulted in."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    env |= dict.fromkeys(given, "131072") | {"THP_MEM_ALLOC_ENABLE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    kept, faults, after = run.stdout.split()
    assert kept == str(not given)
    assert (int(faults) < PAGES // 4) == (not given)
    assert int(after) > PAGES // 2
