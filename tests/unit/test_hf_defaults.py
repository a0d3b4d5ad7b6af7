"""What config.json leaves out or says twice means what it means to transformers, by family."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

from megarl.models.families import FAMILIES
from megarl.models.families.deepseek import Latent
from megarl.models.families.grouped_query import GroupedQuery
from megarl.models.hf_config import ModelConfig, parse_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.models.rope import inv_freq
from megarl.parallel.layout import Layout
from tests.tiny import tiny_hf

CLASSES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3", "kimi_k2": "DeepseekV3", "glm": "Glm", "glm4": "Glm4",
    "glm4_moe": "Glm4Moe", "glm4_moe_lite": "Glm4MoeLite",
    "mistral": "Mistral", "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5Text", "qwen3_5_moe_text": "Qwen3_5MoeText",
    "gemma3_text": "Gemma3Text", "olmo3": "Olmo3", "minimax_m2": "MiniMaxM2", "gpt_oss": "GptOss",
}  # fmt: skip
# whose layers with a window have rotary settings of their own
BY_TYPE = tuple(name for name, family in FAMILIES.items() if family.rope_by_type)
FULL, SLIDES = "full_attention", "sliding_attention"
# without these no weight has a shape: a config.json that lacks one is refused, by name
MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
}  # fmt: skip
ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=7e5)
LINEAR: dict[str, Any] = dict(rope_type="linear", factor=2.5)
LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN: dict[str, Any] = dict(type="yarn", factor=4.0, original_max_position_embeddings=64)


def hf_config(name: str, raw: dict[str, Any]) -> Any:
    given = {k: v for k, v in raw.items() if k not in ("architectures", "model_type")}
    cls = getattr(transformers, CLASSES[name] + "Config")
    return cls.from_dict({k: dict(v) if isinstance(v, dict) else v for k, v in given.items()})


def completed(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` as transformers understands it: every key is there."""
    config = hf_config(name, raw)
    config.standardize_rope_params()  # as its rotary embedding does once more
    return config.to_dict() | names_of(raw)


def names_of(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: raw[k] for k in ("architectures", "model_type") if k in raw}


def full_config(name: str) -> dict[str, Any]:
    """A config.json that has every key, each with another value than its default where the model
    code takes one."""
    family = FAMILIES[name]
    given: dict[str, Any] = dict(
        architectures=[family.architecture], num_attention_heads=128, num_key_value_heads=64,
        head_dim=64, max_position_embeddings=100, rms_norm_eps=3e-4, initializer_range=0.5,
        tie_word_embeddings=True, rope_theta=3e5,
    )  # fmt: skip
    if family.moe is not None:
        given |= dict(num_experts_per_tok=4)
    if name in MLA:
        del given["head_dim"]
        given |= dict(q_lora_rank=48, num_key_value_heads=128)
    if name in (*MLA, "glm4_moe"):
        given |= dict(first_k_dense_replace=2, routed_scaling_factor=3.0, n_group=2, topk_group=1)
    if name == "glm4_moe_lite":
        del given["first_k_dense_replace"]  # transformers reads mlp_layer_types
        given |= dict(num_attention_heads=20, num_key_value_heads=20)
        given |= dict(mlp_layer_types=["sparse", "dense"] * 23 + ["sparse"])
    if name == "deepseek_v2":
        given |= dict(topk_method="group_limited_greedy")
    if name in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        given |= dict(num_nextn_predict_layers=2)
    if name == "kimi_k2":
        given |= dict(model_type=name)
    if family.partial_rotary:
        given |= dict(attention_bias=name == "glm4_moe", partial_rotary_factor=0.25)
    if family.output_gate:
        given |= dict(
            partial_rotary_factor=0.5, linear_num_key_heads=8, linear_num_value_heads=96,
            linear_key_head_dim=5, linear_value_head_dim=6, linear_conv_kernel_dim=3,
        )  # fmt: skip
    if name == "glm4_moe":
        given |= dict(use_qk_norm=True)
    if name == "gpt_oss":
        given |= dict(sliding_window=50, swiglu_limit=3.0)
    if name in ("mistral", *BY_TYPE):
        given |= dict(sliding_window=50)
    if name == "gemma3_text":
        given |= dict(
            num_key_value_heads=2,
            query_pre_attn_scalar=100,
            rope_local_base_freq=2e3,
            tie_word_embeddings=False,
        )
    if name in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        given |= dict(norm_topk_prob=True, decoder_sparse_step=3, mlp_only_layers=[1])
    defaults = getattr(transformers, CLASSES[name] + "Config")().to_dict()
    del defaults["rope_parameters"]  # would hold the base, too
    full = defaults | given | {"layer_types": None, "head_dim": given.get("head_dim")}
    if name == "glm4_moe_lite":
        del full["head_dim"]  # to transformers another name of qk_rope_head_dim
    return full


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_is_absent_means_what_it_means_to_transformers(name: str) -> None:
    raw = full_config(name)
    told = 0
    for key in sorted(raw.keys() - {"architectures", "model_type", "dtype", "torch_dtype"}):
        left = {k: v for k, v in raw.items() if k != key}
        if key in SIZES - FAMILIES[name].defaults.keys():
            with pytest.raises(ValueError, match=f"{key} is missing|num_experts is missing"):
                parse_hf_config(left)
            continue
        found = parse_hf_config(left)
        assert found == parse_hf_config(completed(name, left)), key
        told += found != parse_hf_config(raw)
    assert told >= 6  # keys whose absence is seen in the numbers
    least = {k: raw[k] for k in raw if k in SIZES} | names_of(raw)
    assert parse_hf_config(least) == parse_hf_config(completed(name, least))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_is_null_means_what_it_means_to_transformers(name: str) -> None:
    """Transformers refuses most nulls. Otherwise a null is the class's default or false."""
    raw = full_config(name)
    more = dict.fromkeys((
        "rope_scaling", "rope_parameters", "norm_topk_prob", "rope_interleave", "mlp_bias",
        "attention_bias", "qkv_bias", "use_qk_norm", "partial_rotary_factor", "use_sliding_window",
        "layer_types", "rope_local_base_freq", "scoring_func", "topk_method", "moe_layer_freq",
    ))  # fmt: skip
    taken = []
    for key in sorted({**more, **raw}.keys() - {"architectures", "model_type"}):
        for without in ({key}, {key, "rope_theta"}):
            null = {k: v for k, v in copy.deepcopy(raw).items() if k not in without} | {key: None}
            try:
                want = completed(name, copy.deepcopy(null))
            except (ValueError, TypeError, huggingface_hub.errors.StrictDataclassError):
                continue
            try:
                wanted = parse_hf_config(want)
            except ValueError:  # its sizes or bases are null in transformers, too
                continue
            try:
                found = parse_hf_config(null)
            except ValueError as e:
                assert key in str(e) or key in SIZES, key
            else:
                assert found == wanted, key
                taken.append(key)
    assert {"rope_parameters", "rope_scaling", "layer_types"} <= set(taken)


