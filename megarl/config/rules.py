"""Says what must hold between keys, one line a rule: what asks | what it needs | why.

A condition is `key` (not null, false, 0 or empty), `key=a,b` (one of these), `key!=a` or `key>n`. A
table is for one section, whose keys it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from megarl.config.schema import show

RUN = """
saver.keep_best>0                | saver.keep_last>0 | which keeps all otherwise
recover.restarts>0               | recover.mode=auto | a checkpoint to continue from
train_dataset.curriculum         | train_dataset.num_workers=0 | else rows are drawn too early
trainer.workers                  | trainer.mode=controller
"""
RL = """
gconfig.greedy                   | gconfig.n_samples=1 | samples of a prompt would be equal
actor.dynamic_sampling           | gconfig.n_samples>1
actor.dynamic_sampling           | reward_model=null | it picks groups by the rewards of the rollout
train_dataset.curriculum         | reward_model=null | it goes by the rewards of the rollout
actor.kl_coef>0                  | ref | set ref.path, or ref={}
kl_ctl>0                         | ref | set ref.path, or ref={}
server.restarts>0                | server.count>1 | the run goes on with the others meanwhile
weight_sync.delta                | weight_sync.quantization=none
rollout.max_queue                | rollout.max_concurrent_rollouts=null | which fixes what it adapts
"""
ENGINE = """
fp8!=none                        | dtype=auto,bfloat16
fp8!=none                        | attention=auto,te | torch's layers have no FP8
offload_activations              | recompute_granularity=full | else all of autograd's tensors move
optimizer.cpu_offload            | dtype=auto,bfloat16
mb_spec.share_prefixes           | parallel.cp=1
mb_spec.share_prefixes           | fp8=none
lora                             | moe.expert_bias_update_rate=0 | routers are frozen under lora
"""
PARALLEL = """
vpp>1                            | pp>1
sequence_parallel                | tp>1
pipeline_split                   | pp>1
"""
OPTIMIZER = """
overlap_param_gather             | distributed
precision_aware                  | distributed
cpu_offload                      | distributed
overlap_param_gather             | overlap_grad_reduce
cpu_offload                      | precision_aware=false | the CPU keeps float32
"""
ACTOR = """
use_decoupled_loss               | recompute_logprob!=false | it needs the proximal logprobs
correction                       | use_decoupled_loss=false | both weigh the same tokens
correction                       | recompute_logprob!=false | it weighs the trainer's logprobs
loss_agg_length!=1               | loss_agg=sequence-sum,token-sum | it divides sums over tokens
"""
# what is not read without something else, which is worth a warning
UNREAD = """
trainer.scheduler!=local         | trainer.mode=controller
"""
UNREAD_OF_ENGINE = """
parallel.cp_comm_type!=auto      | parallel.cp>1
"""
UNREAD_OF_ACTOR = """
behav_imp_weight_cap             | use_decoupled_loss
correction.mask_low              | correction.mask!=none
correction.mask_high             | correction.mask!=none
correction.weight_cap            | correction.weight!=none
"""
_CONDITION = re.compile(r"([\w.]+)(!=|=|>)?(.*)")


def rule_problems(table: str, section: Any, prefix: str = "") -> Iterator[str]:
    """Yields a line for each rule of `table` that `section` breaks; `prefix` is its name, with a
    dot."""
    for row in table.strip().splitlines():
        asks, needs, *why = (part.strip() for part in row.split("|"))
        if _holds(section, asks) and not _holds(section, needs):
            key, value = prefix + _key(asks), _value(section, _key(asks))
            said = key if is_dataclass(value) else f"{key}={show(value)}"
            other = _value(section, _key(needs))
            found = "set" if is_dataclass(other) else show(other)
            reason = f": {why[0]}" if why else ""
            yield f"{said}: needs {prefix}{_spelled(needs)} (it is {found}){reason}"


def _holds(section: Any, condition: str) -> bool:
    match = _CONDITION.fullmatch(condition)
    assert match is not None, condition
    key, sign, wanted = match.groups()
    value = _value(section, key)
    if sign is None:
        return bool(value)
    if sign == ">":
        return value is not None and value > float(wanted)
    text = f"{value:g}" if isinstance(value, float) else show(value)
    return (text in wanted.split(",")) == (sign == "=")


def _key(condition: str) -> str:
    return re.split("!=|=|>", condition)[0]


def _value(section: Any, key: str) -> Any:
    for part in key.split("."):
        section = getattr(section, part, None)
    return section


def _spelled(condition: str) -> str:
    """Returns a condition as a message has it: a key alone means that it is true, or not null."""
    if not re.search("[=>]", condition):
        return condition if condition == "ref" else f"{condition}=true"
    words = {",": " or ", ">": " > ", "!=": " other than "}
    return re.sub(",|>|!=", lambda sign: words[sign[0]], condition)
