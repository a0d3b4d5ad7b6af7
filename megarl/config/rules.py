"""Says what must hold between keys, one rule a line: what asks | what it needs | why, or the fix.

A table is for one section, whose keys it names. A condition is `key` (not null, false, 0 or empty),
`!key`, `key=a,b` (one of these), `key!=a`, or `key>n` and alike, where n is a number or another
key. Conditions joined by & hold together. A rule that needs nothing says what must not be. In the
text behind it @ stands for the section. A line that begins with a space continues the one before.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from megarl.config.base import SeamConfig
from megarl.config.schema import show

# a whole configuration: of every recipe, of those without rollouts, with rollouts, with a critic
RUN = """
saver.keep_best>0                | saver.keep_last>0 | which keeps all otherwise
recover.restarts>0               | recover.mode=auto | a checkpoint to continue from
train_dataset.curriculum!=null   | train_dataset.num_workers=0 | else rows are drawn too early
trainer.workers                  | trainer.mode=controller
profiler.start_step & profiler.ranks=[] | | traces nothing; name ranks from 0
"""
OFFLINE = """
trainer.mode=controller          | | is for recipes with rollouts; set trainer.mode=spmd
cluster.reward_pool!=null        | | this recipe computes no rewards; leave it null
train_dataset.curriculum!=null   | | goes by rewards, which this recipe has none of; leave it out
"""
RL = """
replay                           | trainer.mode=spmd | which gives the same bits
gconfig.greedy                   | gconfig.n_samples=1 | samples of a prompt would be equal
gconfig.temperature<=0 & gconfig.greedy | | training needs sampled tokens; set it above 0
actor.dynamic_sampling           | gconfig.n_samples>1
actor.dynamic_sampling           | reward_model=null | it picks groups by the rewards of the rollout
train_dataset.curriculum!=null   | reward_model=null | it goes by the rewards of the rollout
actor.kl_coef>0                  | ref | set ref.path, or ref={}
kl_ctl>0                         | ref | set ref.path, or ref={}
actor.kl_controller!=null & !actor.kl_coef & !kl_ctl |
    | adapts actor.kl_coef and kl_ctl, which are 0; set the first value of one of them
episodes.entropy                 | actor.recompute_logprob=true,auto | it comes of that pass
actor.advantages.type=gdpo       | actor.advantages.options.parts | set train_dataset.reward to
    {type: weighted, options: {parts: ...}}, or name the parts of a reward of your own here
actor.advantages.type=gdpo       | reward_model=null | whose score has no parts
server.restarts>0                | server.count>1 | the run goes on with the others meanwhile
server.count=0 & !rollout.addresses & !rollout.addresses_file |
    | name running servers in one of these, or have one started by server.count=1
server.context_length<=gconfig.max_new_tokens | | leaves no room for a prompt
server.context_length<=eval_gconfig.max_new_tokens & valid_dataset | | leaves no room for a prompt
judge & !judge.path              | | name the model that judges
judge.count=0                    | | leave judge null, and name servers in the reward's base_url
weight_sync.options.delta        | weight_sync.options.quantization=none,null
"""
CRITIC = """
algorithm                        |
    | with a critic, samples are not compared; leave it out, and set the keys of actor one by one
actor.adv_norm=group,group_mean,group_batch |
    | with a critic, samples are not compared by prompt; take batch or none
actor.advantages.type!=group     | | with a critic, advantages are GAE's; take recipe=grpo
actor.surrogate.type=gmpo,topr   |
    | takes rows of one advantage, and with a critic every token has its own; take another
"""
NO_TEACHER = """
actor.loss.type=distill          | | needs a teacher; take recipe=distill
actor.advantages.type=teacher    | | needs a teacher; take recipe=distill
"""
TEACHER_SERVERS = """
teacher.path                     | !teacher.addresses | whose servers hold the teacher
gconfig.temperature!=1 & teacher.addresses |
    | servers of teacher.addresses give logprobs at temperature 1; set it to 1, or teacher.path
"""
SFT = """
stop_at_exact_match & generation | generation.loss | it goes by the loss
generation.server.context_length<=generation.gconfig.max_new_tokens | | leaves no room for a prompt
generation & generation.server.count=0 | generation.rollout.addresses | name running servers
generation.weight_sync.type=adapter | model.lora |
    set model.lora.r, or generation.weight_sync.type=distributed
generation.weight_sync.type=adapter & generation.server.type=sglang & generation.server.count>0 |
    generation.server.options.enable_lora | SGLang has room for adapters where it is told to
generation & model.override_config |
    generation.rollout.addresses | the servers that rank 0 starts lack it; name running ones
"""
DPO = """
ref.path & preference.loss=simpo | | measures against no reference; leave it out
"""
# why servers cannot release their memory while the trainers work
TURNS = """
rollout.max_head_offpolicyness>0 |
    | servers generate while the trainers work; set it to 0, or leave server.release_memory false
rollout.kv_after_sync=keep       | | keeps KV that is released with the rest; set it to flush
rollout.addresses_file           |
    | its servers come and go, and may be others' as well; leave server.release_memory false
