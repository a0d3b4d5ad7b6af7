"""Configures one training engine: model, precision, micro-batching, optimizer, layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megarl.config.base import (
    FRACTION,
    FRACTION_ABOVE_ZERO,
    NOT_NEGATIVE,
    OFF_AT_ZERO,
    POSITIVE,
    AnswersForeignKeys,
    Bounds,
    Choices,
    Options,
    OptionsOf,
    free,
)

Degree = Annotated[int, POSITIVE]

TEXT = "text_config"  # of a config.json: the language model's keys


@dataclass(kw_only=True)
class ParallelConfig:
    """Gives the degrees of parallelism of one engine, which together are its layout."""

    tp: Degree = 1
    """tensor-parallel degree"""
    pp: Degree = 1
    """pipeline-parallel degree"""
    vpp: Degree = 1
    """virtual (interleaved) pipeline chunks per stage; 1 is plain 1F1B"""
    pipeline_split: list[Annotated[int, POSITIVE]] | None = None
    """layers of every pipeline chunk in order, pp*vpp numbers; null splits evenly"""
    cp: Degree = 1
    """context-parallel degree: each rank holds 1/cp of every sequence"""
    ep: Degree = 1
    """expert-parallel degree (MoE)"""
    etp: Degree = 1
    """tensor-parallel degree inside an expert (MoE)"""
    sequence_parallel: bool = False
    """shard activations of norms and residuals over tp (needs tp > 1)"""

    @property
    def dense_ranks(self) -> int:
        """The ranks that hold one copy of the dense weights, times cp: dp divides the rest."""
        return self.tp * self.pp * self.cp

    @property
    def expert_ranks(self) -> int:
        """The ranks that hold one copy of the experts."""
        return self.etp * self.ep * self.pp


@dataclass(kw_only=True)
class OptimizerConfig:
    """Configures Adam, its learning-rate schedule, and where the optimizer's state lies."""

    lr: Annotated[float, FRACTION_ABOVE_ZERO] = 1e-5
    """peak learning rate"""
    min_lr_ratio: Annotated[float, FRACTION] = 0.0
    """final learning rate as a fraction of lr"""
    weight_decay: Annotated[float, OFF_AT_ZERO] = 0.01
    """decoupled weight decay (norms and biases are exempt)"""
    beta1: Annotated[float, Bounds(ge=0, lt=1)] = 0.9
    """Adam beta1"""
    beta2: Annotated[float, Bounds(ge=0, lt=1)] = 0.95
    """Adam beta2"""
    eps: Annotated[float, FRACTION_ABOVE_ZERO] = 1e-8
    """Adam epsilon"""
    lr_scheduler_type: Annotated[str, Choices("constant", "linear", "cosine")] = "constant"
    """schedule after warm-up"""
    warmup_steps: Annotated[int | float, NOT_NEGATIVE] = 0.001
    """steps of linear warm-up; below 1 the fraction of all steps"""
    gradient_clipping: Annotated[float, OFF_AT_ZERO] = 1.0
    """global gradient norm bound; 0 turns clipping off"""
    spike_norm: Annotated[float, POSITIVE] | None = None
    """largest gradient norm before clipping; a larger one is treated as self_check.on_nonfinite
    says, and its batch is saved; null is no bound"""
    distributed: bool = True
    """shard optimizer state over dp (ZeRO-1)"""
    overlap_grad_reduce: bool = False
    """reduce gradients over dp bucket by bucket during backward"""
    overlap_param_gather: bool = False
    """gather the updated weights over dp during the next forward pass; needs distributed and
    overlap_grad_reduce"""
    options: Options = free()
    """more fields of megatron-core's OptimizerConfig by name: use_precision_aware_optimizer
    (Transformer Engine's FusedAdam keeps main weights and moments in exp_avg_dtype,
    exp_avg_sq_dtype, main_params_dtype; needs distributed), optimizer_cpu_offload (keep and update
    them on the CPU, of a part of the weights with optimizer_offload_fraction; needs distributed and
    dtype=bfloat16), initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis (float16),
    ..."""


@dataclass(kw_only=True)
class MicroBatchSpec:
    """Bounds the tokens of a micro-batch."""

    max_tokens_per_mb: Annotated[int, POSITIVE] = 16384
    """token budget of one micro-batch on one device (cp devices hold cp times as many); a longer
    single sequence gets its own"""
    forward_max_tokens_per_mb: Annotated[int, POSITIVE] | None = None
    """the same for passes without backward, which keep no activations and may take more; null is
    max_tokens_per_mb"""
    share_prefixes: Annotated[str, Choices("auto", "true", "false")] = "auto"
    """compute once what sequences of a micro-batch share: the prompt of a group, the history of an
    episode's turns; shared tokens count once in the budget. auto: where layout and model allow it,
    and the tokens of a batch make it pay"""

    def __post_init__(self) -> None:
        self.share_prefixes = str(self.share_prefixes).lower()  # scripts may give a boolean