@pytest.mark.parametrize("key", ("norm_topk_prob", "rope_interleave"))
def test_a_null_that_is_false_to_transformers_is_no_true(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}=None"):
        parse_hf_config({**full_config("deepseek_v3"), key: None})
    parse_hf_config({**full_config("deepseek_v3"), key: True})


@pytest.mark.parametrize("qkv_bias", (False, True))
@pytest.mark.parametrize("name", FAMILIES)
def test_qkv_bias_counts_where_transformers_reads_it(name: str, qkv_bias: bool) -> None:
    """Qwen3-Coder's config.json has `qkv_bias: false`, a key that only Qwen2Moe reads."""
    hf = tiny_hf(name, layers=2, qkv_bias=qkv_bias)
    raw = hf.config.to_dict() | names_of(dict(architectures=[type(hf).__name__], model_type=name))
    table = build_piece_table(parse_hf_config(raw), Layout())
    ours, theirs = (
        {n for n in names if n.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))}
        for names in (table.by_name, hf.state_dict())
    )
    assert ours == theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_are_the_attributes_of_transformers_config(name: str) -> None:
    """Beside the test above, which compares two readings of ours."""
    raw = full_config(name)
    least = {k: raw[k] for k in raw if k in SIZES} | names_of(raw)
    for given in (raw, least):
        hf, m = hf_config(name, given), parse_hf_config(given)
        assert m.rope_theta == hf.rope_parameters.get(FULL, hf.rope_parameters)["rope_theta"]
        assert m.attention.kv_heads == hf.num_key_value_heads
        for field in (
            "tie_word_embeddings", "rms_norm_eps", "initializer_range", "max_position_embeddings",
        ):  # fmt: skip
            assert getattr(m, field) == getattr(hf, field), field
        if FAMILIES[name].partial_rotary:
            assert isinstance(m.attention, GroupedQuery)
            assert m.attention.qkv_bias == getattr(hf, "attention_bias", False)
            always = m.attention.output_gate or m.attention.whole_norm
            assert m.attention.qk_norm == getattr(hf, "use_qk_norm", always)
            factor = hf.rope_parameters.get("partial_rotary_factor", 1.0)
            assert m.attention.rotary_dim == m.attention.head_dim * factor
        if isinstance(m.attention, Latent):
            assert m.attention.q_rank == hf.q_lora_rank
        if hasattr(hf, "first_k_dense_replace"):
            assert m.moe is not None and len(m.moe.dense_layers) == hf.first_k_dense_replace
            assert m.moe.scale == hf.routed_scaling_factor
            if hf.n_group is not None:
                assert (m.moe.groups, m.moe.top_groups) == (hf.n_group, hf.topk_group)
        elif name == "gpt_oss":
            assert m.moe is not None and m.moe.limit == hf.swiglu_limit
        elif name == "glm4_moe_lite":
            kinds = ["dense" if i in m.experts.dense_layers else "sparse" for i in range(47)]
            assert kinds == hf.mlp_layer_types and m.experts.scale == hf.routed_scaling_factor
            assert (m.experts.groups, m.experts.top_groups) == (hf.n_group, hf.topk_group)
        elif m.moe is not None and name != "mixtral":
            assert m.moe.norm_topk_prob == getattr(hf, "norm_topk_prob", True)
        if m.recurrent is not None:
            types = ["linear_attention" if i in m.recurrent.layers else "full_attention"
                     for i in range(m.num_layers)]  # fmt: skip
            assert types == hf.layer_types
            assert m.recurrent.products == 3 * (
                hf.linear_num_value_heads * hf.linear_key_head_dim * hf.linear_value_head_dim
            )


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BY_TYPE])
@pytest.mark.parametrize(
    "beside",
    (
        dict(rope_parameters=ROPE),
        dict(rope_scaling=dict(LINEAR)),
        dict(rope_parameters=ROPE, rope_scaling=dict(LINEAR)),
        dict(rope_parameters=ROPE, rope_scaling=dict(LINEAR), rope_theta=9e5),
        dict(rope_parameters=ROPE, rope_scaling={**LINEAR, "rope_theta": 2e5}, rope_theta=9e5),
        dict(rope_parameters={**ROPE, **LINEAR}, rope_scaling=dict(LLAMA3)),
        dict(rope_parameters={**ROPE, **LINEAR}, rope_scaling=None),
        dict(rope_parameters={**ROPE, **LINEAR}, rope_scaling={}),
        dict(rope_parameters=ROPE, rope_scaling=dict(YARN)),
        dict(rope_parameters=ROPE, rope_scaling=dict(LLAMA3), original_max_position_embeddings=32),
        dict(rope_parameters=ROPE, rope_scaling=dict(YARN), original_max_position_embeddings=32),
    ),
    ids=lambda b: "-".join(b) if isinstance(b, dict) else None,
)
def test_rotary_settings_said_twice_are_what_transformers_makes_of_them(
    name: str, beside: dict[str, Any]
) -> None:
    raw = {k: v for k, v in full_config(name).items() if k != "rope_theta"}
    raw |= {k: dict(v) if isinstance(v, dict) else v for k, v in beside.items()}
    want = completed(name, raw)
    m = _parse(raw)
    if m is None:  # a kind of scaling that the family does not have: refused in either spelling
        assert _parse(want) is None and want["rope_parameters"]["rope_type"] != "default"
        return
    assert m == _parse(want)
    settings = want["rope_parameters"]
    assert m.rope_theta == settings["rope_theta"]
    if m.rope_scaling is None:
        assert settings["rope_type"] == "default"
        return
    assert m.rope_scaling.type == settings["rope_type"]
    for key in ("factor", "original_max_position_embeddings", "high_freq_factor"):
        if key in settings:
            assert getattr(m.rope_scaling, key) == settings[key], key
    if isinstance(m.attention, GroupedQuery):
        package = name.removesuffix("_text")
        module = getattr(transformers.models, package)
        rotary = getattr(
            getattr(module, f"modeling_{package}"), f"{CLASSES[name]}RotaryEmbedding"
        )(hf_config(name, raw))  # fmt: skip
        assert torch.equal(inv_freq(m), rotary.inv_freq)


