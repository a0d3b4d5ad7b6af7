"""The disk transport: a Hugging Face directory per version on shared storage."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from megarl.api.records import WeightUpdateMeta
from megarl.ckpt.hf import save_hf
from megarl.ckpt.safetensors_files import SafetensorsDir
from megarl.weight_sync.agreement import Deadline
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Servers
from megarl.weight_sync.transport import Transport
from megarl.weight_sync.verify import Verifier, sample

_VERSION = re.compile(r"v\d+")


class DiskTransport(Transport):
    """Collective over the engine's ranks. Rank 0 writes (every save does) and calls servers."""

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        assert meta.path is not None, "WeightUpdateMeta checks that"
        # absolute: the servers have working directories of their own
        target = Path(meta.path).absolute() / f"v{meta.number}"
        with phases.time("save"):
            save_hf(
                target, self.table, self.layout, self.rank, self.params, group=self.group,
                dtype=self.dtype if isinstance(self.dtype, torch.dtype) else None,
            )  # fmt: skip
        self.agreement.together(self._load, meta, target, deadline, phases)

    def _load(
        self, meta: WeightUpdateMeta, target: Path, deadline: Deadline, phases: Phases
    ) -> None:
        if self.rank != 0:
            return
        servers = Servers(meta.addresses)
        body = {"model_path": str(target), "weight_version": str(meta.number)}
        with phases.time("load_wait"):
            servers.call("/update_weights_from_disk", body, deadline)
        if meta.verify != "off":
            with phases.time("verify"):
                phases.metrics["verified"] = float(verify_files(servers, target, meta, deadline))
        phases.metrics["bytes"] = float(sum(f.stat().st_size for f in target.glob("*.safetensors")))
        remove_other_versions(target)


def verify_files(
    servers: Servers, directory: Path, meta: WeightUpdateMeta, deadline: Deadline
) -> bool:
    with SafetensorsDir(directory) as files:
        names = list(files.names())
        wanted = sample(names, meta.number) if meta.verify == "sample" else None
        verifier = Verifier(servers.info(deadline), wanted)
        for name in names if wanted is None else wanted:
            box = tuple(slice(0, n) for n in files.shape(name))
            verifier.add([(name, files.read(name, box))])
    return verifier.check(deadline)


def remove_other_versions(keep: Path) -> None:
    """Deletes the other v* directories beside `keep`, which every server has loaded."""
    for other in keep.parent.iterdir():
        if other != keep and other.is_dir() and _VERSION.fullmatch(other.name):
            shutil.rmtree(other)
