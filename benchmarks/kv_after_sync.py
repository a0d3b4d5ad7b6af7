"""Measures what reading KV of older weights does to logprobs, for weights that moved by some part.

    python benchmarks/kv_after_sync.py [--model DIR] [--moved 1e-5 1e-4 1e-3] [--tokens 64]

The embedded server writes 8 answers. In the middle its weights are replaced by others, of which
every tensor differs by noise of a part of its root mean square; once with
rollout.kv_after_sync=recompute, once with keep. --model is a Hugging Face directory
(SmolLM2-135M-Instruct, fetched once, by default). Prints a Markdown table: means over the tokens
after the update, in nats.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.api.records import ModelRequest, ModelResponse, WeightUpdateMeta
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.weight_sync import WeightSyncConfig
from megarl.rollout.local import SGLangEngine
from megarl.utils.http import call_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
PAUSES = {"recompute": "abort", "keep": "in_place"}
COLUMNS = ("weights moved by", "update itself", *PAUSES, "keep, worst 1 %")
QUESTIONS = [
    f"What is {a} + {b}? Explain every step." for a, b in zip(range(12, 20), range(31, 39))
]


def moved(model: Path, part: float, to: Path) -> Path:
    """Saves the model with every tensor changed by noise of `part` of its root mean square."""
    torch.manual_seed(0)
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for p in changed.parameters():
            p += part * p.square().mean().sqrt() * torch.randn_like(p)
    changed.save_pretrained(to)
    return to


def answers(model: Path, other: Path, kv: str, tokens: int, logs: Path) -> list[ModelResponse]:
    """Returns the answers during which the server gets the weights of `other`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, ignore_eos=True, seed=1)
    client = SGLangEngine(
        RolloutConfig(kv_after_sync=kv),
        ServerConfig(threads=torch.get_num_threads()),
        model_path=str(model),
        dtype="float32",
        log_dir=logs,
        weight_sync=WeightSyncConfig(pause_mode=PAUSES[kv]),
        tokenizer=tokenizer,
    )
    body = {"model_path": str(other), "weight_version": "1", "flush_cache": False}

    def update(asked: asyncio.Future[Any]) -> None:
        client.pause()
        assert not asked.done(), "the answers had ended before the update: give more --tokens"
        for address in client.addresses:
            call_json("POST", address, "/update_weights_from_disk", body, timeout=120)
        client.update_weights(WeightUpdateMeta(type="distributed", version=1)).result(60)
        client.resume()

    async def work() -> list[ModelResponse]:
        chats = ([{"role": "user", "content": q}] for q in QUESTIONS)
        texts = [tokenizer.apply_chat_template(c, tokenize=False) for c in chats]
        asked = asyncio.ensure_future(
            client.agenerate_many([ModelRequest(text=text, gconfig=gconfig) for text in texts])
        )
        await asyncio.sleep(tokens / 50)  # seconds, in which a core writes a part of each
        await asyncio.to_thread(update, asked)
        return await asked

    client.initialize()
    try:
        return asyncio.run(work())
    finally:
        client.destroy()


def logprobs(model: Any, r: ModelResponse) -> torch.Tensor:
    """Returns what the model gives the tokens of the new version, each after all before it."""
    ids, n = torch.tensor([r.input_tokens + r.output_tokens]), r.input_len
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0, n - 1 : -1], -1)
    return logp.gather(1, ids[0, n:, None])[after(r), 0]


def after(r: ModelResponse) -> torch.Tensor:
    return torch.tensor(r.output_versions) == 1


def row(model: Path, part: float, tokens: int, folder: Path) -> list[str]:
    other = moved(model, part, folder / f"{part:g}")
    old, new = (
        AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in (model, other)
    )
    gaps, itself = {}, torch.empty(0)
    for kv in PAUSES:
        found = answers(model, other, kv, tokens, folder)
        want = torch.cat([logprobs(new, r) for r in found])
        got = torch.cat([torch.tensor(r.output_logprobs)[after(r)] for r in found])
        gaps[kv] = (got - want).abs()
        itself = torch.cat([logprobs(old, r) for r in found]).sub(want).abs()
    worst = gaps["keep"].quantile(0.99)
    return [f"{v:.1e}" for v in (part, itself.mean(), *(g.mean() for g in gaps.values()), worst)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--moved", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    args = parser.parse_args()
    if args.model is None:
        from fetch_smollm2 import fetch
        from smollm2 import CACHE

        args.model = fetch(CACHE / "SmolLM2-135M-Instruct")
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for part in args.moved:
            cells = row(args.model, part, args.tokens, Path(folder))
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
