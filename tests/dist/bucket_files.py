"""A transport as a user writes one: in a file of its own, outside of megarl. Every bucket becomes a
file of a Hugging Face directory, which the servers then load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.api.records import WeightUpdateMeta
from megarl.models.gather import Bucket
from megarl.utils.liveness import Deadline
from megarl.weight_sync import Requirements, Transport, WeightSource
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Servers


class BucketFiles(Transport):
    requirements = Requirements(directory=True)

    def __init__(self, source: WeightSource, *, prefix: str = "bucket", fail_on: int = -1) -> None:
        super().__init__(source)
        self.prefix, self.fail_on = prefix, fail_on
        self.names: dict[str, str] = {}  # HF tensor -> file

    @classmethod
    def validate(cls, cfg: Any) -> Iterator[str]:
        if cfg.server.type != "embedded":
            yield f"server.type={cfg.server.type}: only the embedded server loads these files"

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        together = self.source.agreement.together
        plan, gatherer = self.plan_buckets(meta.bucket_bytes)
        directory = Path(str(meta.path)) / f"v{meta.number}"
        self.names = {}
        with phases.time("gather"):
            for bucket in plan.buckets:
                together(self._write, directory, bucket, gatherer.gather(bucket))
        together(self._load, directory, meta, deadline)
        phases.metrics["bytes"] = float(plan.nbytes)

    def _write(self, directory: Path, bucket: Bucket, flat: torch.Tensor | None) -> None:
        if self.source.rank == self.fail_on:
            raise OSError("no room")
        if flat is not None:
            directory.mkdir(parents=True, exist_ok=True)
            file = f"{self.prefix}-{bucket.index}.safetensors"
            save_file({n: t.clone() for n, t in bucket.views(flat)}, directory / file)
            self.names |= {m.name: file for m in bucket.members}

    def _load(self, directory: Path, meta: WeightUpdateMeta, deadline: Deadline) -> None:
        if self.source.rank == self.lead:
            index = directory / "model.safetensors.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": self.names}))
            body = {"model_path": str(directory), "weight_version": str(meta.number)}
            Servers(meta.addresses).call("/update_weights_from_disk", body, deadline)
