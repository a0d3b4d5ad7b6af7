"""Writes a directory for each version on shared storage: the whole model as Hugging Face has it, or
the adapters alone of a model trained with LoRA as PEFT has them.

With adapters servers keep the model they started from and compute with base + adapter, as SGLang
does between /load_lora_adapter and /unload_lora_adapter; requests name the adapter (`lora_path`). A
version is loaded under a name of its own, and earlier ones are unloaded, also those that an earlier
run left.
"""

from __future__ import annotations

import re
import shutil
from abc import abstractmethod
from pathlib import Path
from typing import Any

from megarl.api.records import ADAPTER_PREFIX, WeightUpdateMeta
from megarl.ckpt.hf import save_hf
from megarl.ckpt.peft import save_peft
from megarl.config.rollout import TRANSPORTS
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import (
    Deadline,
    ServerInfo,
    Servers,
    raise_if_lost,
    wait_for,
)
from megarl.weight_sync.transports import Transport, WeightSource
from megarl.weight_sync.verify import Fingerprints

_VERSION = re.compile(r"v\d+")


class DirectoryTransport(Transport):
    """Writes a directory for every version, which all servers load. Rank 0 speaks to the servers,
    because every save writes there last."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self.lead = 0

    @abstractmethod
    def save(self, target: Path) -> None:
        """Writes the directory. Collective."""

    @abstractmethod
    def load(
        self, servers: Servers, target: Path, meta: WeightUpdateMeta, deadline: Deadline
    ) -> None:
        """Has the servers load the directory. On rank 0."""

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Saves the version in `meta.path`, has the servers load it, and deletes other versions
        there. Collective. Raises RuntimeError where a server fails, ServersLost where some are
        lost."""
        assert meta.path is not None, "WeightUpdateMeta checks that"
        # absolute: the servers have working directories of their own
        target = Path(meta.path).absolute() / f"v{meta.number}"
        with phases.time("save"):
            self.save(target)

        def load() -> dict[str, ServerInfo]:
            servers = Servers(meta.addresses)
            with phases.time("load_wait"):
                self.load(servers, target, meta, deadline)
            nbytes = sum(f.stat().st_size for f in target.glob("*.safetensors"))
            phases.metrics["bytes"] = float(nbytes)
            return servers.info(deadline) if compares else {}

        compares = meta.verify != "off" and not self.requirements.adapters
        info = self.source.from_rank(0, load)
        if compares:
            fingerprints = Fingerprints(self.source, 0, meta, deadline, phases)
            fingerprints.record(info, why_not="it has loaded files by itself")
            fingerprints.compare()
        self.source.from_rank(0, remove_other_versions, target)


class DiskTransport(DirectoryTransport):
    """Writes a Hugging Face directory for every version, as saving a model does."""

    requirements = TRANSPORTS["disk"].requirements

    def save(self, target: Path) -> None:
        """Writes the model's safetensors in the source's dtypes. Collective."""
        s = self.source
        save_hf(target, s.table, s.layout, s.rank, s.params, group=s.group, dtype=s.dtype)

    def load(
        self, servers: Servers, target: Path, meta: WeightUpdateMeta, deadline: Deadline
    ) -> None:
        """Has the servers load the directory as a whole model, under the version's number."""
        body = {
            "model_path": str(target),
            "weight_version": str(meta.number),
            "flush_cache": meta.flush_cache,
        }
        servers.call("/update_weights_from_disk", body, deadline)


def remove_other_versions(keep: Path) -> None:
    """Deletes the other v* directories beside `keep`, which every server has loaded."""
    for other in keep.parent.iterdir():
        if other != keep and other.is_dir() and _VERSION.fullmatch(other.name):
            shutil.rmtree(other)


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
