"""Streamed FP8 weights are what quantising the saved model gives, by a definition written anew."""

from __future__ import annotations

import random
import re
from collections import UserDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.ckpt.hf import load_hf
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.transfer.gather import Bucket, BucketGatherer, Member
from megarl.weight_sync.broadcast import quantize_bucket, quantized
from megarl.weight_sync.fp8 import BlockFp8
from megarl.weight_sync.plan import plan_sync, update_body
from megarl.weight_sync.transports import WeightSource
from megarl.wire import block_fp8
from tests.tiny import (
    GLM_KINDS,
    HYBRID_KINDS,
    KINDS,
    MLA_KINDS,
    MOE_KINDS,
    is_linear,
    save_tiny,
)

E4M3 = torch.float8_e4m3fn


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, as the module's text says."""
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=E4M3)
    s = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(s.shape[0]):
        for j in range(s.shape[1]):
            box = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = weight[box].to(torch.float32)
            s[i, j] = max(block.abs().max(), torch.tensor(1e-12)) / 448
            q[box] = (block / s[i, j]).clamp(-448, 448).to(E4M3)
    return q, s


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("shape", ((128, 128), (1, 1), (129, 257), (2050, 130), (64, 1000)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_blocks_are_those_of_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(shape))
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(dtype)
    weight[: shape[0] // 2, : shape[1] // 2] = 0
    weight[0, 0] = -0.0
    q, s = block_fp8.quantize(weight)
    want_q, want_s = reference(weight)
    assert q.dtype == E4M3 and torch.equal(bits(q), bits(want_q))
    assert s.shape == want_s.shape and torch.equal(bits(s), bits(want_s))
    back = block_fp8.dequantize(q, s)
    blocks = torch.zeros(shape)
    for i in range(s.shape[0]):
        for j in range(s.shape[1]):
            box = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            blocks[box] = q[box].float() * s[i, j]
    assert torch.equal(back, blocks)
    # 3 bits of mantissa: within half a step of 1/8, and of the smallest e4m3 number (2**-9)
    step = torch.repeat_interleave(torch.repeat_interleave(s, 128, 0), 128, 1)[
        : shape[0], : shape[1]
    ]
    assert bool(((back - weight.float()).abs() <= weight.float().abs() / 16 + step * 2**-10).all())


def test_the_largest_number_of_a_block_is_kept() -> None:
    weight = torch.randn(256, 256, dtype=torch.bfloat16)
    q, _ = block_fp8.quantize(weight)
    for block in q.float().view(2, 128, 2, 128).transpose(1, 2).flatten(0, 1):
        assert block.abs().max() == 448 and bool(block.isfinite().all())


def test_what_is_a_linear_map_of_a_layer(tmp_path: Path) -> None:
    """As families declare it, and by name: the rest is embeddings, head, norms, biases, routers."""
    rest = re.compile(
        r"embed_tokens|lm_head|norm|bias|\.gate\.|shared_expert_gate|eh_proj|conv1d|A_log"
    )
    for kind in (*KINDS, *MOE_KINDS, *MLA_KINDS, *GLM_KINDS, *HYBRID_KINDS):
        path = save_tiny(tmp_path / kind, kind, layers=2)
        table = build_piece_table(read_hf_config(path), Layout())
        tensors = load_file(path / "model.safetensors")
        assert {t.name for t in table.tensors if t.linear} == set(filter(is_linear, tensors))
        for name, t in tensors.items():
            plain = rest.search(name) is not None
            assert is_linear(name) == (not plain), name
            assert t.ndim == 2 or plain, name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider and higher than a block, by no multiple of one."""
    folder = tmp_path_factory.mktemp("block_fp8")
    return save_tiny(
        folder / "m", "qwen3_moe", layers=2, dtype=torch.bfloat16, hidden_size=160,
        intermediate_size=304,
    )  # fmt: skip


def buckets_of(saved: Path, bucket_bytes: int) -> list[tuple[Bucket, torch.Tensor]]:
    layout = Layout()
    table: PieceTable = build_piece_table(read_hf_config(saved), layout)
    local = table.local_params(layout.coords(0))
    params = {n: torch.empty(p.shape, dtype=torch.bfloat16) for n, p in local.items()}
    load_hf(saved, table, layout, 0, params)
    plan = plan_sync(table, torch.bfloat16, bucket_bytes)
    gatherer = BucketGatherer(table, 0, params, plan.buckets)
    out = []
    for bucket in plan.buckets:
        flat = gatherer.gather(bucket)
        assert flat is not None
        out.append(quantize_bucket(bucket, flat))
    return out


@pytest.mark.parametrize("bucket_bytes", (100_000, 1 << 30))
def test_streamed_tensors_are_the_saved_ones_quantised(saved: Path, bucket_bytes: int) -> None:
    want = {}
    for name, t in load_file(saved / "model.safetensors").items():
        if is_linear(name):
            want[name], want[name + "_scale_inv"] = reference(t)
        else:
            want[name] = t
    got = {n: t for bucket, flat in buckets_of(saved, bucket_bytes) for n, t in bucket.views(flat)}
    assert got.keys() == want.keys() and sum(n.endswith("_scale_inv") for n in want) > 20
    for name, t in want.items():
        assert got[name].dtype == t.dtype and got[name].shape == t.shape, name
        assert torch.equal(bits(got[name]), bits(t)), name


def test_a_stock_server_is_told_names_dtypes_and_shapes(saved: Path) -> None:
    """It adds up sizes to find offsets, so there are no gaps and everything is aligned; a matrix
    and its scales are in one bucket.
    """
    for bucket, flat in buckets_of(saved, 100_000):
        body = update_body(bucket, group_name="g", version=1, last=False)
        assert body["load_format"] == "flattened_bucket"
        end, specs = 0, {}
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            kind = getattr(torch, dtype)
            assert end % kind.itemsize == 0
            end += torch.Size(shape).numel() * kind.itemsize
            specs[name] = tuple(shape), kind
        assert end == flat.numel() == bucket.nbytes
        plain = block_fp8.plain_specs(specs)
        assert all(n.removesuffix("_scale_inv") in plain for n in specs)
        if any(is_linear(n) for n in specs):
            assert {"float8_e4m3fn", "float32"} <= set(body["dtypes"])


def test_a_bucket_becomes_little_more_than_half() -> None:
    shape = (1024, 1024)
    big = Bucket(
        0,
        (Member("model.layers.0.mlp.up_proj.weight", shape, torch.bfloat16, 0, 1 << 21, True),),
        1 << 21,
    )
    assert quantized(big).nbytes == (1 << 20) + 8 * 8 * 4


@pytest.mark.parametrize("scale", (None, ((2, 2), torch.bfloat16), ((1, 2), torch.float32)))
def test_fp8_without_its_scales_is_refused(scale: block_fp8.Spec | None) -> None:
    specs: dict[str, block_fp8.Spec] = {"a.weight": ((200, 200), E4M3)}
    if scale is not None:
        specs["a.weight_scale_inv"] = scale
    with pytest.raises(ValueError, match=r"a.weight: .* needs a.weight_scale_inv .* \[2, 2\]"):
        block_fp8.plain_specs(specs)


class Counted(UserDict[str, torch.Tensor]):
    """Counts look-ups, each of which computes a weight where there are adapters."""

    lookups = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.lookups += 1
        return super().__getitem__(name)


def test_slices_are_parts_of_the_whole(tmp_path: Path) -> None:
    """Of one rank with fp32 weights that sends bf16, and more rows than go at a time."""
    path = save_tiny(tmp_path, "qwen3", layers=1, hidden_size=160, intermediate_size=2100)
    table = build_piece_table(read_hf_config(path), Layout())
    params = {p.name: torch.empty(p.shape) for p in table.params}
    load_hf(path, table, table.layout, 0, params)
    made = BlockFp8(WeightSource(table, table.layout, 0, params, dtype=torch.bfloat16))
    made.measure()
    scales, rng = made.params(), random.Random(0)
    for name, t in load_file(path / "model.safetensors").items():
        if not is_linear(name):
            assert made.dtype(name) == torch.bfloat16 and name in made.table.by_name
            continue
        q, s = reference(t.bfloat16())
        assert made.dtype(name) == E4M3 and made.dtype(name + "_scale_inv") == torch.float32
        assert torch.equal(scales[name + "_scale_inv"], s)
        start = tuple(rng.randrange(n) for n in t.shape)
        stop = tuple(rng.randint(a + 1, n) for a, n in zip(start, t.shape))
        for box in (((0, 0), tuple(t.shape)), (start, stop)):
            part = tuple(map(slice, *box))
            out = torch.empty(q[part].numel(), dtype=E4M3)
            made.quantize(name, box, lambda flat, x=t[part]: flat.copy_(x.flatten()), out)
            assert torch.equal(bits(out), bits(q[part]).flatten()), (name, box)


def test_weights_are_looked_up_as_they_are_sent(saved: Path) -> None:
    table = build_piece_table(read_hf_config(saved), Layout())
    params = Counted({p.name: torch.zeros(p.shape) for p in table.params})
    sent = BlockFp8(WeightSource(table, table.layout, 0, params, dtype=torch.bfloat16))
    params.lookups = 0
    assert sent.params()[table.params[0].name] is params.data[table.params[0].name]
    assert params.lookups == 1
