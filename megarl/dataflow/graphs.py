"""Writes PPO, GRPO, ReMax and SFT as graphs of model function calls, and a recipe as its own.

A call's verb is its role's own (megarl.algos); the generating call's is the rollout session's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import networkx as nx

from megarl.algos.batches import reason_for_pass
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
from megarl.dataflow.graph import (
    COMPUTE,
    GENERATE,
    INFERENCE,
    PROMPTS,
    TRAIN_STEP,
    Call,
    allocate,
    build_graph,
    calls_of,
)
from megarl.dataflow.mesh import Allocation, Devices

TOKENS = ("input_ids", "loss_mask")
ANSWERS = (*TOKENS, "logprobs", "versions")


def ppo(
    *, reward_model: bool = True, reference: bool = True, recompute: bool = False
) -> nx.DiGraph:
    """Returns PPO with a critic: two models are trained, and two more are read.

    reward_model: else the workflow brings the rewards. reference: the KL to it is part of the
    rewards. recompute: the ratio starts from the trainer's own logprobs.
    """
    old = "prox_logp" if recompute else "logprobs"
    kl = (old, "ref_logp") if reference else ()
    earned = ("loss_mask", "rewards", "values", "last_value", *kl)
    made = ANSWERS if reward_model else (*ANSWERS, "rewards")
    judged, trained = ("values", "last_value"), (*TOKENS, "values", "returns")
    return build_graph(
        [
            Call("generate", "actor", GENERATE, PROMPTS, made, verb="prepare_batch"),
            *_scores(reward_model, reference, recompute),
            Call("values", "critic", INFERENCE, ("input_ids",), judged, verb="compute_values"),
            Call("gae", "actor", COMPUTE, earned, ("advantages", "returns"), verb="compute_gae"),
            Call("train_critic", "critic", TRAIN_STEP, trained, verb="ppo_update"),
            _update((old, "advantages")),
        ]
    )


def grpo(
    *, reward_model: bool = False, reference: bool = True, recompute: bool = False
) -> nx.DiGraph:
    """Returns GRPO: the answers to a prompt are compared with each other, and no critic is needed.
    The arguments are those of `ppo`; the KL to the reference is part of the loss."""
    return _comparison("group_ids", reward_model, reference, recompute)


def remax(*, reference: bool = False, recompute: bool = False) -> nx.DiGraph:
    """Returns ReMax: an answer's reward is compared with that of the greedy answer to the same
    prompt, `baseline`, which the workflow has written beside the samples."""
    return _comparison("baseline", False, reference, recompute)


def _comparison(by: str, reward_model: bool, reference: bool, recompute: bool) -> nx.DiGraph:
    """Returns a step without a critic; `by` is the key that answers are compared by."""
    old = "prox_logp" if recompute else "logprobs"
    kl = ("ref_logp",) if reference else ()
    made = (*ANSWERS, by) if reward_model else (*ANSWERS, by, "rewards")
    read, verb = ("loss_mask", "rewards", by), "compute_advantages"
    return build_graph(
        [
            Call("generate", "actor", GENERATE, PROMPTS, made, verb="prepare_batch"),
            *_scores(reward_model, reference, recompute),
            Call("advantages", "actor", COMPUTE, read, ("advantages",), verb=verb),
            _update((old, "advantages", *kl)),
        ]
    )


def sft() -> nx.DiGraph:
    """Returns supervised fine-tuning, a single train step; pre-training and reward modelling have
    the same shape."""
    return build_graph([Call("train", "model", TRAIN_STEP, TOKENS, verb="train")], given=TOKENS)


GRAPHS: dict[str, Callable[..., nx.DiGraph]] = {f.__name__: f for f in (ppo, grpo, remax, sft)}


def _scores(reward_model: bool, reference: bool, recompute: bool) -> list[Call]:
    """Returns the calls that read finished answers and train nothing."""

    def reads(name: str, model: str, verb: str, key: str) -> Call:
        into = "" if key == "prox_logp" else key
        return Call(name, model, INFERENCE, ("input_ids",), (key,), verb=verb, into=into)

    return [
        *([reads("reward", "reward_model", "compute_rewards", "rewards")] if reward_model else []),
        *([reads("ref", "ref", "compute_logp", "ref_logp")] if reference else []),
        *([reads("logp", "actor", "compute_prox_logp", "prox_logp")] if recompute else []),
    ]


def _update(inputs: tuple[str, ...]) -> Call:
    keys = dict.fromkeys((*TOKENS, "logprobs", *inputs))
    return Call("train_actor", "actor", TRAIN_STEP, tuple(keys), verb="ppo_update")


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
        raise ConfigError(f"recipe={cfg.recipe}: sft, rm, grpo and ppo have graphs")
    actor, judged, ref = cfg.actor, cfg.reward_model is not None, cfg.ref is not None
    specs = loss_of(actor), advantages_of(actor)
    recompute = actor.recomputes and bool(reason_for_pass(actor, *specs, kl_ctl=cfg.kl_ctl))
    if isinstance(cfg, PPOConfig):
        return ppo(reward_model=judged, reference=ref, recompute=recompute)
    if actor.advantages.type == "remax":
        return remax(reference=ref, recompute=recompute)
    return grpo(reward_model=judged, reference=ref, recompute=recompute)
