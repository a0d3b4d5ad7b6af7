"""Configures one training engine: model, precision, micro-batching, optimizer, layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.base import arg
from megarl.config.bounds import (
    FRACTION,
    FRACTION_ABOVE_ZERO,
    NOT_NEGATIVE,
    OFF_AT_ZERO,
    POSITIVE,
    Bounds,
)
from megarl.config.parallel import ParallelConfig


@dataclass(kw_only=True)
class OptimizerConfig:
    """Configures Adam, its learning-rate schedule, and where the optimizer's state lies."""

    type: str = arg("adam", help="optimizer", choices=("adam",))
    lr: float = arg(1e-5, bounds=FRACTION_ABOVE_ZERO, help="peak learning rate")
    min_lr_ratio: float = arg(0.0, bounds=FRACTION, help="final learning rate as a fraction of lr")
    weight_decay: float = arg(
        0.01, bounds=OFF_AT_ZERO, help="decoupled weight decay (norms and biases are exempt)"
    )
    beta1: float = arg(0.9, bounds=Bounds(ge=0, lt=1), help="Adam beta1")
    beta2: float = arg(0.95, bounds=Bounds(ge=0, lt=1), help="Adam beta2")
    eps: float = arg(1e-8, bounds=FRACTION_ABOVE_ZERO, help="Adam epsilon")
    lr_scheduler_type: str = arg(
        "constant", help="schedule after warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps_proportion: float = arg(
        0.001, bounds=FRACTION, help="fraction of all steps spent warming up linearly"
    )
    warmup_steps: int | None = arg(
        None,
        bounds=NOT_NEGATIVE,
        help="steps spent warming up linearly; null goes by warmup_steps_proportion",
    )
    gradient_clipping: float = arg(
        1.0, bounds=OFF_AT_ZERO, help="global gradient norm bound; 0 turns clipping off"
    )
    spike_norm: float | None = arg(
        None,
        bounds=POSITIVE,
        help="an update whose gradient norm before clipping is larger is not made, as one that is "
        "not finite: self_check.on_nonfinite says what follows, and its batch is saved; null makes "
        "all",
    )
    distributed: bool = arg(True, help="shard optimizer state over dp (ZeRO-1)")
    overlap_grad_reduce: bool = arg(
        False, help="reduce gradients over dp bucket by bucket while backward goes on"
    )
    overlap_param_gather: bool = arg(
        False,
        help="gather the updated weights over dp while the next forward pass goes on; needs "
        "distributed and overlap_grad_reduce",
    )
    precision_aware: bool = arg(
        False,
        help="Transformer Engine's FusedAdam keeps main weights and moments, in the dtypes below; "
        "needs distributed",
    )
    main_params_dtype: str = arg(
        "float32", help="precision_aware: main weights", choices=("float32", "float16")
    )
    exp_avg_dtype: str = arg(
        "float32", help="precision_aware: first moment", choices=("float32", "bfloat16", "float16")
    )
    exp_avg_sq_dtype: str = arg(
        "float32", help="precision_aware: second moment", choices=("float32", "bfloat16", "float16")
    )
    cpu_offload: bool = arg(
        False,
        help="keep main weights and moments on the CPU, and update there, for cpu_offload_fraction "
        "of the weights; needs distributed and dtype=bfloat16",
    )
    cpu_offload_fraction: float = arg(
        1.0, bounds=FRACTION_ABOVE_ZERO, help="cpu_offload: fraction of the weights"
    )
    initial_loss_scale: float = arg(
        2.0**16,
        bounds=POSITIVE,
        help="float16: the loss is multiplied by this before backward, at first",
    )
    min_loss_scale: float = arg(1.0, bounds=POSITIVE, help="float16: the scale never falls below")
    loss_scale_window: int = arg(
        1000,
        bounds=POSITIVE,
        help="float16: updates without an overflow after which the scale doubles",
    )
    loss_scale_hysteresis: int = arg(
        1,
        bounds=POSITIVE,
        help="float16: overflows before the scale halves, counted anew when it doubles; each skips "
        "its update",
    )


@dataclass(kw_only=True)
class MicroBatchSpec:
    """Bounds the tokens of a micro-batch."""

    max_tokens_per_mb: int = arg(
        16384,
        bounds=POSITIVE,
        help="token budget of one micro-batch on one device (cp devices hold cp times as many); a "
        "longer single sequence gets its own",
    )
    forward_max_tokens_per_mb: int | None = arg(
        None,
        bounds=POSITIVE,
        help="the same for passes without backward, which keep no activations and may take more; "
        "null is max_tokens_per_mb",
    )
    share_prefixes: bool = arg(
        False,
        help="compute a prefix that sequences of a micro-batch share once: the prompt of a group, "
        "the history of an episode's turns; its tokens then count once in the budget",
    )


