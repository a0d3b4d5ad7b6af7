"""Reads a Hugging Face config.json into a ModelConfig, and refuses what is not implemented.

Pure: no torch, no megatron, and transformers only in `transformers_config` and `load_transformers`;
callable before any process group exists. A key that is absent means what it means to transformers.

A value model is a language model with a scalar per token (`score`) in place of the vocabulary.
Hugging Face calls them ForTokenClassification (the score has a bias) and ForSequenceClassification
(no bias; the score of the last token counts), with one label. Critics and reward models are such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.engine import TEXT as TEXT
from megarl.config.engine import ParallelConfig, overridden
from megarl.models.families import family_of, find_family, find_wrapper
from megarl.models.families.fields import count, number, positive, refuse_others
from megarl.models.shapes import ModelConfig as ModelConfig
from megarl.models.shapes import Wrapper

DTYPES = ("float32", "bfloat16", "float16")

_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")

# transformers' values of absent keys, unless a family's own `defaults` say otherwise
DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "routed_scaling_factor": 1.0,
}


def read_hf_config(
    path: str | Path,
    *,
    head: str = "lm",
    override: Mapping[str, Any] | None = None,
    new_bias: bool = True,
) -> ModelConfig:
    """Reads the ModelConfig of the model directory `path` with the wanted head ("lm" or "value").
    `override`: keys of config.json that have another value. `new_bias`: see value_model.

    Raises ValueError naming the file or the key that is missing, wrong or unsupported.
    """
    file = Path(path) / "config.json"
    if not file.is_file() and (Path(path) / "adapter_config.json").is_file():
        raise ValueError(adapter_given(path))
    if not file.is_file():
        raise ValueError(
            f"no config.json in {str(path)!r}: give a local Hugging Face model directory (fetch "
            "one with `hf download NAME --local-dir DIR`)"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file}: not valid JSON ({e})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    if wrapped := find_wrapper(language_model(raw)):
        for key in sorted((override or {}).keys() - {TEXT, *_OF_THE_WHOLE}):
            raise ValueError(
                f"override_config.{key}: {wrapped[1].architecture} has its language model's keys "
                f"in {TEXT}; write override_config.{TEXT}.{key}"
            )
    raw = overridden(raw, override or {})
    if head == "value":
        lm = parse_hf_config(language_model(raw), str(file))
        return value_model(lm, raw, str(file), new_bias=new_bias)
    return parse_hf_config(raw, str(file))


def adapter_given(path: str | Path) -> str:
    """Words the error for a `path` that holds an adapter and no model, with the fix."""
    return (
        f"{path} holds a PEFT adapter, not a model: name the model it was trained on, and the "
        "adapter in lora.adapter_path"
    )


def parse_hf_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Returns the ModelConfig of an already parsed config.json; `source` names it in errors. Raises
    ValueError naming the key that is missing, wrong or unsupported."""
    family, wrapped = find_family(raw, source), find_wrapper(raw)
    given = text_settings(raw, source) if wrapped else raw
    given = {k: v for k, v in given.items() if v is not None or k not in _NULL_IS_ABSENT}
    full = {**DEFAULTS, **family.defaults, **given}
    checked = {k: v for k, v in _IMPLEMENTED.items() if k not in family.ignored_fields}
    refuse_others(full, checked, source)
    (theta, scaling), window_rope = family.read_rope(full, source)
    moe = family.moe.read(full, source) if family.moe else None
    dense = moe is None or moe.dense_layers
    return ModelConfig(
        family=family.name,
        num_layers=positive(full, "num_hidden_layers", source),
        hidden_size=positive(full, "hidden_size", source),
        intermediate_size=(positive if dense else count)(full, "intermediate_size", source),
        attention=family.read_attention(full, source),
        vocab_size=positive(full, "vocab_size", source),
        tie_word_embeddings=bool(full["tie_word_embeddings"]),
        rms_norm_eps=number(full, "rms_norm_eps", source),
        rope_theta=theta,
        rope_scaling=scaling,
        window_rope=window_rope,
        max_position_embeddings=positive(full, "max_position_embeddings", source),
        initializer_range=number(full, "initializer_range", source),
        dtype=_dtype(full, source),
        moe=moe,
        recurrent=family.read_recurrent(full, source),
        mtp_layers=count(full, "num_nextn_predict_layers", source),
        raw=dict(raw),
        wrapper=wrapped[1] if wrapped else None,
    )


