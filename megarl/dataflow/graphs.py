"""Writes PPO, GRPO, ReMax and SFT as graphs of model function calls.

A call's verb is its role's own (megarl.algos); the generating call's is the rollout session's.
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from megarl.dataflow.call import COMPUTE, GENERATE, INFERENCE, TRAIN_STEP, Call
from megarl.dataflow.graph import PROMPTS, build_graph

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
    old = "prox_logp" if recompute else "logprobs"
    kl = ("ref_logp",) if reference else ()
    made = (*ANSWERS, "group_ids") if reward_model else (*ANSWERS, "group_ids", "rewards")
    return build_graph(
        [
            Call("generate", "actor", GENERATE, PROMPTS, made, verb="prepare_batch"),
            *_scores(reward_model, reference, recompute),
            _advantages("group_ids"),
            _update((old, "advantages", *kl)),
        ]
    )


def remax(*, reference: bool = False, recompute: bool = False) -> nx.DiGraph:
    """Returns ReMax: an answer's reward is compared with that of the greedy answer to the same
    prompt, `baseline`, which the workflow has written beside the samples."""
    old = "prox_logp" if recompute else "logprobs"
    kl = ("ref_logp",) if reference else ()
    made = (*ANSWERS, "rewards", "baseline")
    return build_graph(
        [
            Call("generate", "actor", GENERATE, PROMPTS, made, verb="prepare_batch"),
            *_scores(False, reference, recompute),
            _advantages("baseline"),
            _update((old, "advantages", *kl)),
        ]
    )


def sft() -> nx.DiGraph:
    """Returns supervised fine-tuning, a single train step; pre-training and reward modelling have
    the same shape."""
    return build_graph([Call("train", "model", TRAIN_STEP, TOKENS, verb="train")], given=TOKENS)


GRAPHS: dict[str, Callable[..., nx.DiGraph]] = {
    "ppo": ppo,
    "grpo": grpo,
    "remax": remax,
    "sft": sft,
}


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


def _advantages(compared: str) -> Call:
    inputs = ("loss_mask", "rewards", compared)
    verb = "compute_advantages"
    return Call("advantages", "actor", COMPUTE, inputs, ("advantages",), verb=verb)


def _update(inputs: tuple[str, ...]) -> Call:
    keys = dict.fromkeys((*TOKENS, "logprobs", *inputs))
    return Call("train_actor", "actor", TRAIN_STEP, tuple(keys), verb="ppo_update")
