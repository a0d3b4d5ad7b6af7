"""Makes the graph of a recipe, as its configuration has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import networkx as nx

from megarl.algos.proximal import reason_for_pass
from megarl.algos.specs import advantages_of, loss_of
from megarl.config.errors import ConfigError
from megarl.config.recipe_engines import engines, ref_is_below_adapters, trained_engines
from megarl.config.recipes import (
    BaseConfig,
    DistillConfig,
    GRPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
)
from megarl.dataflow.call import GENERATE
from megarl.dataflow.graph import allocate, build_graph, calls_of
from megarl.dataflow.graphs import grpo, ppo, remax, sft
from megarl.dataflow.mesh import Allocation, Devices


def recipe_graph(
    cfg: BaseConfig, devices: Devices, where: Mapping[str, str] | None = None
) -> nx.DiGraph:
    """Returns the graph of a recipe's step. Generation is the servers' and has no mesh.

    where: by call the text of an Allocation. Calls of a model of which it names none are on all
    devices, in the layout of the model's engine.

    Raises ConfigError for a recipe that has no graph, and for layouts that do not fit the devices;
    ValueError for names of no call, and texts of no Allocation.
    """
    places = {name: Allocation.parse(text) for name, text in (where or {}).items()}
    graph, sections = allocate(_algorithm(cfg), places, devices), engines(cfg)
    placed = {call.model for call in calls_of(graph) if call.where is not None}
    frozen = {n for n in sections if n not in trained_engines(cfg) and sections[n].offload}
    calls = []
    for call in calls_of(graph):
        if call.kind != GENERATE:
            call = replace(call, offload=call.model in frozen)
        if call.kind != GENERATE and call.model not in placed:
            shared = call.model == "ref" and ref_is_below_adapters(cfg)
            section = sections["actor" if shared else call.model]
            call = replace(call, where=Allocation(devices.all, section.parallel))
        calls.append(call)
    return build_graph(calls, given=graph.graph["given"], devices=devices)


def _algorithm(cfg: BaseConfig) -> nx.DiGraph:
    if isinstance(cfg, SFTConfig | RMConfig):
        return sft()
    if not isinstance(cfg, GRPOConfig) or isinstance(cfg, DistillConfig):
        raise ConfigError([f"recipe={cfg.recipe}: sft, rm, grpo and ppo have graphs"])
    actor, judged, ref = cfg.actor, cfg.reward_model is not None, cfg.ref is not None
    specs = loss_of(actor), advantages_of(actor)
    recompute = actor.recomputes and bool(reason_for_pass(actor, *specs, kl_ctl=cfg.kl_ctl))
    if isinstance(cfg, PPOConfig):
        return ppo(reward_model=judged, reference=ref, recompute=recompute)
    if actor.advantages.type == "remax":
        return remax(reference=ref, recompute=recompute)
    return grpo(reward_model=judged, reference=ref, recompute=recompute)
