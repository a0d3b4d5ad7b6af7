"""Configures evaluation by generation in a run that trains without servers."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import arg
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.weight_sync import WeightSyncConfig


@dataclass(kw_only=True)
class GenerationConfig:
    """Configures servers that answer the validation sets of a supervised run.

    Rank 0 starts them on its machine, from the trained model's directory, unless rollout.addresses
    names running ones; every evaluation brings them the weights first."""

    loss: bool = arg(True, help="evaluate by the loss on the validation sets' own answers, too")
    gconfig: GenerationHyperparameters = arg(
        factory=lambda: GenerationHyperparameters(greedy=True), help="sampling during evaluation"
    )
    rollout: RolloutConfig = arg(factory=RolloutConfig, help="generation client")
    server: ServerConfig = arg(factory=ServerConfig, help="servers that rank 0 starts")
    weight_sync: WeightSyncConfig = arg(
        factory=lambda: WeightSyncConfig(type="disk"), help="weights to the servers"
    )