"""
KV = """
rollout.kv_after_sync=flush & weight_sync.pause_mode=in_place |
    | requests hold their KV through the update; use pause_mode=abort, or kv_after_sync=keep
rollout.kv_after_sync=keep & weight_sync.pause_mode=retract |
    | takes KV away from requests in flight; use weight_sync.pause_mode=in_place or abort
rollout.kv_after_sync=keep & weight_sync.pause_mode=abort,drain
    & server.type=embedded & server.count>0 |
    | such a server has no cache beyond a request; use pause_mode=in_place, or kv_after_sync=flush
"""
SYNC = """
weight_sync.options.delta & weight_sync.options.sharded=false,off |
    | changes go by slices alone; leave sharded out, or delta
weight_sync.options.delta & weight_sync.options.sharded!=true,on
    & server.type=sglang & server.count>0 |
    | changes go by slices alone, which over NCCL sharded=true asks for; use sharded=true
weight_sync.options.quantization=fp8_block & server.type=sglang & server.count>0 |
    server.path | the model's FP8 checkpoint, whose layout SGLang must start with
weight_sync.options.sharded=true,on & weight_sync.options.quantization=fp8_block
    & server.type=embedded & server.count>0 |
    | such servers keep no FP8, and take it as whole tensors; leave sharded out
"""
ADAPTERS = """
weight_sync.type & actor.lora & server.type=sglang & server.count>0 | server.options.enable_lora |
    SGLang has room for adapters where it is told to; set max_lora_rank, lora_target_modules, too
weight_sync.type                 | actor.lora | set actor.lora.r, or weight_sync.type=distributed
weight_sync.type & weight_sync.pause_mode=retract,in_place |
    | requests would go on with an adapter that is unloaded; use pause_mode=abort or drain
weight_sync.type & rollout.kv_after_sync=keep |
    | servers keep KV by adapter, and each update brings a new one; use kv_after_sync=flush
"""
# sections
SERVER = """
tp>1                             | type=sglang | the embedded server is one process
dp>1                             | type=sglang | the embedded server is one process
dp>1 & nnodes>1                  | | SGLang has replicas on one node alone
dp>1 & options.enable_dp_attention | | whose parts are within tp; leave dp out, set options.dp_size
dp>1 & options.attn_dp_size      | | whose parts are within tp; leave dp out
options.dp_size                  | options.enable_dp_attention | set dp, by which GPUs are given
options.dp                       | options.enable_dp_attention | set dp, by which GPUs are given
options.data_parallel_size       | options.enable_dp_attention | set dp, by which GPUs are given
options.api_key                  |
    | everybody reads command lines; set MEGARL_JOB_TOKEN in the environment, which servers take
"""
GENERATION = """
min_new_tokens                   | max_new_tokens>=min_new_tokens
temperature<0.001                | greedy | below 0.001 sampling is argmax
temperature>0 & temperature<0.001 | | must be 0 or >= 0.001
top_k<1                          | top_k=-1 | which is all tokens
"""
DATASET = """
sampler.type & parts             | | decides the order alone; leave @parts out
sampler.type & curriculum!=null      | | decides the order alone; leave @curriculum out
size & drop_last                 | batch_size<=size | no batch is full; or set drop_last=false
"""
HELD_OUT = """
parts                            | | evaluate on each by itself; name them in valid_datasets
curriculum!=null                 | | only training draws rows; leave it out
sampler.type                     | | held-out rows are all taken; leave it out
"""
SOURCE = """
files & path                     | | set one of them
path & type=arithmetic,reasoning_gym |
    | makes its own problems and reads no file; set @type=chat or gsm8k, or leave the path out
files & type=arithmetic,reasoning_gym |
    | makes its own problems and reads no file; set @type=chat or gsm8k, or leave them out
split!=train,test & type=arithmetic,reasoning_gym | | generated rows have train and test
"""
PAIRS = """
type=chat,gsm8k,reasoning_gym    |
    | has no pairs of answers; take preference, arithmetic, or a function of yours
"""
ENGINE = """
fp8!=none                        | dtype=auto,bfloat16
fp8!=none                        | attention=auto,te | torch's layers have no FP8
options.recompute_modules        | recompute_granularity=selective
options.offload_activations      | recompute_granularity=full | else all of autograd's tensors move
options.offload_activations & options.moe_shared_expert_overlap | options.recompute_method!=block
optimizer.options.optimizer_cpu_offload | dtype=auto,bfloat16
mb_spec.share_prefixes=true      | parallel.cp=1 | a trie stays whole
mb_spec.share_prefixes=true      | fp8=none
options.moe_token_dispatcher_type=flex & parallel.etp=1 | parallel.ep>1 | take alltoall
options.moe_shared_expert_overlap & parallel.tp>1 | lora=null | adapters gather the tokens again
lora                             | !options.moe_router_bias_update_rate | its routers are frozen
"""
FROZEN = """
optimizer                        | | a frozen model has none; leave it null
lora                             | | a frozen model has none; leave it null
"""
TRAINED = """
optimizer=null                   | | training needs one; set @optimizer.lr
offload                          |
    | is for frozen models (ref, reward_model, teacher); here see
    @optimizer.options.optimizer_cpu_offload
