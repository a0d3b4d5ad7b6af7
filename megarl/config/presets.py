"""Names published algorithms: `algorithm: gspo` stands for the few keys that make it GSPO.

A preset is put below the keys of the file that names it, and above what that file takes from
`defaults:`; on the command line, `algorithm=gspo` is put above the file, and below the other
overrides. docs/algorithms.md has the paper and the formula of each. A preset sets ratio, surrogate,
advantages and the mean, all of them; KL, corrections and sampling only where they are its point;
never learning rate, batch or lengths, which belong to the task.
"""

from __future__ import annotations

import copy
from typing import Any

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
        adv_norm="group_mean",
        loss_agg="sequence-sum",
        loss_agg_length="${gconfig.max_new_tokens}",
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
    "clip_cov": _actor(surrogate="clip_cov", eps_clip=1.0, eps_clip_higher=1.0),
    "kl_cov": _actor(surrogate="kl_cov"),
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
