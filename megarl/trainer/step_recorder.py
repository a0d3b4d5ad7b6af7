"""Records what the steps of a run compute, for `megarl diff` and `megarl replay`.

Every rank makes one and makes the same calls: fingerprints are collective, rank 0 writes. Nothing
here ends a run: where the disk is full or does not follow, an error in the log says what is not
recorded, and training goes on.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from megarl.algos import Role
from megarl.algos.fields import MADE, TAUGHT
from megarl.algos.role import UpdateCheck
from megarl.algos.rows import Data
from megarl.api.batch import Batch
from megarl.api.engine import LossFn, LossWeightFn
from megarl.config.engine import ParallelConfig
from megarl.config.recipe_engines import engines
from megarl.config.recipes import GRPOConfig
from megarl.observability import fingerprints as fp
from megarl.observability.fingerprints import FingerprintFile, Tensors, phase_of
from megarl.observability.logging import get_logger
from megarl.observability.stats_tracker import record_timing
from megarl.parallel import mcore
from megarl.trainer.batch_fingerprints import field_fingerprints
from megarl.trainer.context import ProcessContext
from megarl.trainer.disk_thread import DiskThread
from megarl.trainer.recorded_batches import as_tensors, record_batch, whole
from megarl.utils.files import Fingerprint
from megarl.utils.http import Deadline
from megarl.weight_sync.verify import held_checksums

log = get_logger(__name__)

PHASES = {  # of what a step adds to its batch; other fields are of the advantages
    "prox_logp": fp.LOGP,
    "entropy": fp.LOGP,
    "routed_experts": fp.LOGP,
    "ref_logp": fp.REF,
    "values": fp.VALUES,
    "last_value": fp.VALUES,
    **dict.fromkeys(TAUGHT, fp.TEACHER),
}
MADE_BY_UPDATES = ("skipped", *MADE)
NUMBERS = ("loss", "grad_norm", "lr", "update_successful")  # of an update
LIBRARIES = ("megarl", "torch", "megatron-core", "transformers", "transformer-engine")


class StepRecorder:
    """Records fingerprints of every phase of a step, and the batches that are to be kept."""

    def __init__(self, cfg: GRPOConfig, ctx: ProcessContext, *, dataset_size: int) -> None:
        self._cfg, self._config, self._ctx = cfg, cfg.record, ctx
        self._file = FingerprintFile(ctx.run_dir)
        self._broken = False  # nothing more is written
        self._disk = DiskThread("megarl record", waiting=1)
        self._roles: Mapping[str, Role] = {}
        self._updates: Counter[str] = Counter()
        self._handed_out: Tensors = {}
        self._dataset_size = dataset_size
        self.step = 0  # the step that is made, from 1

    def watch(self, roles: Mapping[str, Role]) -> None:
        """Has every update of `roles`, by name, recorded from now on."""
        self._roles = roles
        if self._config.fingerprints:
            for name, role in roles.items():
                role.update_check = _RecordedUpdates(self, name, role.update_check)

    def begin_step(self, step: int) -> None:
        """Begins a step; `step` counts from 1."""
        first, self.step = self.step == 0, step
        self._updates.clear()
        if first and self._config.fingerprints:
            self._write(lambda: self._file.begin(step - 1, self._facts()))

    def _facts(self) -> dict[str, Any]:
        """Returns what has to be the same for bits to be the same, besides the configuration."""
        device = torch.cuda.get_device_name() if mcore.on_cuda() else "cpu"
        layouts = {name: _degrees(e.parallel) for name, e in engines(self._cfg).items()}
        found = {"world_size": self._ctx.on_rank_zero.size, "device": device, "layout": layouts}
        return found | {"threads": torch.get_num_threads(), "versions": _versions()}

    # ---- what a step says ----------------------------------------------------------------------

    def handed_out(self, batch: Batch) -> None:
        """Takes the batch of the step, before anything is computed of it. Collective."""
        with record_timing("record"):
            if self._config.fingerprints:
                self._handed_out = field_fingerprints(batch)
                self._append(fp.ROLLOUT, self._handed_out)
            keep = self._config.keep
            if keep == 0:
                return
            batch = whole(batch)
            if self._ctx.is_zero:
                about = {"step": self.step, "dataset_size": self._dataset_size}
                work = partial(record_batch, self._ctx.run_dir, as_tensors(batch), about, keep)
                self._disk.do(f"the batch of step {self.step}", work)

    def computed(self, batch: Batch) -> None:
        """Takes the batch after its updates, with all that was computed of it. Collective."""
        if not self._config.fingerprints:
            return
        with record_timing("record"):
            names = [name for name in batch if name not in MADE_BY_UPDATES]
            phases: dict[str, dict[str, Fingerprint]] = {}
            for name, found in field_fingerprints(batch, names).items():
                was = self._handed_out.get(name)
                phase = PHASES.get(name, fp.ADVANTAGES if was is None else fp.BATCH)
                if found != was:
                    phases.setdefault(phase, {})[name] = found
            for phase, tensors in phases.items():
                self._append(phase, tensors)

    def updated(self, role: str, tensors: Tensors, stats: Mapping[str, float]) -> None:
        """Takes an update: the fingerprints of what it was made of, and its metrics."""
        self._updates[role] += 1
        numbers = {n: Fingerprint.of_number(stats[n]) for n in NUMBERS if n in stats}
        self._append(phase_of(fp.UPDATE, role, self._updates[role]), {**tensors, **numbers})

    def end_step(self, addresses: list[str]) -> None:
        """Takes the weights after the step's updates, and those at the servers of `addresses` (rank
        0's). Collective."""
        config = self._config
        if not config.fingerprints:
            return
        with record_timing("record"):
            for name, role in self._roles.items():
                if tensors := role.engine.fingerprints():
                    self._append(phase_of(fp.WEIGHTS, name), tensors)
            if config.servers and self._ctx.is_zero:
                self._append_servers(addresses)

    def _append_servers(self, addresses: list[str]) -> None:
        sync = self._cfg.weight_sync
        try:
            held = held_checksums(addresses, Deadline(sync.timeout, patience=sync.server_timeout))
        except RuntimeError as e:
            log.error("step %d: the servers' weights are not recorded: %s", self.step, e)
            return
        if held:
            self._append(fp.SERVERS, _of_servers([*held.values()]))

    # ---- files ---------------------------------------------------------------------------------

    def _append(self, phase: str, tensors: Tensors) -> None:
        step = self.step
        self._write(lambda: self._file.append(step, phase, tensors))

    def _write(self, write: Callable[[], None]) -> None:
        """Writes on rank 0, until it fails."""
        if self._broken or not self._ctx.is_zero:
            return
        try:
            write()
        except OSError as e:
            self._broken = True
            log.error("fingerprints are not recorded from step %d on: %s", self.step, e)

    def close(self) -> None:
        """Waits until the batches are written (DiskThread.close)."""
        self._disk.close()