ALL_LINEAR = "all-linear"


@dataclass(kw_only=True)
class LoRAConfig:
    """Configures low-rank adapters in place of training all weights, as PEFT has them. There is no
    dropout."""

    r: Annotated[int, POSITIVE] = 16
    """rank of the adapters"""
    alpha: Annotated[float, POSITIVE] = 32.0
    """B A is scaled by alpha / r"""
    use_rslora: bool = False
    """scale by alpha / sqrt(r) instead"""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """HF names of the linear layers that get adapters (q_proj, gate_proj, ...); [all-linear] is
    all of attention, MLPs and experts"""
    adapter_path: str = ""
    """PEFT directory with adapters to start from; empty starts as PEFT does (B = 0)"""
    save: Annotated[str, Choices("merged", "adapter")] = "merged"
    """what saver writes: whole models with the adapters merged in, or PEFT directories"""


@dataclass(kw_only=True)
class TrainEngineConfig(AnswersForeignKeys):
    """Configures one training engine; without an optimizer it only computes forward."""

    path: str = ""
    """HF model directory (config.json, *.safetensors, tokenizer) or hub name"""
    override_config: Options = free()
    """keys of the model's config.json with another value here, such as rope_theta; servers that the
    launcher starts get the actor's"""
    head: Annotated[str, Choices("lm", "value")] = "lm"
    """output for each token: logits (lm), or one value (critic, reward model)"""
    init_from_scratch: bool = False
    """random weights by `seed` instead of the HF ones"""
    dtype: Annotated[str, Choices("auto", "float32", "bfloat16", "float16")] = "auto"
    """compute dtype; auto is bfloat16 on GPU, float32 on CPU"""
    fp8: Annotated[str, Choices("none", "delayed", "tensorwise", "blockwise", "mxfp8")] = "none"
    """recipe of Transformer Engine's FP8 matrix products in the layers; weights stay in dtype,
    which must be bfloat16"""
    offload: bool = False
    """a frozen model's weights stay in host memory between its passes"""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """parallel layout"""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """micro-batching"""
    optimizer: OptimizerConfig | None = None
    """optimizer; null builds a forward-only engine"""
    recompute_granularity: Annotated[str, Choices("none", "selective", "full")] = "none"
    """backward recomputes activations instead of keeping them: selective: of
    options.recompute_modules; full: of whole layers"""
    lm_head_topk: Annotated[int, POSITIVE] = 8
    """tokens in the outputs topk_logprobs and topk_ids; of a teacher (there 64) those by which the
    student is compared: all others count as one, the whole vocabulary makes it exact"""
    attention: Annotated[str, Choices("auto", "te", "sdpa")] = "auto"
    """core attention; auto is Transformer Engine on GPU where installed, else torch SDPA"""
    router_replay: Annotated[str, Choices("off", "trainer", "rollout", true="trainer")] = "off"
    """which experts the update's tokens go to: trainer (or true): those of recompute_logprob's
    pass; rollout: those of the server's routers, in both passes (R3); off: the update's routers
    decide"""
    lora: LoRAConfig | None = None
    """train low-rank adapters on frozen weights; null trains the weights"""
    options: Annotated[Options, OptionsOf("megarl.models.options:EngineOptions")] = free()
    """more of the engine (docs/engine.md): recompute_method (uniform, block), recompute_num_layers,
    recompute_modules (core_attn, layernorm, mlp, moe, moe_act, shared_experts, mla_up_proj),
    offload_activations, cp_comm_type (auto, p2p, all_gather, a2a), lm_head_chunk_tokens,
    lm_head_keep_mb, value_head_init (zero, random); of mixtures of experts moe_aux_loss_coeff,
    moe_z_loss_coeff, moe_router_bias_update_rate, moe_token_dispatcher_type (alltoall, flex),
    moe_shared_expert_overlap, load_per_layer"""

    @property
    def replays(self) -> bool:
        """Returns whether updates repeat routes that their batch brings."""
        return self.router_replay != "off"

    @property
    def value_head_bias(self) -> bool:
        """Returns whether the value head that a language model gets has a bias, as HF's
        ForTokenClassification."""
        return True


def overridden(raw: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with other values for the keys in `override`; of a text_config for the
    keys within."""
    merged = {**raw, **override}
    if TEXT in raw and TEXT in override:
        merged[TEXT] = {**raw[TEXT], **override[TEXT]}
    return merged
