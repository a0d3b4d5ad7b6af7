"""Records what the steps of a run compute, for `megarl diff` and `megarl replay`.

Every rank makes one and makes the same calls: fingerprints are collective, rank 0 writes. Nothing
here ends a run: where the disk is full or does not follow, an error in the log says what is not
recorded, and training goes on.

<run>/record/batches/step_000123.safetensors holds the batch as it was handed out to the step,
before anything was computed of it: "lengths" [B], "sample/<name>" [B] and "token/<name>" [T, ...],
the rows one after the other. Its metadata say of which step and version it is, and how long the
data set was. Fingerprints of a batch do not depend on who holds which row.

B rows of the batch, b of them held by this rank, T tokens of the held rows.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from megarl.algos import Role
from megarl.algos.batches import CHECK, MADE, TAUGHT
from megarl.algos.roles import UpdateCheck
from megarl.algos.rows import Data, as_batch, reduce_rows, total
from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import LossFn, LossWeightFn
from megarl.api.tokens import as_bytes, row_bytes
from megarl.config.engine import ParallelConfig
from megarl.config.errors import ConfigError
from megarl.config.recipe_engines import engines
from megarl.config.recipes import GRPOConfig
from megarl.config.run import RecordConfig, batch_path, recorded_steps
from megarl.observability import run_log
from megarl.observability.logging import get_logger
from megarl.observability.stats_tracker import record_timing
from megarl.parallel import mcore
from megarl.trainer.context import ProcessContext
from megarl.utils.files import Fingerprint, RowDigest, full_disk_named, write_whole
from megarl.weight_sync.servers import Deadline
from megarl.weight_sync.verify import held_checksums

log = get_logger(__name__)

PHASES = {  # of what a step adds to its batch; other fields are of the advantages
    "prox_logp": run_log.LOGP,
    "entropy": run_log.LOGP,
    "routed_experts": run_log.LOGP,
    "ref_logp": run_log.REF,
    "values": run_log.VALUES,
    "last_value": run_log.VALUES,
    **dict.fromkeys(TAUGHT, run_log.TEACHER),
}
MADE_BY_UPDATES = ("skipped", *MADE)
NUMBERS = ("loss", "grad_norm", "lr", "update_successful")  # of an update
LENGTHS = "lengths"
_FIRST = ("input_ids", "loss_mask", "versions", "logprobs")  # what the others come of
_SAMPLE, _TOKEN = "sample/", "token/"  # begin the names of a recorded batch's tensors
LIBRARIES = ("megarl", "torch", "megatron-core", "transformers", "transformer-engine")


class StepRecorder:
    """Records fingerprints of every phase of a step, and the batches that are to be kept."""

    def __init__(self, cfg: GRPOConfig, ctx: ProcessContext, *, dataset_size: int) -> None:
        self._cfg, self._config, self._ctx = cfg, RecordConfig(**cfg.record), ctx
        self._file = run_log.FingerprintFile(ctx.run_dir)
        self._broken = False  # nothing more is written
        self._disk = run_log.DiskThread("megarl record", waiting=1)
        self._roles: Mapping[str, Role] = {}
        self._updates: Counter[str] = Counter()
        self._handed_out: run_log.Tensors = {}
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
        facts = {"world_size": self._ctx.ranks.size, "device": device, "layout": layouts}
        return facts | {"threads": torch.get_num_threads(), "versions": _versions()}

    # ---- what a step says ----------------------------------------------------------------------

    def handed_out(self, batch: Batch) -> None:
        """Takes the batch of the step, before anything is computed of it. Collective."""
        with record_timing("record"):
            if self._config.fingerprints:
                self._handed_out = field_fingerprints(batch)
                self._append(run_log.ROLLOUT, self._handed_out)
            keep = self._config.keep
            if keep == 0:
                return
            batch = whole(batch)
            if self._ctx.ranks.is_zero:
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
            for name, fingerprint in field_fingerprints(batch, names).items():
                was = self._handed_out.get(name)
                phase = PHASES.get(name, run_log.ADVANTAGES if was is None else run_log.BATCH)
                if fingerprint != was:
                    phases.setdefault(phase, {})[name] = fingerprint
            for phase, tensors in phases.items():
                self._append(phase, tensors)

    def updated(self, role: str, tensors: run_log.Tensors, stats: Mapping[str, float]) -> None:
        """Takes an update: the fingerprints of what it was made of, and its metrics."""
        self._updates[role] += 1
        numbers = {n: Fingerprint.of_number(stats[n]) for n in NUMBERS if n in stats}
        phase = run_log.phase_of(run_log.UPDATE, role, self._updates[role])
        self._append(phase, {**tensors, **numbers})

    def end_step(self, addresses: list[str]) -> None:
        """Takes the weights after the step's updates, and those at the servers of `addresses` (rank
        0's). Collective."""
        config = self._config
        if not config.fingerprints:
            return
        with record_timing("record"):
            for name, role in self._roles.items():
                if tensors := role.engine.fingerprints():
                    self._append(run_log.phase_of(run_log.WEIGHTS, name), tensors)
            if config.servers and self._ctx.ranks.is_zero:
                self._append_servers(addresses)

    def _append_servers(self, addresses: list[str]) -> None:
        sync = self._cfg.weight_sync
        try:
            checksums = held_checksums(
                addresses, Deadline(sync.timeout, patience=sync.server_timeout)
            )
        except RuntimeError as e:
            log.error("step %d: the servers' weights are not recorded: %s", self.step, e)
            return
        if checksums:
            self._append(run_log.SERVERS, _of_servers([*checksums.values()]))

    # ---- files ---------------------------------------------------------------------------------

    def _append(self, phase: str, tensors: run_log.Tensors) -> None:
        step = self.step
        self._write(lambda: self._file.append(step, phase, tensors))

    def _write(self, write: Callable[[], None]) -> None:
        """Writes on rank 0, until it fails."""
        if self._broken or not self._ctx.ranks.is_zero:
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
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _degrees(parallel: ParallelConfig) -> str:
    """Returns the degrees of a layout that are more than 1: "tp2 pp2"."""
    degrees = {k: v for k, v in vars(parallel).items() if isinstance(v, int) and v > 1}
    return " ".join(f"{name}{int(value)}" for name, value in degrees.items())


