"""The adapter transport: of a model trained with LoRA the adapters alone, a PEFT directory for each
version on shared storage.

Servers keep the model they started from and compute with base + adapter, as SGLang does between
/load_lora_adapter and /unload_lora_adapter; requests name the adapter (`lora_path`). A version is
loaded under a name of its own and those before it are unloaded, also such as an earlier run left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.api.records import ADAPTER_PREFIX, WeightUpdateMeta
from megarl.ckpt.peft import WEIGHTS, save_peft
from megarl.models.adapters import Adapters
from megarl.parallel.layout import Layout
from megarl.weight_sync.agreement import Agreement, Deadline
from megarl.weight_sync.disk import remove_other_versions
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Servers, raise_if_lost, wait_for


class AdapterTransport:
    """Collective over the engine's ranks. Rank 0 writes and calls servers."""

    def __init__(
        self,
        adapters: Adapters | None,
        layout: Layout,
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        base_model_path: str,
        agreement: Agreement,
    ) -> None:
        self.adapters, self.layout, self.rank, self.group = adapters, layout, rank, group
        self.base_model_path, self.agreement = base_model_path, agreement

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        if self.adapters is None:
            raise ValueError(
                "WeightUpdateMeta.type='adapter' sends LoRA adapters and this engine has none: set "
                "its `lora`, or use type='distributed'"
            )
        assert meta.path is not None, "WeightUpdateMeta checks that"
        target = Path(meta.path).absolute() / f"v{meta.number}"
        with phases.time("save"):
            save_peft(
                target, self.adapters, self.layout, self.rank,
                base_model_path=self.base_model_path, group=self.group,
            )  # fmt: skip
        self.agreement.together(self._load, meta, target, deadline, phases)

    def _load(
        self, meta: WeightUpdateMeta, target: Path, deadline: Deadline, phases: Phases
    ) -> None:
        if self.rank != 0:
            return
        servers, name = Servers(meta.addresses), meta.adapter
        with phases.time("load_wait"):
            # of that name there may be one, from an update that was not finished or an earlier run
            again = servers.start("/unload_lora_adapter", {"lora_name": name}, deadline.left)
            raise_if_lost(wait_for(again, deadline), "/unload_lora_adapter")
            body = {"lora_name": name, "lora_path": str(target)}
            answers = servers.call("/load_lora_adapter", body, deadline)
            version = {"new_version": str(meta.number), "abort_all_requests": False}
            servers.call("/update_weight_version", version, deadline)
            for server, answer in answers.items():
                for stale in _ours(answer) - {name}:
                    Servers([server]).call("/unload_lora_adapter", {"lora_name": stale}, deadline)
        phases.metrics["bytes"] = float((target / WEIGHTS).stat().st_size)
        remove_other_versions(target)


def _ours(answer: Any) -> set[str]:
    """Names of the adapters that a server has and that megarl has loaded."""
    loaded = answer.get("loaded_adapters") if isinstance(answer, dict) else None
    return {name for name in loaded or () if name.startswith(ADAPTER_PREFIX)}
