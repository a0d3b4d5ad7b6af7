"""Gated delta networks against transformers: the rule, the convolution, config.json, arithmetic."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next import modeling_qwen3_next as hf_next

from megarl.config.engine import ParallelConfig
from megarl.models.flops import train_flops
from megarl.models.gated_delta import Kernels, convolve, delta_rule, fla_kernels, sequences
from megarl.models.hf_config import ModelConfig, check_layout, parse_hf_config
from megarl.planning.memory import kv_bytes_per_token, parameters
from tests.tiny import HYBRID_KINDS, VOCAB, tiny_hf

CPU = torch.device("cpu")
LENGTHS = [3, 130, 64, 1, 65, 17]
HEADS, K, V = 4, 16, 24
NAMES = ("q", "k", "v", "g", "beta")


def inputs(tokens: int = sum(LENGTHS), seed: int = 1) -> dict[str, Tensor]:
    """Returns q, k [T,H,K], v [T,H,V], decays and rates [T,H]."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, HEADS, *shape, generator=rng)

    values = (normal(K), normal(K), normal(V), -normal().abs() * 0.5, normal().sigmoid())
    return dict(zip(NAMES, values, strict=True))


def gradients(fn: Any, x: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = {name: t.clone().requires_grad_() for name, t in x.items()}
    out = fn(x)
    (out * weight).sum().backward()
    return out.detach(), {name: t.grad for name, t in x.items() if t.grad is not None}


def hugging_face(x: dict[str, Tensor]) -> Tensor:
    """Returns the rule's outputs of each sequence by itself."""
    parts = zip(*(x[n].split(LENGTHS) for n in NAMES), strict=True)
    rule = hf_next.torch_chunk_gated_delta_rule
    outs = [rule(*(p[None] for p in part), use_qk_l2norm_in_kernel=True)[0] for part in parts]
    return torch.cat([out[0] for out in outs])


def test_the_rule_is_hugging_faces_over_each_sequence() -> None:
    """Both compute in fp32 and sum in another order: 1e-6 is 20 times the rounding of a number."""
    weight = torch.randn(sum(LENGTHS), HEADS, V, generator=torch.Generator().manual_seed(3))
    at = sequences(LENGTHS, CPU)
    out, grads = gradients(lambda x: delta_rule(**x, at=at), inputs(), weight)
    want, wanted = gradients(hugging_face, inputs(), weight)
    assert float((out - want).norm() / want.norm()) < 1e-6
    for name in NAMES:
        assert float((grads[name] - wanted[name]).norm() / wanted[name].norm()) < 2e-6, name


def test_the_rule_is_the_recurrence() -> None:
    """The state of arXiv 2412.06464, token after token, in fp64."""
    x = inputs()
    got = delta_rule(**x, at=sequences(LENGTHS, CPU)).double()
    q, k, v, g, beta = (x[n].double() for n in NAMES)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    row = 0
    for n in LENGTHS:
        state = torch.zeros(HEADS, K, V, dtype=torch.float64)
        for t in range(row, row + n):
            state = g[t].exp()[:, None, None] * state
            read = torch.einsum("hk,hkv->hv", k[t], state)
            change = beta[t][:, None] * (v[t] - read)
            state = state + k[t][:, :, None] * change[:, None]
            want = torch.einsum("hk,hkv->hv", q[t] * K**-0.5, state)
            torch.testing.assert_close(got[t], want, rtol=0, atol=2e-6)
        row += n


def test_a_sequence_has_among_others_what_it_has_alone() -> None:
    """To the bit: its chunks are the same, and so are the products of each."""
    x = inputs()
    weight = torch.randn(sum(LENGTHS), HEADS, V, generator=torch.Generator().manual_seed(3))
    at = sequences(LENGTHS, CPU)
    packed, packed_grads = gradients(lambda y: delta_rule(**y, at=at), x, weight)
    row = 0
    for n in LENGTHS:
        here, own = slice(row, row + n), sequences([n], CPU)
        part = {name: t[here] for name, t in x.items()}
        alone, grads = gradients(lambda y, own=own: delta_rule(**y, at=own), part, weight[here])
        assert torch.equal(alone, packed[here])
        for name in NAMES:
            assert torch.equal(grads[name], packed_grads[name][here]), name
        row += n


def test_the_convolution_ends_where_a_sequence_begins() -> None:
    x = torch.randn(sum(LENGTHS), 32, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    got = convolve(x, weight, sequences(LENGTHS, CPU))
    want = [
        hf_next.causal_conv1d_fn(part.T[None], weight, None, "silu")[0].T
        for part in x.split(LENGTHS)
    ]
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=1e-6)
    alone = [convolve(part, weight, sequences([len(part)], CPU)) for part in x.split(LENGTHS)]
    assert torch.equal(got, torch.cat(alone))


# ---- fla's kernels


def stand_in_convolution(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    residual: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool | None = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Has the arguments of fla-core 0.6.0's causal_conv1d (0.4.0 has the last one in kwargs)."""
    assert x.shape[0] == 1 and weight is not None and activation == "silu"
    return convolve(x[0], weight, sequences(lengths_of(cu_seqlens, cu_seqlens_cpu), CPU))[
        None
    ], None


def stand_in_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Has the arguments of fla-core's chunk_gated_delta_rule that 0.4.0 and 0.6.0 share."""
    batch = dict(q=q, k=k, v=v, g=g, beta=beta)
    assert use_qk_l2norm_in_kernel and scale is None and not kwargs
    assert all(x.shape[0] == 1 and x.is_contiguous() for x in batch.values())
    assert g.dtype == torch.float32 and q.dtype == k.dtype == v.dtype == torch.bfloat16
    at = sequences(lengths_of(cu_seqlens, cu_seqlens_cpu), CPU)
    return delta_rule(**{name: x[0] for name, x in batch.items()}, at=at)[None], None


def lengths_of(bounds: Tensor | None, host: Tensor | None) -> list[int]:
    assert bounds is not None and host is not None and torch.equal(bounds, host)
    assert bounds.dtype == torch.long and host.device.type == "cpu"
    return bounds.diff().tolist()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what `fla_kernels` finds in a stand-in for fla."""
    for name in ("fla", "fla.modules", "fla.modules.convolution", "fla.ops", RULE):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["fla.modules.convolution"].causal_conv1d = stand_in_convolution  # type: ignore[attr-defined]
    sys.modules[RULE].chunk_gated_delta_rule = stand_in_rule  # type: ignore[attr-defined]
    fla_kernels.cache_clear()
    yield fla_kernels()
    fla_kernels.cache_clear()


RULE = "fla.ops.gated_delta_rule"


def test_kernels_of_fla_are_called_with_what_they_take(kernels: Kernels) -> None:
    """The same numbers come from both ways, to the rounding of rates to bf16."""
    x = {n: t if n == "g" else t.bfloat16() for n, t in inputs().items() if n != "beta"}
    x["beta"] = inputs()["beta"].bfloat16().float()
    at, own = sequences(LENGTHS, CPU, kernels=kernels), sequences(LENGTHS, CPU)
    assert at.chunks is None and torch.equal(delta_rule(**x, at=at), delta_rule(**x, at=own))
    weight = torch.randn(V, 4)
    rows = x["v"].flatten(1)[:, :V].float()
    assert torch.equal(convolve(rows, weight, at), convolve(rows, weight, own))


def test_there_are_no_kernels_without_fla() -> None:
    fla_kernels.cache_clear()
    assert fla_kernels() is None


# ---- config.json

# as on the hub
NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "max_position_embeddings": 262144,
    "vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-06,
}  # fmt: skip


def defaults(name: str) -> dict[str, Any]:
    """Returns the config.json of transformers' class, whose defaults are a published model's."""
    raw = getattr(transformers, f"{name}TextConfig")().to_dict()
    return {**raw, "architectures": [f"{name}ForCausalLM"]}


def read(raw: dict[str, Any], **over: Any) -> ModelConfig:
    return parse_hf_config({**raw, **over})


def test_the_published_models_have_their_published_sizes() -> None:
    """80B of which 3B are active, 35B of which 3B, and 9B; embeddings are not counted as active."""
    m = read(NEXT)
    assert m.attention.rotary_dim == 64 and m.recurrent is not None
    assert len(m.recurrent.layers) == 36 and m.mixer(3) is m.attention
    for raw, total, active in (
        (NEXT, 80e9, 3.9e9), (defaults("Qwen3_5Moe"), 35e9, 3.5e9), (defaults("Qwen3_5"), 9e9, 9e9)
    ):  # fmt: skip
        assert parameters(read(raw)) == (
            pytest.approx(total, rel=0.05),
            pytest.approx(active, rel=0.1),
        )


def test_a_servers_tokens_are_cached_by_attention_alone() -> None:
    m = read(NEXT)
    assert kv_bytes_per_token(m, 1) == 12 * 2 * 2 * 256 * 2
    assert m.recurrent is not None and m.recurrent.state == 32 * 128 * 128 + 3 * 8192


@pytest.mark.parametrize(
    "raw, over, words",
    (
        (NEXT, dict(linear_num_value_heads=24), "linear_num_value_heads=24.*linear_num_key_heads"),
        (NEXT, dict(linear_key_head_dim=0), "linear_key_head_dim=0"),
        (NEXT, dict(layer_types=["linear_attention"] * 47), "layer_types=.*list of 48"),
        (NEXT, dict(layer_types=["mamba"] * 48), "layer_types=.*'linear_attention'"),
        (NEXT, dict(full_attention_interval=-1), "full_attention_interval=-1"),
        (NEXT, dict(attn_output_gate=False), "attn_output_gate=False.*True"),
        (NEXT, dict(use_sliding_window=True, sliding_window=9), "use_sliding_window"),
        (NEXT, dict(attention_bias=True), "attention_bias=True"),
        (NEXT, dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (NEXT, dict(num_experts_per_tok=513), "num_experts_per_tok=513"),
        (defaults("Qwen3_5Moe"), dict(mlp_only_layers=[1]), r"mlp_only_layers=\[1\]"),
        (defaults("Qwen3_5Moe"), dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
        (defaults("Qwen3_5Moe"), dict(norm_topk_prob=False), "norm_topk_prob=False"),
    ),
)
def test_what_is_not_implemented_is_named(
    raw: dict[str, Any], over: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read(raw, **over)


def test_layouts_that_do_not_fit_name_the_values() -> None:
    m = read(NEXT)
    check_layout(m, ParallelConfig(tp=4, sequence_parallel=True, cp=4, ep=8))
    with pytest.raises(ValueError, match=r"tp\*cp=4\*8 does not divide linear_num_key_heads=16"):
        check_layout(m, ParallelConfig(tp=4, sequence_parallel=True, cp=8))


# ---- arithmetic


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_flops_are_those_torch_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is read by a key, changed, and read by a query: as many products as the recurrence
    has. transformers' convolution also sees the padding before a sequence."""
    n = 24
    hf = tiny_hf(kind, layers=3)
    hf.config._attn_implementation = hf.config._experts_implementation = "eager"
    m = parse_hf_config({**hf.config.to_dict(), "architectures": [type(hf).__name__]})
    module = sys.modules[type(hf).__module__]
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", products_of_the_recurrence)
    with FlopCounterMode(display=False) as counter:
        hf(torch.arange(3, 3 + n)[None] % VOCAB, use_cache=False).logits.sum().backward()
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert m.recurrent is not None
    states = 6 * n * len(m.recurrent.layers) * m.recurrent.products
    scores = by_op.pop("aten.bmm") - states
    by_op.pop("aten.convolution"), by_op.pop("aten.convolution_backward")
    taps = 6 * n * len(m.recurrent.layers) * 4 * (2 * 4 * 16 + 8 * 24)
    want = sum(by_op.values()) + states + taps + scores * (n + 1) / (2 * n)
    assert train_flops(m, [n]) == pytest.approx(want, rel=1e-9)


def products_of_the_recurrence(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Returns something of the rule's shape, out of its products of each token."""
    q, k, v = (x.flatten(0, 2) for x in (query, key, value))
    if len(q) != len(v):
        q, k = (x.repeat_interleave(len(v) // len(q), 0) for x in (q, k))
    change = v[:, :, None] @ k[:, None]
    read = change @ k[:, :, None]
    out = change @ q[:, :, None] + read
    return (out[..., 0].view(value.shape) * g[..., None] * beta[..., None]), None