def _of_servers(checksums: list[list[Mapping[str, str]]]) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the tensors that servers hold, those of the first by name."""
    return {
        name if (i, rank) == (0, 0) else f"{name} (server {i}, rank {rank})": Fingerprint(sum_[:16])
        for i, ranks in enumerate(checksums)
        for rank, sums in enumerate(ranks)
        for name, sum_ in sums.items()
    }


# ---- fingerprints of a batch


def field_fingerprints(data: Data, names: Collection[str] | None = None) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the lengths of a batch and of its fields, or of those in `names`,
    the same on every rank and in every layout. Collective."""
    batch = as_batch(data)
    # check_logp is there in the first step after a start, which in a replay is another one
    chosen = [n for n in dict.fromkeys([*_FIRST, *sorted(batch)]) if n in batch and n != CHECK]
    chosen = [n for n in chosen if names is None or n in names]
    fingerprints = {LENGTHS: _of_samples(batch.lengths)}
    if tokens := [n for n in chosen if n in batch.per_token]:
        fingerprints |= _of_tokens(batch, tokens)
    return fingerprints | {n: _of_samples(batch[n]) for n in chosen if n in batch.per_sample}


def _of_tokens(batch: Batch, names: Sequence[str]) -> dict[str, Fingerprint]:
    """Returns the fingerprints of per-token fields, of which every holder reads its own rows."""
    fields = [batch.per_token[name] for name in names]
    hashes = _numbers([_row_hashes(f.values, f.lengths.tolist()) for f in fields])
    rows = batch.gather(hashes.T.contiguous())

    def sums(part: Padded) -> list[Tensor]:
        numbers = [part[name].double()[:, None].flatten(1) for name in names]
        return [x for n in numbers for x in (n.sum(1), n.square().sum(1))]

    columns = reduce_rows(batch, sums, names)
    count = int(batch.lengths.sum())
    return {
        name: _fingerprint(
            rows[:, i],
            columns[:, 2 * i],
            columns[:, 2 * i + 1],
            _shape(fields[i].values, f"{len(batch)} rows, {count} tokens"),
        )
        for i, name in enumerate(names)
    }


