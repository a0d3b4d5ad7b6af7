"""Makes a cluster's recipe one that this machine can run: its layouts, its models, its keys.

overlay.yaml says to what. Nothing here is a model that anybody would train: sizes are the smallest
that two ranks of every degree divide and that leave each mechanism something to do (two key/value
heads, two experts on every rank, a group of experts that loses, a window shorter than a prompt).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.config.dataset import GENERATED
from megarl.config.earlier_run import differences
from megarl.config.engine import ParallelConfig
from megarl.config.loader import checked_config, config_yaml
from megarl.config.recipe_engines import engines
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.models.families import family_of, find_wrapper
from megarl.models.hf_config import DEFAULTS, LM, TEXT, WHOLE, parse_hf_config, text_settings
from megarl.utils.importing import is_import_path

OVERLAY = yaml.safe_load(Path(__file__).with_name("overlay.yaml").read_text(encoding="utf-8"))
REWARD = "megarl.cli.rehearse.small:even_share"
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_LEAST_FIRST = ("etp", "cp", "ep", "tp", "pp")  # what a rehearsal can do without, first
END, PAD, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
_MARKS = (PAD, END, USER, ASSISTANT)
_LEFT_OUT = ("bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "mlp_layer_types")
_STD = 0.1
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Tree = dict[str, Any]


# layouts


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Holds the layouts of a rehearsal, by engine. `left_out` are degrees that the ranks do not
    suffice for: they are 1 here. layers: of every model."""

    parallel: dict[str, ParallelConfig]
    world_size: int
    layers: int
    left_out: list[str]


def shrink_layouts(cluster: Mapping[str, ParallelConfig], *, ranks: int) -> Layouts:
    """Returns layouts that fit at most `ranks` ranks: every degree is 2 where it was more, with too
    few ranks some are left out, with ranks to spare dp is 2. A pipeline chunk has two layers."""
    most, left_out = dict.fromkeys(DEGREES, 2), list[str]()
    while True:
        small = {name: _at_most(p, most) for name, p in cluster.items()}
        world = math.lcm(*(n for p in small.values() for n in (p.dense_ranks, p.expert_ranks)))
        if world <= ranks:
            break
        used = (d for d in _LEAST_FIRST if any(getattr(p, d) > 1 for p in small.values()))
        left_out.append(next(used))
        most[left_out[-1]] = 1
    layers = 2 * max(p.pp * p.vpp for p in small.values())
    return Layouts(
        parallel={name: _settled(p, layers) for name, p in small.items()},
        world_size=2 * world if 2 * world <= ranks else world,
        layers=layers,
        left_out=left_out,
    )


def _at_most(p: ParallelConfig, most: Mapping[str, int]) -> ParallelConfig:
    small = replace(p, **{degree: min(getattr(p, degree), n) for degree, n in most.items()})
    return small if small.pp > 1 else replace(small, vpp=1)


def _settled(p: ParallelConfig, layers: int) -> ParallelConfig:
    """Returns the layout with everything else that goes with its degrees."""
    chunks = p.pp * p.vpp
    each = layers // chunks
    uneven = [each + 1, *[each] * (chunks - 2), each - 1]
    return replace(
        p,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        pipeline_split=uneven if p.pipeline_split and chunks > 1 else None,
    )


# models


