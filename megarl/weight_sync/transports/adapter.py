"""Sends the adapters alone of a model trained with LoRA: a PEFT directory for each version on
shared storage.

Servers keep the model they started from and compute with base + adapter, as SGLang does between
/load_lora_adapter and /unload_lora_adapter; requests name the adapter (`lora_path`). A version is
loaded under a name of its own, and earlier ones are unloaded, also those that an earlier run left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.api.records import ADAPTER_PREFIX, WeightUpdateMeta
from megarl.ckpt.peft import save_peft
from megarl.config.rollout import TRANSPORTS
from megarl.weight_sync.servers import Deadline, Servers, raise_if_lost, wait_for
from megarl.weight_sync.transports.disk import DirectoryTransport


class AdapterTransport(DirectoryTransport):
    """Writes a PEFT directory for every version, which servers load beside their model."""

    requirements = TRANSPORTS["adapter"].requirements

    def save(self, target: Path) -> None:
        """Writes the PEFT directory. Collective. Raises ValueError without adapters."""
        s = self.source
        if s.adapters is None:
            raise ValueError(
                "WeightUpdateMeta.type='adapter' sends LoRA adapters and this engine has none: set "
                "its `lora`, or use type='distributed'"
            )
        save_peft(target, s.adapters, s.rank, base_model_path=s.base_model_path, group=s.group)

    def load(
        self, servers: Servers, target: Path, meta: WeightUpdateMeta, deadline: Deadline
    ) -> None:
        """Has the servers load the adapter, then name its version, then unload megarl's other
        adapters. On rank 0. Raises RuntimeError where a server fails, ServersLost where some are
        lost."""
        name, unload = meta.adapter, "/unload_lora_adapter"
        # an adapter of that name may be there, from an unfinished update or an earlier run
        again = servers.start(unload, {"lora_name": name}, deadline.left)
        raise_if_lost(wait_for(again, deadline), unload)
        body = {"lora_name": name, "lora_path": str(target)}
        answers = servers.call("/load_lora_adapter", body, deadline)
        version = {"new_version": str(meta.number), "abort_all_requests": False}
        servers.call("/update_weight_version", version, deadline)
        for server, answer in answers.items():
            for stale in _ours(answer) - {name}:
                Servers([server]).call(unload, {"lora_name": stale}, deadline)


def _ours(answer: Any) -> set[str]:
    """Returns the names of the adapters that a server has and that megarl has loaded."""
    loaded = answer.get("loaded_adapters") if isinstance(answer, dict) else None
    return {name for name in loaded or () if name.startswith(ADAPTER_PREFIX)}
