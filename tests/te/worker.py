"""Collects facts for the tests: what Transformer Engine's layers are like beside the local ones.

    python -O -m tests.te.worker {contract,names,big} FILE

One process for each version of Transformer Engine, found on the path: the stub (tests/te/stub.py)
and `-O` are for a whole process, and asserts are therefore the tests' business. FILE gets JSON.
Every rank of any layout is played in this one process, over torch's fake process group and with
fake tensors.
"""

from __future__ import annotations

import inspect
import json
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from tests.te import stub

if HAVE_TE := find_spec("transformer_engine") is not None:
    stub.install()

import torch

from tests.te.cases import BIG, BIG_RANKS, CASES, FUSED_CASES, LORA_CASES, NEWEST_ALONE
from tests.te.ranks import built_model, describe, pretend_gpu, tiny

Facts = dict[str, Any]


def main(mode: str, file: str) -> None:
    facts = {"contract": contract, "names": names, "big": big}[mode]()
    Path(file).write_text(json.dumps(facts), encoding="utf-8")


def contract() -> Facts:
    from tests.te.calls import call_all

    from megatron.core.utils import is_te_min_version

    pretend_gpu()
    built = [c for c in CASES if c not in NEWEST_ALONE or is_te_min_version("2.8")]
    builds = {case: {s: facts_of(case, s) for s in ("te", "sdpa")} for case in built}
    adapters = {case: lora_facts(case) for case in LORA_CASES}
    tries = {case: trie_facts(case) for case in LORA_CASES}
    fused = {case: fused_facts(case) for case in FUSED_CASES}
    return dict(
        builds=builds, adapters=adapters, tries=tries, fused=fused, calls=call_all(),
        adam=adam_signatures(),
    )  # fmt: skip


def facts_of(case: str, spec: str) -> Facts:
    kind, layout, rank, head = CASES[case]
    with built_model(tiny(kind, head), layout, rank, spec) as (made, groups):
        return describe(made, groups)


def lora_facts(case: str) -> Facts:
    from megarl.config.engine import LoRAConfig
    from megarl.models.adapters import Adapters
    from megarl.models.lora import lora_fields

    kind, layout, rank, _ = CASES[case]
    model, cfg = tiny(kind, "lm"), LoRAConfig(r=2)
    with built_model(model, layout, rank, "te", **lora_fields(model, cfg)) as (made, groups):
        kw: dict[str, Any] = dict(dtype=torch.bfloat16, device=torch.device("cpu"), seed=0)
        adapters = Adapters(made.chunks, model, layout, cfg, **kw)
        table = adapters.table.local_params(groups.coords)
        return dict(
            params={n: list(p.shape) for n, p in adapters.params.items()},
            table={n: list(p.shape) for n, p in table.items()},
            fused=fused(made),
        )


def fused_facts(case: str) -> Facts:
    """Returns the layers whose products add weight gradients to the wrapper's buffers, without and
    with reductions that overlap, and the trained matrices that no such layer has."""
    kind, layout, rank, head = CASES[case]
    found: Facts = {}
    for overlap in (False, True):
        with built_model(tiny(kind, head), layout, rank, "te") as (made, _):
            found["overlap" if overlap else "plain"] = fused(made, overlap_grad_reduce=overlap)
    return found