def shrink_model(raw: Mapping[str, Any], *, layers: int, cluster_tp: int = 1) -> dict[str, Any]:
    """Returns the config.json `raw` with small sizes; its kinds of layers take turns. cluster_tp:
    where it was more than key/value heads, which ranks then repeat, it still is. Raises ValueError
    where megarl does not support the model."""
    if find_wrapper(raw):
        text = text_settings(raw, "config.json")
        return {**raw, TEXT: shrink_model(text, layers=layers, cluster_tp=cluster_tp)}
    m = parse_hf_config(raw)
    full = {**DEFAULTS, **family_of(m).defaults, **raw}
    small = {"model_type": m.family, **{k: v for k, v in raw.items() if k not in _LEFT_OUT}}
    small |= {key: size for key, size in OVERLAY["model"].items() if full.get(key)}
    small |= {key: min(full[key], n) for key, n in OVERLAY["model_limit"].items() if full.get(key)}
    if full.get("head_dim"):
        small["hidden_size"] = small["hidden_size"] * 3 // 2  # not heads * head_dim
    if m.attention.kv_heads < m.attention.heads:
        small["num_key_value_heads"] = 1 if cluster_tp > m.attention.kv_heads else 2
    kinds = list(dict.fromkeys(map(m.layer_type, range(m.num_layers))))
    if len(kinds) > 1:
        small["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return small | {"num_hidden_layers": layers}


def write_model(raw: Mapping[str, Any], directory: Path, *, head: str, seed: int) -> int:
    """Writes the model of the config.json `raw` and its tokenizer as a Hugging Face directory;
    returns its number of parameters. head: "value" where `raw` is a value model's. Raises
    ValueError where megarl does not support the model."""
    import torch
    from safetensors.torch import save_file

    from megarl.models.hf_config import read_hf_config

    directory.mkdir(parents=True)
    is_language_model = all(str(n).endswith((LM, WHOLE)) for n in raw.get("architectures") or ())
    ends = {"eos_token_id": _MARKS.index(END), "pad_token_id": _MARKS.index(PAD)}
    (directory / "config.json").write_text(json.dumps(dict(raw) | ends, indent=2) + "\n")
    model = read_hf_config(directory, head="lm" if is_language_model else head)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for param, _ in family_of(model).params(model):
        for name, shape in zip(param.hf, param.hf_shapes(model), strict=True):
            value = torch.randn(shape, generator=generator) * _STD + float("norm" in name)
            tensors[name] = value if param.fp32 else value.to(getattr(torch, model.dtype))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return sum(math.prod(t.shape) for t in tensors.values())


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer that has a token for every byte and one for each mark of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*_MARKS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_MARKS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)


# the configuration


def shrink_config(
    cfg: BaseConfig, layouts: Layouts, models: Mapping[str, str], *, fileroot: str
) -> BaseConfig:
    """Returns `cfg` as it runs two small steps on this machine. models: the directory of each
    engine's small model, by the engine's key."""
    tree = _tree(cfg)
    _set(tree, OVERLAY["replace"] | {"fileroot": fileroot})
    _set(tree, OVERLAY["limit"], _limited)
    for name in engines(cfg):
        _set(tree[name], OVERLAY["engine"])
        tree[name] |= {"path": models[name], "parallel": asdict(layouts.parallel[name])}
    sets = tree["valid_datasets"]
    tree["valid_datasets"] = {name: _few_rows(sets[name], "test", cfg) for name in sets}
    for name, split in (("train_dataset", "train"), ("valid_dataset", "test")):
        if tree[name] is not None:
            tree[name] = _few_rows(tree[name], split, cfg)
    if isinstance(cfg, GRPOConfig):
        server = {key: tree["server"][key] for key in ("count", "dtype", "deterministic")}
        server["count"] = max(1, server["count"])  # others were at addresses
        tree["server"] = OVERLAY["server"] | server
    return checked_config(yaml.safe_dump(tree), [])


def changes(before: BaseConfig, after: BaseConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value before, value after) for each plain key that differs."""
    return differences(_tree(before), _tree(after))


def _tree(cfg: BaseConfig) -> Tree:
    return dict(yaml.safe_load(config_yaml(cfg)))


def _set(
    tree: Tree, values: Tree, value_of: Callable[[Any, Any], Any] = lambda old, new: new
) -> None:
    """Sets the dotted keys of `values` that `tree` has to value_of(old, value)."""
    for key, value in values.items():
        *sections, last = key.split(".")
        section: Any = tree
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and last in section:
            section[last] = value_of(section[last], value)


def _limited(value: Any, most: float) -> Any:
    return min(value, most) if isinstance(value, int | float) else value


def _few_rows(source: Tree, split: str, cfg: BaseConfig) -> Tree:
    """Returns a data set of few rows: its own where it makes them or the user's code does, else
    sums. A reward of the user's stays where its rows do, unless a judge gives it."""
    if source.get("parts"):
        parts = {name: _few_rows(part, split, cfg) for name, part in source["parts"].items()}
        return source | {"parts": parts}
    own_rows = is_import_path(source["type"]) or source["type"] in GENERATED
    if own_rows:
        small = source | {key: value for key, value in OVERLAY["rows"].items() if key in source}
    else:
        small = OVERLAY["sums"] | {"split": split, "weight": source.get("weight")}
    if isinstance(cfg, GRPOConfig):
        own_reward = own_rows and is_import_path(source["reward"]["type"])
        if cfg.judge is not None or not own_reward:
            small["reward"] = REWARD
    return {key: value for key, value in small.items() if key in source}


def even_share(
    prompt: Any, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any
) -> float:
    """Returns the share of even token ids in the answer, from 0 to 1. A model with random weights
    answers nothing rightly; this way samples differ, and gradients are not zero."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
