"""Holds the package `megarl_receiver` alone, so that a server's PYTHONPATH can name this folder."""

from pathlib import Path

# what stock SGLang is started with to take slices: --custom-weight-loader, and on its PYTHONPATH
LOADER = "megarl_receiver.load"
RECEIVER = Path(__file__).resolve().parent
