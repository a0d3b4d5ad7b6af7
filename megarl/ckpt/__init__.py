"""Checkpoints: Hugging Face model directories (hf), training state on any layout (dist)."""

from megarl.ckpt.hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
