"""Writes weights to a Hugging Face directory for each version on shared storage."""

from __future__ import annotations

import re
import shutil
from abc import abstractmethod
from pathlib import Path

from megarl.api.records import WeightUpdateMeta
from megarl.ckpt.hf import save_hf
from megarl.config.rollout import TRANSPORTS
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Deadline, ServerInfo, Servers
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
