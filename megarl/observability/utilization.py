"""Measures what a step uses of the hardware: memory, model FLOP/s, and their part of the peak
(MFU, A. Chowdhery et al., PaLM, arXiv 2204.02311, appendix B).

The model's FLOPs are those its formulas need, whatever the implementation computes again or twice.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

# Dense bf16/fp16 tensor-core TFLOP/s by torch.cuda.get_device_name(), from NVIDIA's data sheets
# (those that state them with 2:4 sparsity, halved).
PEAK_TFLOPS = {
    "V100": 125.0,
    "V100 PCIE": 112.0,
    "A10": 125.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.4,
    "H800 PCIe": 756.0,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "GH200": 989.4,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
}


def peak_tflops(device_name: str) -> float | None:
    """Returns the peak of the entry whose words all stand in the device's name, the entry with the
    most words; None if there is none."""
    words = set(device_name.replace("-", " ").split())
    names = [name for name in PEAK_TFLOPS if set(name.split()) <= words]
    return PEAK_TFLOPS[max(names, key=len)] if names else None


def this_device_peak(dtype: torch.dtype) -> float | None:
    """Returns TFLOP/s of the current GPU for `dtype`; None on a CPU and for wider numbers."""
    if dtype.itemsize != 2 or not torch.cuda.is_available():
        return None
    return peak_tflops(torch.cuda.get_device_name())


def utilization(
    flops: float, *, seconds: float, devices: int, peak: float | None
) -> dict[str, float]:
    """Returns the metrics of `flops` of all devices in `seconds`. `peak` is in TFLOP/s of one
    device; without it there is no MFU."""
    reached = flops / seconds / devices / 1e12
    metrics = {"perf/tflops_per_gpu": reached}
    return metrics if peak is None else metrics | {"perf/mfu": reached / peak}


def memory_in_use() -> dict[str, float]:
    """Returns in GiB what this process uses: memory/host_gib, and of its GPU, if it has one, the
    peaks since the last call: memory/gpu_gib of tensors, memory/gpu_reserved_gib with what torch
    keeps for more."""
    used = {"memory/host_gib": _resident() / 2**30}
    if torch.cuda.is_available():
        used["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        used["memory/gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return used


def _resident() -> int:
    """Returns the bytes of host memory that the process holds, or held at most where only that is
    known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
