"""The probes `calls` and `numerics` of first_day.py: single calls, and the engine's bf16."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from first_rows import place, put, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = 8  # of which the median counts
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
SHOWN = 200  # characters of an error


def calls(small: bool) -> None:
    """Tries calls that megarl makes only on a GPU, and measures attention over new shapes: every
    micro-batch, prompt and decoded token has one."""
    for name, call in (
        ("fp32 addmm", addmm), ("one rank", one_rank), ("SDPA order", sdpa_order), ("IPC", ipc)
    ):  # fmt: skip
        attempt(lambda call=call: dict(result=call(small)), call=name)
    for backend in ("default", *BACKENDS):
        for attend in (prefill, decode):
            attempt(
                lambda backend=backend, attend=attend: shape_costs(backend, attend, small),
                backend=backend, of=attend.__name__,
            )  # fmt: skip


def attempt(measure: Callable[[], dict[str, Any]], **fields: str) -> None:
    """Stores what `measure` returns, or its error."""
    try:
        put(**fields, **measure())
    except Exception as e:
        put(**fields, error=f"{type(e).__name__}: {str(e)[:SHOWN]}")


def addmm(small: bool) -> str:
    """Adds a bf16 matmul to an fp32 sum in place, as gradients are summed."""
    device, dtype = place(small)
    total = torch.randn(512, 64, device=device)
    g, x = (torch.randn(256, n, device=device, dtype=dtype) for n in (512, 64))
    expected = total + g.float().t() @ x.float()
    torch.ops.aten.addmm.dtype_out(total, g.t(), x, total.dtype, out=total)
    return f"differs by {float((total - expected).abs().max()):.1e}"


def one_rank(small: bool) -> str:
    """Returns the backend of a world of one rank, after a barrier and a reduction."""
    from megarl.parallel import worlds

    worlds.init_distributed()
    worlds.barrier()
    torch.distributed.all_reduce(torch.ones(1, device=place(small)[0]))
    return worlds.comm_backend()


def sdpa_order(small: bool) -> str:
    """Returns the order in which torch tries its attention kernels, and its choice."""
    device, dtype = place(small)
    q = torch.randn(2, 8, 64, 128, device=device, dtype=dtype)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True))
    order = [SDPBackend(number).name for number in torch._C._get_sdp_priority_order()]
    return f"{chosen.name} of {' '.join(order)}"


def ipc(small: bool) -> str:
    """Packs a tensor for another process."""
    from megarl.wire import handles

    device = torch.device("cpu") if small else torch.device("cuda", 0)
    return f"{len(handles.pack('x', handles.allocate(1 << 22, device)))} characters"


def prefill(small: bool, length: int) -> None:
    """Attends as the engine does: three sequences, grouped heads, forward and backward."""
    device, dtype = place(small)
    q, k, v = (
        torch.randn(3, heads, length, 128, device=device, dtype=dtype, requires_grad=True)
        for heads in (16, 8, 8)
    )
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()


def decode(small: bool, length: int) -> None:
    """Attends as the embedded server does: new queries, masked keys."""
    device, dtype = place(small)
    q, k = (torch.randn(3, 8, n, 128, device=device, dtype=dtype) for n in (2, length))
    mask = torch.zeros(3, 1, 1, length, device=device, dtype=dtype)
    F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def shape_costs(backend: str, attend: Callable[[bool, int], None], small: bool) -> dict[str, float]:
    """Returns median ms of new shapes and of the same shapes again."""
    chosen = contextlib.nullcontext()
    if backend != "default":
        chosen = sdpa_kernel(getattr(SDPBackend, backend))
    with chosen:
        attend(small, 64)
        new, known = (
            sorted(1e3 * seconds(lambda n=n: attend(small, 200 + 8 * n)) for n in range(SHAPES))
            for _ in range(2)
        )
    return dict(new_shape_ms=round(new[SHAPES // 2], 2), known_ms=round(known[SHAPES // 2], 2))


def numerics(small: bool) -> None:
    """Compares the engine with transformers on the same device, in fp32 and bf16. The error of
    transformers in bf16 is the measure of megarl's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wide = {} if small else dict(hidden_size=1024, intermediate_size=3072, layers=4)
    for family in ("qwen3",) if small else ("qwen3", "llama", "qwen3_moe"):
        sizes = wide if family == "qwen3" else {}
        attempt(lambda family=family, sizes=sizes: errors(family, sizes, small), model=family)


def errors(family: str, sizes: dict[str, int], small: bool) -> dict[str, str]:
    """Returns errors of logprobs: megarl's largest in fp32, and both rms in bf16."""
    from tests.tiny import save_tiny

    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny(Path(folder) / "m", family, **sizes))
        vocab = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
        lengths = torch.tensor([60, 17, 41, 60] if small else [700, 33, 512, 1000, 256])
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        ids = torch.randint(3, vocab, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
        theirs, ours = (
            {dtype: fn(path, dtype, ids, mask) for dtype in ("float32", "bfloat16")}
            for fn in (reference_logprobs, engine_logprobs)
        )
    exact = theirs["float32"]

    def rms(found: torch.Tensor) -> str:
        return f"{(found - exact).square().mean().sqrt():.2e}"

    return dict(
        fp32_max=f"{(ours['float32'] - exact).abs().max():.2e}",
        engine_bf16_rms=rms(ours["bfloat16"]),
        transformers_bf16_rms=rms(theirs["bfloat16"]),
    )


def reference_logprobs(
    path: str, dtype: str, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Returns logprobs [tokens] of transformers' model."""
    from transformers import AutoModelForCausalLM

    from megarl.parallel import mcore

    device = mcore.device()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    with torch.no_grad():
        logits = model(ids.to(device), attention_mask=mask.long().to(device)).logits.float()
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None].to(device))
    return logprobs[..., 0].cpu()[mask[:, 1:]]


def engine_logprobs(path: str, dtype: str, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns logprobs [tokens] of megarl's engine."""
    from megarl.config.engine import MicroBatchSpec, TrainEngineConfig
    from megarl.engine import MegatronEngine

    micro_batches = MicroBatchSpec(max_tokens_per_mb=2048)
    engine = MegatronEngine(TrainEngineConfig(path=path, dtype=dtype, mb_spec=micro_batches))
    engine.initialize()
    logprobs = engine.forward(dict(input_ids=ids, attention_mask=mask, loss_mask=mask.clone()))
    engine.destroy()
    return logprobs[:, 1:].float().cpu()[mask[:, 1:]]
