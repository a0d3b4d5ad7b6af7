"""One training engine: model, precision, micro-batching, optimizer, parallel layout."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import arg
from megarl.config.parallel import ParallelConfig


@dataclass(kw_only=True)
class OptimizerConfig:
    type: str = arg("adam", help="optimizer", choices=("adam",))
    lr: float = arg(1e-5, help="peak learning rate")
    min_lr_ratio: float = arg(0.0, help="final learning rate as a fraction of lr")
    weight_decay: float = arg(0.01, help="decoupled weight decay (norms and biases are exempt)")
    beta1: float = arg(0.9, help="Adam beta1")
    beta2: float = arg(0.95, help="Adam beta2")
    eps: float = arg(1e-8, help="Adam epsilon")
    lr_scheduler_type: str = arg(
        "constant", help="schedule after warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps_proportion: float = arg(
        0.001, help="fraction of all steps spent warming up linearly"
    )
    gradient_clipping: float = arg(1.0, help="global gradient norm bound; 0 turns clipping off")
    distributed: bool = arg(True, help="shard optimizer state over dp (ZeRO-1)")


@dataclass(kw_only=True)
class MicroBatchSpec:
    max_tokens_per_mb: int = arg(
        16384,
        help="token budget of one micro-batch on one device (cp devices hold cp times as many); a "
        "longer single sequence gets its own",
    )


@dataclass(kw_only=True)
class MoEConfig:
    """Mixture-of-experts models. No token is ever dropped.

    The auxiliary losses are computed per micro-batch and data-parallel rank and averaged over them,
    whatever the loss is divided by: with them on, and only then, a step depends on how the batch is
    cut into micro-batches.
    """

    aux_loss_coef: float = arg(
        0.0, help="load-balancing loss, per layer and micro-batch; 0 is off, as is usual in RL"
    )
    z_loss_coef: float = arg(0.0, help="loss on the router's squared logsumexp; 0 is off")
    router_replay: bool = arg(
        False, help="updates send tokens to the experts that recompute_logprob's pass chose"
    )
    per_layer_stats: bool = arg(False, help="log every layer's load of its busiest expert")
    token_dispatcher: str = arg(
        "alltoall",
        help="how tokens reach their experts; flex (DeepEP) needs a GPU and deep_ep",
        choices=("alltoall", "flex"),
    )


@dataclass(kw_only=True)
class TrainEngineConfig:
    path: str = arg(
        "", help="HF model directory (config.json, *.safetensors, tokenizer) or hub name"
    )
    head: str = arg(
        "lm",
        help="what the model says about a token: its logits, or one value (critic, reward model)",
        choices=("lm", "value"),
    )
    value_head_init: str = arg(
        "zero",
        help="value head of a language model, which has none: all zero, or random by `seed`",
        choices=("zero", "random"),
    )
    init_from_scratch: bool = arg(False, help="random weights by `seed` instead of the HF ones")
    dtype: str = arg(
        "auto",
        help="compute dtype; auto is bfloat16 on GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    parallel: ParallelConfig = arg(factory=ParallelConfig, help="parallel layout")
    mb_spec: MicroBatchSpec = arg(factory=MicroBatchSpec, help="micro-batching")
    optimizer: OptimizerConfig | None = arg(
        None, help="optimizer; null builds a forward-only engine"
    )
    recompute_granularity: str = arg(
        "none",
        help="what backward computes again instead of keeping it: the core attention (selective) "
        "or whole layers (full)",
        choices=("none", "selective", "full"),
    )
    recompute_method: str = arg(
        "uniform",
        help="full: keep the input of every recompute_num_layers layers (uniform), or recompute "
        "only the first recompute_num_layers of a pipeline chunk (block)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int = arg(1, help="full: see recompute_method")
    lm_head_chunk_tokens: int = arg(
        4096, help="tokens per LM-head chunk; logits of one chunk are the peak memory"
    )
    attention: str = arg(
        "auto",
        help="core attention; auto is Transformer Engine on GPU where installed, else torch SDPA",
        choices=("auto", "te", "sdpa"),
    )
    moe: MoEConfig = arg(factory=MoEConfig, help="mixture-of-experts settings")