def text_settings(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the config.json of the language model within the whole `raw`, which decides itself on
    dtype and tied embeddings, as in transformers. Raises ValueError where there is none."""
    if not isinstance(text := raw.get(TEXT), Mapping):
        raise ValueError(f"{source}: {TEXT}={text!r}; expected the language model's settings")
    of_whole = {key: raw[key] for key in _OF_THE_WHOLE if key in raw}
    return {**text, **of_whole, "architectures": [find_family(raw, source).architecture]}


def check_layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises ValueError, naming values and fix, if `model` cannot be cut as `parallel` says."""
    m, tp = model, parallel.tp
    heads, kv = m.attention.heads, m.attention.kv_heads
    if heads % tp:
        raise ValueError(
            f"parallel.tp={tp} does not divide num_attention_heads={heads}; choose tp from "
            f"{_divisors(heads)}"
        )
    if kv % tp and tp % kv:
        raise ValueError(
            f"parallel.tp={tp} neither divides num_key_value_heads={kv} nor is a multiple of it; "
            f"choose tp from {[d for d in _divisors(heads) if not (kv % d and d % kv)]}"
        )
    mixers = [m.attention] if m.recurrent is None else [m.attention, m.recurrent]
    sizes = {name: size for x in mixers for name, size in x.sizes_to_cut().items()}
    if m.moe is None or m.moe.dense_layers:
        sizes["intermediate_size"] = m.intermediate_size
    if m.moe is not None:
        sizes["shared_expert_intermediate_size"] = m.moe.shared_intermediate_size
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(f"parallel.tp={tp} does not divide {name}={size}; lower tp")
    for name, size in (x for mixer in mixers for x in mixer.sizes_to_share().items()):
        if size % (tp * parallel.cp):
            raise ValueError(
                f"parallel.tp*cp={tp}*{parallel.cp} does not divide {name}={size}; lower tp or cp"
            )
    context = m.rope_scaling.original_max_position_embeddings if m.rope_scaling else 0
    if m.attention.latent and parallel.cp > 1 and context % (2 * parallel.cp):
        raise ValueError(
            f"parallel.cp={parallel.cp}: 2*cp does not divide "
            f"original_max_position_embeddings={context}, the rows of YaRN's table that latent "
            "attention shares out to the ranks; choose cp from "
            f"{[d for d in _divisors(context) if d == 1 or not context % (2 * d)]}"
        )
    chunks = parallel.pp * parallel.vpp
    if (split := parallel.pipeline_split) is not None and sum(split) != m.num_layers:
        raise ValueError(
            f"parallel.pipeline_split={split} adds up to {sum(split)} layers, but "
            f"num_hidden_layers={m.num_layers}; change its numbers"
        )
    if split is None and m.num_layers % chunks:
        raise ValueError(
            f"parallel.pp*vpp={parallel.pp}*{parallel.vpp}={chunks} does not divide "
            f"num_hidden_layers={m.num_layers}; choose a product from {_divisors(m.num_layers)}, "
            "or give the layers of each chunk in parallel.pipeline_split"
        )
    _check_expert_layout(m, parallel)


def _check_expert_layout(m: ModelConfig, p: ParallelConfig) -> None:
    if m.moe is None:
        for degree in ("ep", "etp"):
            if getattr(p, degree) > 1:
                raise ValueError(
                    f"parallel.{degree}={getattr(p, degree)} needs a mixture-of-experts model, "
                    f"and {m.family} is dense; set parallel.{degree}=1"
                )
        return
    for degree, name, size in (
        ("ep", "num_experts", m.moe.num_experts),
        ("etp", "the experts' intermediate size", m.moe.intermediate_size),
    ):
        if size % getattr(p, degree):
            raise ValueError(
                f"parallel.{degree}={getattr(p, degree)} does not divide {name}={size}; choose "
                f"{degree} from {_divisors(size)}"
            )
    if m.moe.bias and p.etp > 1:
        raise ValueError(
            f"parallel.etp={p.etp}: {m.family}'s experts have biases, which every rank would add; "
            "set parallel.etp=1"
        )
    if p.tp > 1 and not p.sequence_parallel:
        raise ValueError(
            f"parallel.tp={p.tp} with a mixture-of-experts model ({m.family}) needs tokens shared "
            "out to the ranks' routers; set parallel.sequence_parallel=true"
        )


# Keys that have the class's default in transformers if they are null.
_NULL_IS_ABSENT = ("rope_parameters", "rope_theta", "partial_rotary_factor")
# Fields that change the maths, with the values that are implemented. A field that is absent is
# fine; fields not listed here do not change a forward pass.
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "router_jitter_noise": (0,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
}


def _dtype(raw: Mapping[str, Any], source: str) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{source}: dtype {name!r} is not supported; supported: {DTYPES}")
    return name


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def transformers_config(path: str | Path, override: Mapping[str, Any] | None = None) -> Any:
    """Returns transformers' config of the model directory `path`, with other values for the keys in
    `override`; of the language model alone where the directory has a vision tower beside it.

    A model_type that transformers does not know is read as that of the architecture: Kimi-K2 calls
    itself "kimi_k2", and its architecture is DeepseekV3ForCausalLM.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw, _ = transformers.PretrainedConfig.get_config_dict(path)
    raw = overridden(raw, override or {})
    if wrapped := find_wrapper(raw):
        raw = text_settings(raw, str(path))
    model = getattr(transformers, (raw.get("architectures") or [""])[0], None)
    known = raw.get("model_type") in CONFIG_MAPPING
    if known and (override or wrapped):
        return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    if known or model is None:
        return transformers.AutoConfig.from_pretrained(path)
    return model.config_class.from_dict({k: v for k, v in raw.items() if k != "model_type"})


def load_transformers(path: Path | str, override: Any = None, **how: Any) -> Any:
    """Returns transformers' language model of the directory `path`. Parameters that megarl keeps in
    fp32 are fp32.

    override: as in `transformers_config`. how: further arguments of from_pretrained.
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel

    names = wrapper.key_mapping() if (wrapper := wrapper_at(path)) else None
    config = transformers_config(path, override)
    default = PreTrainedModel._keep_in_fp32_modules_strict
    PreTrainedModel._keep_in_fp32_modules_strict = _fp32_names(path, override)
    try:
        return AutoModelForCausalLM.from_pretrained(path, config=config, key_mapping=names, **how)
    finally:
        PreTrainedModel._keep_in_fp32_modules_strict = default


def _fp32_names(path: str | Path, override: Mapping[str, Any] | None) -> list[str]:
    """Returns transformers' names of the fp32 parameters; none of a family that megarl lacks."""
    try:
        model = read_hf_config(path, override=override)
    except ValueError:
        return []
    names = (n for p, _ in family_of(model).params(model) if p.fp32 for n in p.hf)
    return [n.replace(".block_sparse_moe.", ".mlp.") for n in names]


def wrapper_at(path: str | Path) -> Wrapper | None:
    """Returns what wraps the language model in a model directory, None where nothing does."""
    wrapped = find_wrapper(json.loads((Path(path) / "config.json").read_text(encoding="utf-8")))
    return wrapped[1] if wrapped else None


LM, TOKEN, SEQUENCE = "ForCausalLM", "ForTokenClassification", "ForSequenceClassification"
WHOLE = "ForConditionalGeneration"


def language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `raw` under the name of the language model that the value model is built on."""
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        return raw  # parse_hf_config raises the error
    lm = WHOLE if TEXT in raw else LM
    return {
        **raw,
        "architectures": [str(n).replace(TOKEN, lm).replace(SEQUENCE, lm) for n in names],
    }


def value_model(
    lm: ModelConfig, raw: Mapping[str, Any], source: str, *, new_bias: bool = True
) -> ModelConfig:
    """Returns the value model of a config.json `raw` whose transformer is that of `lm`.

    A language model's directory becomes a token classifier with a new head, without `new_bias` a
    sequence classifier. Raises ValueError for a classifier whose labels are not exactly one.
    """
    family = family_of(lm)
    names = raw.get("architectures") or [family.architecture]
    new = not any(n.endswith((TOKEN, SEQUENCE)) for n in names)
    if new:
        label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        whole = lm.wrapper.architecture if lm.wrapper else family.classifier
        name = whole or family.architecture
        name = re.sub(f"{LM}|{WHOLE}", TOKEN if new_bias else SEQUENCE, name)
        raw = {k: v for k, v in raw.items() if k != "num_labels"} | label
        raw = {**raw, "architectures": [name]}
    elif (labels := len(raw.get("id2label") or ()) or raw.get("num_labels", 2)) != 1:
        raise ValueError(f"{source}: {names[0]} with {labels} labels; a value model has one")
    return replace(
        lm,
        raw=dict(raw),
        tie_word_embeddings=False,
        head="value",
        score_bias=new_bias if new else any(n.endswith(TOKEN) for n in names),
        new_head=new,
    )