"""
LANGUAGE_MODEL = """
head=value                       | | only a critic or a reward model has one; leave it lm
"""
NOT_ACTOR = """
router_replay!=off           | | nothing records these routes, only the actor's; leave it off
"""
LORA = """
!target_modules                  | | nothing to train; use [all-linear]
"""
PARALLEL = """
vpp>1                            | pp>1
sequence_parallel                | tp>1
pipeline_split                   | pp>1
"""
OPTIMIZER = """
overlap_param_gather             | distributed
options.use_precision_aware_optimizer | distributed
options.optimizer_cpu_offload    | distributed
overlap_param_gather             | overlap_grad_reduce
options.optimizer_cpu_offload    | !options.use_precision_aware_optimizer |
    the CPU keeps float32
"""
ACTOR = """
correction!=null                 | recompute_logprob!=false | it weighs the trainer's logprobs
advantages.options.kind & advantages.type=group | adv_norm=group,group_batch | else none divides
advantages.options.kind & advantages.options.std=none | | nothing is divided by a std; leave it out
loss_agg_length!=1               | loss_agg=sequence-sum,token-sum | it divides sums over tokens
router_replay=trainer        | recompute_logprob=true,auto | it replays that pass
c_clip & surrogate.type=cispo,sapo,gmpo,topr,unclipped,log_likelihood |
    | is the dual clip of surrogate=clip; leave it null
"""
# what is not read without something else, which is worth a warning
UNREAD = """
trainer.scheduler!=local         | trainer.mode=controller
"""
UNREAD_OF_ENGINE = """
options.cp_comm_type             | parallel.cp>1
"""
_CONDITION = re.compile(r"(!?)([\w.]+)(?:(!=|[<>]=|=|<|>)(.*))?")
_ORDER = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def rule_problems(table: str, section: Any, prefix: str = "") -> Iterator[str]:
    """Yields a line for each rule of `table` that `section` breaks; `prefix` is its name, with a
    dot."""
    for row in re.sub(r"\n +", " ", table).strip().splitlines():
        asks, needs, *why = (part.strip() for part in row.split("|"))
        conditions = [condition.strip() for condition in asks.split("&")]
        if not all(_holds(section, condition) for condition in conditions):
            continue
        if needs and _holds(section, needs):
            continue
        subject, *others = (_shown(section, condition, prefix) for condition in conditions)
        beside = f" with {' and '.join(others)}" if others else ""
        wanted = f": needs {_needs(section, needs, prefix)}" if needs else ""
        reason = f": {why[0].replace('@', prefix)}" if why else ""
        yield f"{subject}{beside}{wanted}{reason}"


def _parts(condition: str) -> tuple[str, str, str, str]:
    match = _CONDITION.fullmatch(condition)
    assert match is not None, condition
    negation, key, sign, wanted = match.groups("")
    return negation, key, sign, wanted


def _holds(section: Any, condition: str) -> bool:
    negation, key, sign, wanted = _parts(condition)
    value = _value(section, key)
    if not sign:
        return bool(value) != bool(negation)
    if sign in _ORDER:
        bound = _value(section, wanted) if wanted[0].isalpha() else float(wanted)
        return value is not None and bound is not None and _ORDER[sign](value, bound)
    text = f"{value:g}" if isinstance(value, float) else show(value)
    return (text in wanted.split(",")) == (sign == "=")


def _value(section: Any, key: str) -> Any:
    for part in key.split("."):
        section = section.get(part) if isinstance(section, dict) else getattr(section, part, None)
    return section


def _shown(section: Any, condition: str, prefix: str) -> str:
    """Returns the key of a condition with its value; of a section and of long values the key."""
    _, key, sign, wanted = _parts(condition)
    value, name = _value(section, key), prefix + key
    if isinstance(_value(section, key.removesuffix(".type")), SeamConfig):
        name = name.removesuffix(".type")
    if is_dataclass(value) or (isinstance(value, dict) and value):
        return name
    if sign in _ORDER and wanted[0].isalpha():
        return f"{name}={show(value)} {sign} {prefix}{wanted}={show(_value(section, wanted))}"
    return f"{name}={show(value)}"


def _needs(section: Any, condition: str, prefix: str) -> str:
    """Returns a condition in words, with the value that there is."""
    negation, key, sign, wanted = _parts(condition)
    value = _value(section, key)
    there = "set" if is_dataclass(value) else show(value)
    words = {"=": "=", "!=": " other than "}.get(sign, f" {sign} ")
    if sign:
        other = prefix if sign in _ORDER and wanted[0].isalpha() else ""
        text = f"{prefix}{key}{words}{other}{wanted.replace(',', ' or ')}"
    elif negation:
        text = f"no {prefix}{key}"
    else:
        text = f"{prefix}{key}" + ("=true" if isinstance(value, bool) else "")
    return f"{text} (it is {there})"
