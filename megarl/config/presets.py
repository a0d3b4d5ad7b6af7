"""Holds the two keys that stand for several: `algorithm`, the name of a published one, and
`allocation_mode`, the text that gives a job's processes their GPUs.

`algorithm: gspo` stands for the few keys that make it GSPO. A preset is put below the keys of the
file that names it, and above what that file takes from `defaults:`; on the command line,
`algorithm=gspo` is put above the file, and below the other overrides. docs/algorithms.md has the
paper and the formula of each. A preset sets ratio, surrogate, advantages and the mean, all of them;
KL, corrections and sampling only where they are its point; never learning rate, batch or lengths,
which belong to the task.

    sglang.d4t2p1+megatron.d2t2p2c1e1    4 servers of 2 GPUs each, beside 8 trainer processes
    sglang:d4t2|megatron:d2t2p2          the same with servers on the trainers' GPUs
    megatron.d2t2                        trainers alone
    sglang.d12p1t1+d4p1t1                trainers without a backend are megatron's

A part is a backend and its degrees, in any order: d (data), t (tensor), p (pipeline), c (context)
and e (expert). A degree that is left out is 1, but for e, which is then the configuration's.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.errors import ConfigError

Tree = dict[str, Any]


# what every preset says, so that nothing of another algorithm in a file stays beside it
_BASE: Tree = {
    "loss": "policy",
    "ratio": "token",
    "surrogate": "clip",
    "eps_clip": 0.2,
    "eps_clip_higher": None,
    "c_clip": None,
    "advantages": "group",
    "adv_norm": "group",
    "loss_agg": "token-mean",
    "loss_agg_length": 1.0,
}


CORRECTION: Tree = {  # every option, so that none of one below in a file stays
    "weight": "token",
    "weight_cap": None,
    "mask": "none",
    "mask_low": 0.0,
    "mask_high": None,
    "veto": 0.0,
}


_PARTS = "${oc.select:train_dataset.reward.options.parts,null}"


def _actor(**keys: Any) -> Tree:
    return {"actor": _BASE | keys}


def _corrected(**keys: Any) -> Tree:
    return _actor(correction=CORRECTION | keys)


def _decoupled(**keys: Any) -> Tree:
    """In AReaL's keys, as a file may set one of them."""
    return _actor(correction=None, use_decoupled_loss=True, behav_imp_weight_cap=5.0, **keys)


PRESETS: dict[str, Tree] = {
    # ratio and surrogate
    "grpo": _actor(loss_agg="sequence-mean", kl_coef=0.04, kl_estimator="k3") | {"ref": {}},
    "dr_grpo": _actor(
        adv_norm="group_mean", loss_agg="sequence-sum", loss_agg_length="${gconfig.max_new_tokens}"
    ),
    "dapo": _actor(eps_clip_higher=0.28, dynamic_sampling=True),
    "gspo": _actor(
        ratio="sequence", loss_agg="sequence-mean", eps_clip=3.0e-4, eps_clip_higher=4.0e-4
    ),
    "gspo_token": _actor(
        ratio="sequence-token", loss_agg="sequence-mean", eps_clip=3.0e-4, eps_clip_higher=4.0e-4
    ),
    "gmpo": _actor(surrogate="gmpo", loss_agg="sequence-mean", eps_clip=0.4),
    "cispo": _actor(surrogate="cispo", eps_clip=1.0, eps_clip_higher=4.0),
    "sapo": _actor(surrogate="sapo", loss_agg="sequence-mean"),
    "topr": _actor(surrogate="topr", adv_norm="group_mean", loss_agg="sequence-sum"),
    # advantages
    "rloo": _actor(advantages="rloo", loss_agg="sequence-sum"),
    "opo": _actor(advantages="opo", loss_agg="sequence-sum", ppo_n_minibatches=1),
    "remax": _actor(advantages="remax", loss_agg="sequence-sum")
    | {"rollout": {"workflow": {"options": {"greedy_baseline": True}}}},
    "reinforce_pp": _actor(advantages="reinforce_pp"),
    "reinforce_pp_baseline": _actor(
        advantages={"type": "reinforce_pp", "options": {"baseline": "group"}}
    ),
    "gdpo": _actor(advantages={"type": "gdpo", "options": {"parts": _PARTS}}),
    "lite_ppo": _actor(adv_norm="group_batch"),
    "gpg": _actor(advantages="gpg", surrogate="log_likelihood"),
    "asymre": _actor(advantages="asymre", surrogate="log_likelihood", loss_agg="sequence-sum"),
    "pass_at_k": _actor(advantages={"type": "pass_at_k", "options": {"k": 4}})
    | {"rollout": {"min_rollouts": 4}},
    "max_at_k": _actor(advantages="max_at_k"),
    # corrections
    "decoupled": _decoupled(),
    "a3po": _decoupled(recompute_logprob="interpolate"),
    "tis": _corrected(weight="token", weight_cap=2.0),
    "icepop": _corrected(weight="token", mask="token", mask_low=0.5, mask_high=5.0),
    "geo_mask": _corrected(
        weight="token",
        weight_cap=2.0,
        mask="geometric",
        mask_low=0.99,
        mask_high=1.001,
        veto=1.0e-4,
    ),
}
ALGORITHMS = ("", *PRESETS)


