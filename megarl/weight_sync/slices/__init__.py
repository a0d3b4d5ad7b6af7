"""Sends each server rank the slices of the weights that it keeps, and no more."""

from pathlib import Path

# what stock SGLang is started with to take slices: --custom-weight-loader, and on its PYTHONPATH
LOADER = "megarl_receiver.load"
RECEIVER = Path(__file__).resolve().parent / "receiver"