class _RecordedUpdates:
    """Records the updates of a role, made under its other check."""

    def __init__(self, recorder: StepRecorder, name: str, inner: UpdateCheck | None) -> None:
        self._recorder, self._name, self._inner = recorder, name, inner

    def train_batch(
        self, engine: Any, data: Data, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Makes one optimizer step and records it."""
        with record_timing("record"):
            tensors = field_fingerprints(data)
        if self._inner is None:
            stats = engine.train_batch(data, loss_fn, weight_fn, **kw)
        else:
            stats = self._inner.train_batch(engine, data, loss_fn, weight_fn, **kw)
        self._recorder.updated(self._name, tensors, stats)
        return stats


def _versions() -> dict[str, str]:
    """Returns the versions of the libraries that compute."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _degrees(parallel: ParallelConfig) -> str:
    """Returns the degrees of a layout that are more than 1: "tp2 pp2"."""
    degrees = {k: v for k, v in vars(parallel).items() if isinstance(v, int) and v > 1}
    return " ".join(f"{name}{int(value)}" for name, value in degrees.items())


def _of_servers(held: list[list[Mapping[str, str]]]) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the tensors that servers hold, those of the first by name."""
    return {
        name if (i, rank) == (0, 0) else f"{name} (server {i}, rank {rank})": Fingerprint(sum_[:16])
        for i, ranks in enumerate(held)
        for rank, sums in enumerate(ranks)
        for name, sum_ in sums.items()
    }