@pytest.mark.parametrize("name", BY_TYPE)
@pytest.mark.parametrize(
    "beside",
    (
        {},
        dict(rope_theta=9e5),
        dict(rope_scaling={**LINEAR}),
        dict(rope_theta=9e5, rope_scaling={**LLAMA3, "rope_theta": 2e5}),
        dict(rope_parameters={FULL: ROPE, SLIDES: {**LINEAR, "rope_theta": 3e3}}, rope_theta=9e5),
        dict(rope_parameters={FULL: None, SLIDES: None}, rope_theta=9e5),
        dict(rope_parameters={FULL: ROPE}, rope_scaling={**LINEAR}),
        dict(rope_parameters={SLIDES: ROPE}),
    ),
    ids=str,
)
def test_rotary_settings_by_type_of_layer_are_transformers(
    name: str, beside: dict[str, Any]
) -> None:
    raw = {k: v for k, v in full_config(name).items() if not k.startswith("rope")}
    raw |= copy.deepcopy(beside)
    config = hf_config(name, copy.deepcopy(raw))
    m = parse_hf_config(raw)
    assert m == parse_hf_config(completed(name, copy.deepcopy(raw)))
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    rotary = getattr(module, CLASSES[name].removesuffix("Text") + "RotaryEmbedding")(config)
    for window, kind in enumerate((FULL, SLIDES)):
        want = getattr(rotary, f"{kind}_inv_freq")
        assert torch.equal(inv_freq(m, window=bool(window)), want)