def fused(made: Any, **settings: Any) -> Facts:
    """Wraps a model for training. Returns the kinds of its layers that are fused, and of those of
    Transformer Engine with weights that are not; and the trained matrices of no fused layer."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    from megarl.config.engine import OptimizerConfig
    from megarl.engine.optimizer import wrap_chunks

    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    others: set[str] = set()
    for module in (
        m
        for chunk in wrap_chunks(made.config, made.chunks, OptimizerConfig(**settings))
        for m in chunk.modules()
    ):
        matrices = [p for p in module.parameters(recurse=False) if p.ndim > 1]
        if matrices and isinstance(module, TransformerEngineBaseModule):
            kinds[module.fuse_wgrad_accumulation].add(type(module).__name__)
        elif any(hasattr(p, "main_grad") for p in matrices):
            others.add(type(module).__name__)
    return dict(fused=sorted(kinds[True]), unfused=sorted(kinds[False]), others=sorted(others))


def trie_facts(case: str) -> Facts:
    """Returns the classes of attention, of a projection beside it and of rotary embedding, in a
    model that takes tries, and whether its attention over a trie is ours."""
    from megarl.models.trie_params import trie_params
    from megarl.parallel.trie import build_trie

    kind, layout, rank, head = CASES[case]
    with built_model(tiny(kind, head), layout, rank, "te", share_prefixes=True) as (made, _):
        kinds: dict[str, Any] = {}
        for name, module in made.chunks[0].named_modules():
            kinds.setdefault(name.rpartition(".")[2], module)
    attention = kinds["core_attention"]
    packed = trie_params(build_trie(torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]]), [4, 3]))
    q, k, v = torch.randn(3, 5, 2, 8).unbind()
    ours = packed.attend(q, k, v, attention.trie_scale).flatten(1)
    return dict(
        attention=[c.__name__ for c in type(attention).__mro__[:2]],
        ours=torch.equal(attention(q, k, v, None, packed_seq_params=packed), ours),
        **{n: type(kinds[n]).__name__ for n in ("linear_proj", "rotary_pos_emb")},
    )


def adam_signatures() -> Facts:
    """Returns, of FusedAdam's methods, (name, whether it has a default) of each parameter."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    methods = ("initialize_state", "get_unscaled_state", "set_scaled_state", "step", "__init__")
    return {
        method: [
            (p.name, p.default is not p.empty)
            for p in inspect.signature(getattr(FusedAdam, method)).parameters.values()
        ]
        for method in methods
    }


def names() -> Facts:
    """Returns the global names that functions of some modules of megatron-core use and the modules
    do not have, with no patches but those that GPUs get."""
    torch.cuda.is_available = lambda: True
    import megarl.parallel.mcore as mcore

    torch.cuda.is_available = lambda: False
    from tests.te.globals_used import missing

    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import moe_utils

    modules = (moe_utils, rope_utils, clip_grads)
    found = {m.__name__.rpartition(".")[2]: missing(m) for m in modules}
    alone, x = mock.Mock(**{"size.return_value": 1}), torch.zeros(1)
    skipped = [
        getattr(param_and_grad_buffer, name)(x, x, group=alone) is None
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func")
    ]
    return dict(
        on_cuda=mcore.comm_backend() == "nccl", te=HAVE_TE, missing=found, skipped_alone=skipped
    )


def big() -> Facts:
    """Builds the public configs: a few ranks of hundreds, both kinds of layers. And returns who
    sends to whom in a sync."""
    from megarl.models import build
    from megarl.models.hf_config import parse_hf_config

    pretend_gpu()
    build.build_piece_table = cache(build.build_piece_table)  # type: ignore[assignment]
    found: Facts = {}
    for name, layout in BIG.items():
        raw = json.loads(Path(f"configs/models/{name}.json").read_text(encoding="utf-8"))
        model = parse_hf_config(raw)
        ranks: Facts = {}
        for rank in BIG_RANKS(layout):
            for spec in ("te", "sdpa"):
                with built_model(model, layout, rank, spec) as (made, groups):
                    ranks[f"{rank} {spec}"] = summary(made, groups)
                    table = made.table
        found[name] = dict(ranks=ranks, sources=sources(table))
    return found


def summary(made: Any, groups: Any) -> Facts:
    """Returns what of a large rank's facts is not as the piece table has it."""
    facts = describe(made, groups)
    table, params = facts["table"], facts["params"]
    wrong = {
        name: [params.get(name), table.get(name)]
        for name in params.keys() | table.keys()
        if name not in table
        or name not in params
        or params[name]["shape"] != table[name]["shape"]
        or (name not in facts["buffers"]
            and bool(params[name]["tensor_model_parallel"]) is table[name]["replicated"])
    }  # fmt: skip
    return dict(
        wrong=dict(list(wrong.items())[:5]),
        params=len(params),
        keys=sorted({key for key, *_ in facts["stored"]}),
    )


def sources(table: Any) -> int:
    """Returns how many ranks send to rank 0 in a whole sync."""
    from megarl.transfer.gather import BucketGatherer
    from megarl.weight_sync.plan import plan_sync

    plan = plan_sync(table, torch.bfloat16, 1 << 30)
    gatherer = BucketGatherer(table, 0, {}, plan.buckets, device="meta", staging=1 << 27)
    return len({*gatherer.plan.senders.flatten().tolist()} - {-1, 0})


if __name__ == "__main__":
    main(*sys.argv[1:])