def below(tree: Tree) -> Tree:
    """Returns a copy of the preset that a file's own keys name, an empty tree where they name none,
    or none that there is (the choice of `algorithm` is checked with all others)."""
    name = tree.get("algorithm")
    return copy.deepcopy(PRESETS.get(name, {})) if isinstance(name, str) else {}


# servers have no stages, so that their p is 1; their d is their number
_TEXT = re.compile(
    r"(?:(?P<backend>sglang|embedded)[.:](?P<servers>(?:[dt][1-9]\d*|p1(?!\d))+)(?P<sign>[+|]))?"
    r"(?:megatron[.:])?(?P<trainers>(?:[dtpce][1-9]\d*)+)"
)
_FORM = (
    "write it as sglang.d4t2+megatron.d2t2p2, with | where both share GPUs, or megatron.d2: "
    "servers (sglang, embedded) have the degrees d and t, trainers d, t, p, c and e, each from 1 "
    "and once"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Gives one side of an allocation: `degrees` holds those that the text names."""

    backend: str
    degrees: Mapping[str, int]

    def degree(self, letter: str) -> int:
        """Returns the degree of a letter, 1 where the text leaves it out."""
        return self.degrees.get(letter, 1)

    @property
    def gpus(self) -> int:
        """Returns how many GPUs (on a CPU: processes) the part takes."""
        return math.prod(self.degree(letter) for letter in "dtpc")


@dataclass(frozen=True, kw_only=True)
class AllocationMode:
    """Says which GPUs servers and trainers take; `from_str` reads it. colocated: the servers are on
    the trainers' GPUs."""

    trainers: Part
    servers: Part | None = None
    colocated: bool = False

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Returns what `allocation_mode` says. Raises ConfigError that shows its form."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"allocation_mode={text}: {_FORM}")
        backend = match["backend"]
        return cls(
            trainers=_part("megatron", match["trainers"], text),
            servers=_part(backend, match["servers"], text) if backend else None,
            colocated=match["sign"] == "|",
        )

    def keys(self, role: str) -> dict[str, int | str]:
        """Returns the configuration keys that it decides, with their values; `role` is the section
        of the trained model."""
        letters = {"t": "tp", "p": "pp", "c": "cp"}
        if "e" in self.trainers.degrees:
            letters["e"] = "ep"
        keys: dict[str, int | str] = {
            f"{role}.parallel.{name}": self.trainers.degree(letter)
            for letter, name in letters.items()
        }
        if self.servers is not None:
            keys["server.type"] = self.servers.backend
            keys["server.count"] = self.servers.degree("d")
            keys["server.tp"] = self.servers.degree("t")
        return keys


def _part(backend: str, degrees: str, text: str) -> Part:
    numbers = re.findall(r"([a-z])(\d+)", degrees)
    if len(dict(numbers)) < len(numbers):
        raise ConfigError(f"allocation_mode={text}: {degrees} gives a degree twice; {_FORM}")
    return Part(backend=backend, degrees={letter: int(number) for letter, number in numbers})