@pytest.mark.parametrize("name", BY_TYPE)
@pytest.mark.parametrize(
    ("over", "words"),
    (
        (dict(rope_parameters=ROPE), "rope_parameters=.*a set for each of full_attention"),
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), "'linear' lacks rope_type"),
        (dict(rope_parameters={SLIDES: {"rope_theta": -1}}), "rope_theta=-1"),
        (dict(rope_parameters={FULL: {"partial_rotary_factor": 0.5}}), "partial_rotary_factor=0.5"),
        (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
    ),
)
def test_rotary_settings_by_type_that_are_wrong_are_named(
    name: str, over: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        parse_hf_config(full_config(name) | over)


def _parse(raw: dict[str, Any]) -> ModelConfig | None:
    try:
        return parse_hf_config(raw)
    except ValueError as e:
        assert "rope scaling type" in str(e)
        return None


WINDOWED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "mistral", "gpt_oss")


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize(
    "over",
    (
        dict(use_sliding_window=False, sliding_window=32),
        dict(use_sliding_window=True, sliding_window=32, max_window_layers=0),
        dict(use_sliding_window=True, sliding_window=32, max_window_layers=1),
        dict(use_sliding_window=True, sliding_window=32, max_window_layers=4),
        dict(use_sliding_window=True, sliding_window=32, max_window_layers=9),
        dict(use_sliding_window=True, max_window_layers=1),
        dict(use_sliding_window=True, sliding_window=32),
        dict(sliding_window=32),
        dict(sliding_window=None),
        {},
    ),
)
def test_layers_that_slide_are_those_of_transformers(name: str, over: dict[str, Any]) -> None:
    """By what transformers' models read when they make a layer's mask."""
    raw = {k: v for k, v in full_config(name).items() if "window" not in k and k != "layer_types"}
    raw |= dict(num_hidden_layers=4, **over)
    if name == "gpt_oss" and raw.get("sliding_window", 1) is None:
        with pytest.raises(ValueError, match="sliding_window"):
            parse_hf_config(raw)
        return
    hf, found = hf_config(name, raw), parse_hf_config(raw).attention
    if hasattr(hf, "layer_types"):
        slides = tuple(i for i, kind in enumerate(hf.layer_types) if kind == SLIDES)
    else:
        slides = tuple(range(4)) if hf.sliding_window is not None else ()
    assert found.window_layers == slides
    assert found.window == (hf.sliding_window if slides else None)


@pytest.mark.parametrize("types", (None, [SLIDES, FULL, SLIDES, SLIDES, FULL, FULL, FULL, FULL]))
@pytest.mark.parametrize(
    ("name", "over"),
    [
        *((name, {}) for name in BY_TYPE),
        # transformers reads no other pattern for Olmo 3, which is refused: test_gemma.py
        *((name, dict(sliding_window_pattern=3)) for name in BY_TYPE if name != "olmo3"),
    ],
)
def test_layers_with_a_pattern_are_those_of_transformers(
    name: str, types: list[str] | None, over: dict[str, Any]
) -> None:
    raw = full_config(name) | dict(num_hidden_layers=8, layer_types=types, **over)
    config = hf_config(name, raw)
    slides = tuple(i for i, kind in enumerate(config.layer_types) if kind == SLIDES)
    assert parse_hf_config(raw).attention.window_layers == slides


@pytest.mark.parametrize("name", (*WINDOWED, "llama"))
def test_layer_types_count_or_must_agree(name: str) -> None:
    raw = full_config(name) | dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=32)
    types = dict(layer_types=[FULL, SLIDES, FULL, FULL])
    if name == "gpt_oss":
        assert parse_hf_config(raw | types).attention.window_layers == (1,)
        return
    if name in ("qwen2", "qwen3", "qwen2_moe"):
        assert parse_hf_config(raw | types).attention.window_layers == (1,)
        with pytest.raises(ValueError, match=r"layers \[1\], but with use_sliding_window=False"):
            parse_hf_config(raw | types | dict(use_sliding_window=False))
        with pytest.raises(ValueError, match="expected a list of 4 types"):
            parse_hf_config(raw | dict(layer_types=[FULL]))
        return
    with pytest.raises(ValueError, match=r"make them agree|not supported in this family"):
        parse_hf_config(raw | types)