def _of_samples(values: Tensor) -> Fingerprint:
    """Returns the fingerprint of a per-sample field [B, ...]."""
    numbers = values.double()[:, None].flatten(1)
    hashes = _numbers(_row_hashes(values, [1] * len(values)))
    shape = _shape(values, f"{len(values)} rows")
    return _fingerprint(hashes, numbers.sum(1), numbers.square().sum(1), shape)


def _fingerprint(hashes: Tensor, sums: Tensor, squares: Tensor, shape: str) -> Fingerprint:
    """Puts together what is known of the rows [B] of a field."""
    in_order = RowDigest(as_bytes(hashes).numpy().data).hexdigest()
    in_any = RowDigest(as_bytes(hashes.sort().values).numpy().data).hexdigest()
    return Fingerprint(in_order, math.sqrt(total(squares)), total(sums), shape, in_any)


def _row_hashes(values: Tensor, lengths: Sequence[int]) -> list[int]:
    """Returns the hash of each row, a signed number of 64 bits, of `lengths` values each."""
    raw = memoryview(as_bytes(values).numpy().data)
    each, at, hashes = row_bytes(values), 0, []
    for length in lengths:
        end = at + each * length
        hashes.append(RowDigest(raw[at:end]).intdigest() - (1 << 63))
        at = end
    return hashes


def _numbers(hashes: Sequence[Any]) -> Tensor:
    return torch.tensor(hashes, dtype=torch.int64)


def _shape(values: Tensor, outer: str) -> str:
    """Describes a field for people: "float32 [16 rows, 812 tokens]"."""
    kind = str(values.dtype).removeprefix("torch.")
    return f"{kind} [{', '.join([outer, *map(str, values.shape[1:])])}]"


# ---- recorded batches


def whole(batch: Batch) -> Batch:
    """Returns the batch, all of whose rows rank 0 holds. Collective."""
    if len(batch.home.rows(0)) == len(batch):
        return batch
    return Batch.from_padded(batch.fetch(range(len(batch))), comm=batch.comm)


def as_tensors(batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors of a file. On a rank that holds all rows."""
    tensors = {LENGTHS: batch.lengths}
    tensors |= {_SAMPLE + name: values for name, values in batch.per_sample.items()}
    tensors |= {_TOKEN + name: tokens.values for name, tokens in batch.per_token.items()}
    return {name: values.contiguous() for name, values in tensors.items()}


def record_batch(
    run_dir: Path,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, int],
    keep: int | None,
) -> None:
    """Writes the batch of step about["step"], whole or not at all; then the newest `keep` (None:
    all) stay. Raises DiskFull where there is no room."""
    step = about["step"]
    path = batch_path(run_dir, step)
    content = save(dict(tensors), {name: str(value) for name, value in about.items()})
    with full_disk_named(f"recording {path.name}", path.parent, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    for old in recorded_steps(run_dir):
        if keep is not None and old <= step - keep:
            batch_path(run_dir, old).unlink(missing_ok=True)


def read_batch(path: Path) -> tuple[list[Padded], dict[str, int]]:
    """Returns the rows of a file, each padded [1, n], and its metadata. Raises ConfigError for a
    file that cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            about = {name: int(value) for name, value in file.metadata().items()}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except Exception as e:  # safetensors has an error of its own for every kind of damage
        raise ConfigError(f"{path} cannot be read: {type(e).__name__}: {e}") from e
    lengths = tensors.pop(LENGTHS)
    tokens = {n: Tokens(v, lengths) for n, v in tensors.items() if n.startswith(_TOKEN)}
    rows: list[Padded] = []
    for i, length in enumerate(lengths.tolist()):
        row = {name.removeprefix(_TOKEN): field.row(i)[None] for name, field in tokens.items()}
        row |= {
            name.removeprefix(_SAMPLE): values[i : i + 1]
            for name, values in tensors.items()
            if name.startswith(_SAMPLE)
        }
        rows.append(row | {"attention_mask": torch.ones(1, length, dtype=torch.bool)})
    return rows, about
