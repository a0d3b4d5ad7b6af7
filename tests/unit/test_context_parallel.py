"""Which way of context parallelism is taken, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.engine import ParallelConfig
from megarl.models import build
from megarl.models.build import cp_comm_type
from megarl.models.hf_config import parse_hf_config

SIZES = dict(
    vocab_size=64, hidden_size=256, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=16, num_key_value_heads=4,
)  # fmt: skip
MODEL = parse_hf_config(SIZES | dict(architectures=["LlamaForCausalLM"]))
WINDOW = parse_hf_config(SIZES | dict(architectures=["MistralForCausalLM"], sliding_window=8))


def resolve(attention: str, model=MODEL, *, way="auto", **parallel):
    return cp_comm_type(way, model, ParallelConfig(**{"cp": 2, **parallel}), attention)


@pytest.fixture
def installed(monkeypatch):
    """Makes Transformer Engine look like this version."""

    def pretend(version: str) -> None:
        def at_least(wanted: str) -> bool:
            return [int(x) for x in version.split(".")] >= [int(x) for x in wanted.split(".")]

        monkeypatch.setattr(build, "is_te_min_version", at_least)
        monkeypatch.setattr(build, "get_te_version", lambda: version)

    return pretend


def test_auto_takes_what_always_works():
    assert resolve("te") == "p2p"
    assert resolve("sdpa") == "all_gather"


def test_torch_attention_gathers():
    assert resolve("sdpa", way="all_gather") == "all_gather"
    for other in ("p2p", "a2a"):
        with pytest.raises(ValueError, match=f"cp_comm_type='{other}' needs Transformer Engine"):
            resolve("sdpa", way=other)


def test_packed_sequences_need_a_new_enough_transformer_engine(installed):
    installed("2.4")
    assert resolve("te", way="p2p") == "p2p"
    with pytest.raises(ValueError, match=r"'all_gather' .* 2\.18 on, and 2\.4 is installed"):
        resolve("te", way="all_gather")
    installed("2.18")
    assert resolve("te", way="all_gather") == "all_gather"


def test_windows_need_gathered_keys(installed):
    installed("2.18")
    assert resolve("te", WINDOW) == resolve("sdpa", WINDOW) == "all_gather"
    assert resolve("te", WINDOW, way="a2a") == "a2a"
    assert resolve("te", WINDOW, cp=1) == "p2p"
    with pytest.raises(ValueError, match=r"'p2p'.*sliding window \(of 8 tokens in mistral\)"):
        resolve("te", WINDOW, way="p2p")
    installed("2.4")
    with pytest.raises(ValueError, match=r"2\.18 on, and 2\.4 is installed; use parallel\.cp=1"):
        resolve("te", WINDOW)


def test_heads_must_be_shared_out(installed):
    installed("2.19")
    assert resolve("te", way="a2a", tp=2) == "a2a"
    with pytest.raises(ValueError, match=r"tp\*cp = 4\*2 must divide num_attention_heads=16"):
        resolve("te", way="a2a", tp=4)


def test_sinks_need_a_new_enough_transformer_engine_and_no_context_parallelism(installed):
    sinks = replace(MODEL, attention=replace(MODEL.attention, sinks=True))
    installed("2.7")
    assert resolve("sdpa", sinks) == "all_gather"
    with pytest.raises(ValueError, match=r"attention='te'.* sinks.* 2\.8 on.*'sdpa'"):
        resolve("te", sinks, cp=1)
    installed("2.20")
    assert resolve("te", sinks, cp=1) == "p2p"
    with pytest.raises(ValueError, match=r"parallel\.cp=2: llama has attention sinks.*'sdpa'"):
        resolve("te", sinks)
    with pytest.raises(ValueError, match=r"parallel\.cp=2: llama has attention sinks.*'sdpa'"):
        resolve("te", sinks, way="a2a")


def test_latent_attention_goes_by_p2p(installed):
    installed("2.19")
    sizes = dict(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    experts = dict(n_routed_experts=16, moe_intermediate_size=8, n_shared_experts=1)
    latent = parse_hf_config(
        SIZES | sizes | experts
        | dict(architectures=["DeepseekV3ForCausalLM"], num_experts_per_tok=4,
               num_key_value_heads=16, first_k_dense_replace=1)
    )  # fmt: skip
    for asked in ("a2a", "all_gather"):
        with pytest.raises(ValueError, match=f"'{asked}'.*deepseek_v3.*use 'p2p'"):
            cp_comm_type(asked, latent, ParallelConfig(cp=2), "te")
    assert cp_comm_type("auto", latent, ParallelConfig(cp=2), "te") == "p2p"
