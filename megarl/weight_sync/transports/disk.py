"""Writes weights to a Hugging Face directory for each version on shared storage."""

from __future__ import annotations

import re
import shutil
from abc import abstractmethod
from pathlib import Path

from megarl.api.records import WeightUpdateMeta
from megarl.ckpt.hf import save_hf
from megarl.ckpt.safetensors import SafetensorsDir
from megarl.config.rollout import TRANSPORTS
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Deadline, Servers
from megarl.weight_sync.transports import Transport, WeightSource
from megarl.weight_sync.verify import Verifier

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

        def load() -> None:
            if self.source.rank != 0:
                return
            servers = Servers(meta.addresses)
            with phases.time("load_wait"):
                self.load(servers, target, meta, deadline)
            if meta.verify != "off" and not self.requirements.adapters:
                with phases.time("verify"):
                    verified = verify_files(servers, target, meta, deadline)
                    phases.metrics["verified"] = float(verified)
            nbytes = sum(f.stat().st_size for f in target.glob("*.safetensors"))
            phases.metrics["bytes"] = float(nbytes)
            remove_other_versions(target)

        self.source.agreement.together(load)


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


def verify_files(
    servers: Servers, directory: Path, meta: WeightUpdateMeta, deadline: Deadline
) -> bool:
    """Returns whether every server was compared with the files (see `Verifier.check`). Raises
    RuntimeError naming the tensors that differ."""
    with SafetensorsDir(directory) as files:
        names = list(files.names())
        verifier = Verifier.of(meta, servers.info(deadline), names)
        assert verifier is not None, "who wants no verification does not call this"
        for name in names if verifier.names is None else verifier.names:
            box = tuple(slice(0, n) for n in files.stored(name).shape)
            verifier.add([(name, files.read(name, box))])
    return verifier.check(deadline)


def remove_other_versions(keep: Path) -> None:
    """Deletes the other v* directories beside `keep`, which every server has loaded."""
    for other in keep.parent.iterdir():
        if other != keep and other.is_dir() and _VERSION.fullmatch(other.name):
            shutil.rmtree(other)
