"""Converts weights between Hugging Face directories and dist checkpoints, in one process on CPU.

No tensor is ever whole in memory: rows go from file to file in chunks. A dist checkpoint is
megatron-core's own (torch_dist), here cut by rows, and loads on any layout. Norms that Transformer
Engine's layers have under another name than the local ones stand there under both, stored once.
"""

from megarl.ckpt.convert.report import Difference, inspect, verify
from megarl.ckpt.convert.write import dist2hf, hf2dist

__all__ = ["Difference", "dist2hf", "hf2dist", "inspect", "verify"]