@dataclass(kw_only=True)
class MoEConfig:
    """Configures mixture-of-experts models. No token is ever dropped.

    The auxiliary losses are computed per micro-batch and data-parallel rank and averaged over them,
    whatever the loss is divided by: with them on, and only then, a step depends on how the batch is
    cut into micro-batches.
    """

    aux_loss_coef: float = arg(
        0.0,
        bounds=OFF_AT_ZERO,
        help="load-balancing loss, per layer and micro-batch; 0 is off, as is usual in RL",
    )
    z_loss_coef: float = arg(
        0.0, bounds=OFF_AT_ZERO, help="loss on the router's squared logsumexp; 0 is off"
    )
    router_replay: str = arg(
        "off",
        help="sends the tokens of an update to the experts that recompute_logprob's pass chose "
        "(trainer, or true), or that pass and the update to those that the server's routers chose "
        "(rollout, R3)",
        choices=("off", "trainer", "rollout"),
        true="trainer",
    )
    expert_bias_update_rate: float = arg(
        0.0,
        bounds=OFF_AT_ZERO,
        help="step of the bias that balances loads without a loss (DeepSeek-V3); 0 leaves it be",
    )
    per_layer_stats: bool = arg(False, help="log every layer's load of its busiest expert")
    token_dispatcher: str = arg(
        "alltoall",
        help="how tokens reach their experts; flex (DeepEP) needs a GPU and deep_ep",
        choices=("alltoall", "flex"),
    )

    def __post_init__(self) -> None:
        if isinstance(self.router_replay, bool):  # as it was before there was `rollout`
            self.router_replay = "trainer" if self.router_replay else "off"

    @property
    def replays(self) -> bool:
        """Returns whether updates repeat routes that their batch brings."""
        return self.router_replay != "off"


ALL_LINEAR = "all-linear"


@dataclass(kw_only=True)
class LoRAConfig:
    """Configures low-rank adapters in place of training all weights, as PEFT has them. There is no
    dropout."""

    r: int = arg(16, bounds=POSITIVE, help="rank of the adapters")
    alpha: float = arg(32.0, bounds=POSITIVE, help="B A is scaled by alpha / r")
    use_rslora: bool = arg(False, help="scale by alpha / sqrt(r) instead")
    target_modules: list[str] = arg(
        factory=lambda: [ALL_LINEAR],
        help="HF names of the linear layers that get adapters (q_proj, gate_proj, ...); "
        "[all-linear] is all of attention, MLPs and experts",
    )
    adapter_path: str = arg(
        "", help="PEFT directory with adapters to start from; empty starts as PEFT does (B = 0)"
    )
    save: str = arg(
        "merged",
        help="what saver writes: whole models with the adapters merged in, or PEFT directories",
        choices=("merged", "adapter"),
    )


@dataclass(kw_only=True)
class TrainEngineConfig:
    """Configures one training engine; without an optimizer it only computes forward."""

    path: str = arg(
        "", help="HF model directory (config.json, *.safetensors, tokenizer) or hub name"
    )
    override_config: dict[str, Any] = arg(
        factory=dict,
        help="keys of the model's config.json that have another value here, as rope_theta; servers "
        "that the launcher starts get the actor's",
    )
    head: str = arg(
        "lm",
        help="output for each token: logits (lm), or one value (critic, reward model)",
        choices=("lm", "value"),
    )
    value_head_init: str = arg(
        "zero",
        help="value head of a language model, which has none: all zero, or random by `seed`",
        choices=("zero", "random"),
    )
    value_head_bias: bool = arg(
        True,
        help="value head of a language model, which has none: with a bias (HF's "
        "ForTokenClassification), or without (ForSequenceClassification)",
    )
    init_from_scratch: bool = arg(False, help="random weights by `seed` instead of the HF ones")
    dtype: str = arg(
        "auto",
        help="compute dtype; auto is bfloat16 on GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    fp8: str = arg(
        "none",
        help="recipe of Transformer Engine's FP8 matrix products in the layers; weights stay in "
        "dtype, which must be bfloat16",
        choices=("none", "delayed", "tensorwise", "blockwise", "mxfp8"),
    )
    offload: bool = arg(
        False, help="a frozen model's weights stay in host memory between its passes"
    )
    parallel: ParallelConfig = arg(factory=ParallelConfig, help="parallel layout")
    mb_spec: MicroBatchSpec = arg(factory=MicroBatchSpec, help="micro-batching")
    optimizer: OptimizerConfig | None = arg(
        None, help="optimizer; null builds a forward-only engine"
    )
    recompute_granularity: str = arg(
        "none",
        help="backward computes activations again instead of keeping them: those of the core "
        "attention (selective) or of whole layers (full)",
        choices=("none", "selective", "full"),
    )
    recompute_method: str = arg(
        "uniform",
        help="full: keep the input of every recompute_num_layers layers (uniform), or recompute "
        "only the first recompute_num_layers of a pipeline chunk (block)",
        choices=("uniform", "block"),
    )
    offload_activations: bool = arg(
        False,
        help="the inputs of recomputed layers wait in host memory until backward needs them; needs "
        "recompute_granularity=full",
    )
    recompute_num_layers: int = arg(1, bounds=POSITIVE, help="full: see recompute_method")
    lm_head_chunk_tokens: int = arg(
        4096,
        bounds=POSITIVE,
        help="tokens per LM-head chunk; logits of one chunk are the peak memory",
    )
    lm_head_keep_mb: int = arg(
        1024,
        bounds=Bounds(ge=0, note="0 keeps none"),
        help="keep a micro-batch's logits for backward where they take at most this many MiB, in "
        "fp32 on one device; else backward computes them again",
    )
    lm_head_topk: int = arg(
        8, bounds=POSITIVE, help="tokens in the outputs topk_logprobs and topk_ids"
    )
    attention: str = arg(
        "auto",
        help="core attention; auto is Transformer Engine on GPU where installed, else torch SDPA",
        choices=("auto", "te", "sdpa"),
    )
    moe: MoEConfig = arg(factory=MoEConfig, help="mixture-of-experts settings")
    lora: LoRAConfig | None = arg(
        None, help="train low-rank adapters on frozen weights; null trains the weights"
    )
