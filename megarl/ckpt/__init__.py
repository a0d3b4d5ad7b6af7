"""Checkpoints: Hugging Face model directories."""

from megarl.ckpt.hf import load_hf, save_hf

__all__ = ["load_hf", "save_hf"]
