"""MegatronEngine is a TrainEngine on megatron-core, one process per device.

The same code runs over NCCL on GPUs and over gloo on CPUs. Every method is a collective over the
engine's world: all its ranks call it with the same arguments.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from megarl.api.batch import Batch, Padded
from megarl.api.engine import PARTS, LossFn, LossWeightFn, Metrics, PendingSave, TrainEngine
from megarl.api.records import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from megarl.config.engine import TrainEngineConfig
from megarl.engine import checkpoint, inputs, optimizer, passes
from megarl.engine.copying import CopyPlan, copy_weights
from megarl.engine.inputs import Request, as_batch
from megarl.engine.offload import Memory
from megarl.engine.probe import Part, Probe
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState, Resolved, build, release, resolve
from megarl.parallel import cpu_patches, exchange, mcore
from megarl.parallel.groups import ProcessGroups, model_scope
from megarl.parallel.ranks import Ranks
from megarl.parallel.worlds import (
    World,
    init_distributed,
    inside,
    ranks_of,
    this_rank,
    waiting_for,
)
from megarl.utils.env import uses_gpus
from megarl.utils.files import Fingerprint
from megarl.weight_sync.transports import WeightSender

T = TypeVar("T")


class MegatronEngine(TrainEngine):
    """Trains or runs one model in one layout. `initialize` makes it real, `destroy` gives
    everything back; a pass or a save outside of the two raises RuntimeError.

    It spans `world`, by default the world in scope, and every verb enters that scope. On other
    ranks it is a placeholder without weights: besides initialize, destroy and copy_weights, what
    needs weights raises RuntimeError there."""

    # ---- life ----------------------------------------------------------------------------------

    def __init__(
        self, config: TrainEngineConfig, *, seed: int = 1, world: World | None = None
    ) -> None:
        self.config, self.seed, self.world = config, seed, world
        self._version = 0
        self._uploaded: int | None = None  # the last version that reached the servers
        self._training = config.optimizer is not None
        self._what: Resolved | None = None  # once it is initialized
        self._groups: ProcessGroups | None = None
        self._built: EngineState | None = None
        self._memory: Memory | None = None
        self._sender: WeightSender | None = None
        self.copy_plan: CopyPlan | None = None  # of the last source of copy_weights

    @property
    def device(self) -> torch.device:
        """Returns the device on which this rank computes."""
        return mcore.device()

    @property
    def is_member(self) -> bool:
        """Returns whether this rank is one of the engine's; else it is a placeholder here."""
        return self.world is None or self.world.member

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns which of all ranks hold the engine, as the layout's ranks 0, 1, ... Raises
        RuntimeError before `initialize`."""
        self._made(self._what)
        return self.world.ranks if self.world else ranks_of(self.groups.world)

    def _made(self, part: T | None) -> T:
        """Returns what `initialize` makes. Raises RuntimeError before it, and in a placeholder."""
        if self._what is None:
            raise RuntimeError("the engine is not initialized: call initialize() first")
        if part is None:
            raise RuntimeError(f"this engine is on {self.world}, not on rank {this_rank()}")
        return part

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Makes process groups, model, weights, optimizer and schedule, in the world that `addr`
        ("host:port") or torchrun's environment names; `ft_spec` gives the schedule its length.
        Raises ValueError where model, machine or world cannot do what the config asks, and when
        called twice. Collective."""
        if self._what is not None or self._groups is not None:
            raise ValueError("initialize() was called twice; call destroy() in between")
        init_distributed(addr)
        what = resolve(self.config, len(self.world.ranks) if self.world else dist.get_world_size())
        self.model_config, self.layout, self.dtype = what.model, what.layout, what.dtype
        if self.is_member:
            with inside(self.world.group if self.world else dist.group.WORLD):
                self._groups = ProcessGroups(what.layout)
                Ranks.of()  # all ranks make it here
            with model_scope(self._groups), waiting_for(self._groups.coords, "initialize"):
                self._built = build(self.config, what, self._groups, self.seed, ft_spec)
                self._memory = Memory(self._built)
                self.train(self._training)
                if self.config.offload:
                    self._memory.offload(("params",))
        self._what = what

    def destroy(self) -> None:
        """Gives back connections, model and process groups; does nothing before `initialize`.
        Collective."""
        self._what = self.copy_plan = None
        if self._groups is None:
            return
        if self._sender is not None:
            with inside(self._groups.world):
                self._sender.close()
        if self._memory is not None:
            self._memory.arrive()
        if self._built is not None:
            release(self._built)
        self._sender = self._memory = self._built = None
        gc.collect()
        torch.cuda.empty_cache()
        cpu_patches.give_back()
        groups, self._groups = self._groups, None
        with inside(groups.world), waiting_for(groups.coords, "destroy"):
            groups.barrier()
            groups.release()

    @property
    def groups(self) -> ProcessGroups:
        """Returns the process groups of the layout. Raises RuntimeError before `initialize`."""
        return self._made(self._groups)

    @property
    def state(self) -> EngineState:
        """Returns all that `initialize` made. Raises RuntimeError before it."""
        return self._made(self._built)

    @property
    def memory(self) -> Memory:
        """Returns the keeper of offloaded parts. Raises RuntimeError before `initialize`."""
        return self._made(self._memory)

    def scope(self) -> AbstractContextManager[None]:
        """Returns a context in which torch's default process group is of the engine's ranks alone.
        Raises RuntimeError on another rank."""
        if self._groups is not None:
            return inside(self._groups.world)
        return self.world.scope() if self.world is not None else super().scope()

    @contextmanager
    def _scope(
        self, what: str, needs: Sequence[str] = ("params",), *, behind: bool = False
    ) -> Iterator[None]:
        """Puts this engine's groups into megatron-core's globals, and has a wait that fails say who
        waited for `what`. Raises RuntimeError where a part in `needs` is offloaded. behind: `what`
        is a pass, whose modules wait for weights that are on their way."""
        self.memory.require(what, needs, behind=behind)
        with model_scope(self.groups), waiting_for(self.groups.coords, what):
            yield

    def train(self, mode: bool = True) -> Self:
        """Puts the modules into training mode or out of it, and returns the engine. Each pass sets
        its own mode and restores this one."""
        self._training = mode
        for chunk in self._built.chunks if self._built else ():
            chunk.train(mode)
        return self

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = self._training
        self.train(training)
        try:
            yield
        finally:
            self.train(before)

    # ---- passes --------------------------------------------------------------------------------

    def place(self, batch: Batch) -> None:
        """Moves the batch's tokens to the ranks that work on them in this step, unless it has been
        placed. Collective."""
        with self._scope("place", ()):
            inputs.place(self.state, batch)

    def train_batch(
        self,
        input_: Batch | Padded,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        outputs: Sequence[str] = ("logprobs",),
        temperature: float = 1.0,
        whole_groups: bool = False,
        keep: Sequence[str] = (),
    ) -> dict[str, float]:
        """Makes one optimizer step; returns its metrics (TrainEngine.train_batch). Raises
        ValueError without an optimizer, for a batch that differs between ranks, or without anything
        to train on."""
        stats = self.backward_batch(
            input_,
            loss_fn,
            loss_weight_fn,
            outputs=outputs,
            temperature=temperature,
            whole_groups=whole_groups,
            keep=keep,
        )
        whole = self.state.optimizer
        with self._scope("train_batch (optimizer step)", PARTS):
            lr = optimizer.current_lr(whole)
            spike = self.config.optimizer.spike_norm if self.config.optimizer else None
            stats |= {"lr": lr, **optimizer.step(whole, stats["loss"], spike_norm=spike)}
            if stats["update_successful"]:
                self.state.average.clear()  # it was of the weights before
        return stats

    def backward_batch(
        self, input_: Batch | Padded, loss_fn: LossFn, loss_weight_fn: LossWeightFn, **how: Any
    ) -> Metrics:
        """Does train_batch's work, with its arguments, but for the optimizer step: the gradients
        stay in place (see `hf_state`). Raises ValueError without an optimizer."""
        if self.state.optimizer is None:
            raise ValueError("this engine has no optimizer: set its `optimizer` to train it")
        with self._scope("train_batch", PARTS, behind=True), self._mode(True):
            optimizer.zero_grad(self.state.optimizer, self.state.chunks)
            ask = Request(
                verb="train_batch", loss=loss_fn, weight=loss_weight_fn, backward=True, **how
            )
            return self._run(input_, ask)

    def eval_batch(
        self,
        input_: Batch | Padded,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        outputs: Sequence[str] = ("logprobs",),
        temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:
        """Returns the loss and stats of train_batch, without gradients (TrainEngine.eval_batch)."""
        with self._inference("eval_batch"):
            ask = Request(
                verb="eval_batch",
                loss=loss_fn,
                weight=loss_weight_fn,
                outputs=outputs,
                temperature=temperature,
                whole_groups=whole_groups,
            )
            return self._run(input_, ask)

    def forward(
        self,
        input_: Batch | Padded,
        output_seqlens: Sequence[int] | None = None,
        post_hook: Callable[[Padded, Padded], Any] | None = None,
        aggregate_fn: Callable[[list[Any]], Any] = torch.cat,
        *,
        outputs: Sequence[str] = ("logprobs",),
        temperature: float = 1.0,
    ) -> Any:
        """See TrainEngine. With `output_seqlens` or `post_hook` every sequence is taken by itself
        (passes.by_sequence), and `aggregate_fn` joins the list."""
        whole = output_seqlens is None and post_hook is None
        if isinstance(input_, Batch) and not whole:
            raise ValueError("output_seqlens and post_hook go with a plain dict of padded tensors")
        ask = Request(verb="forward", outputs=outputs, temperature=temperature, keep=outputs)
        with self._inference("forward"):
            result = self._run(input_, ask).kept
        if whole:
            return result if len(result) > 1 else next(iter(result.values()))
        assert not isinstance(input_, Batch)

        def by_sequence() -> Any:
            return aggregate_fn(_by_sequence(result, input_, output_seqlens, post_hook))

        with model_scope(self.groups):
            what = "forward: post_hook or aggregate_fn"
            return Ranks.of().together(by_sequence, what=what)

    def probe(self, input_: Padded) -> tuple[Padded, dict[Part, torch.Tensor]]:
        """Returns `forward`'s logprobs of a plain dict of padded tensors, of a model with experts
        also its routes, and what every part of its layers put out: [T,...] float32 of the T real
        tokens, row after row, on every rank."""
        probe = Probe(self.state)
        outputs = ("logprobs", ROUTED) if self.state.routing else ("logprobs",)
        ask = Request(verb="probe", outputs=outputs, keep=outputs)
        with self._inference("probe"), probe.listening():
            kept: dict[Any, torch.Tensor] = self._run(input_, ask, probe).kept
        real = input_["attention_mask"].bool()
        heard = {part: values[real] for part, values in kept.items() if isinstance(part, Part)}
        return {name: kept[name] for name in outputs}, heard

    def _run(self, input_: Batch | Padded, ask: Request, probe: Probe | None = None) -> Metrics:
        """Makes a pass. What it keeps is of the rows that this rank holds of a Batch; of a plain
        dict, which is a Batch that every rank holds whole, [B,S,...] on every rank."""
        if isinstance(input_, Batch):
            return passes.run(self.state, input_, ask, probe)
        batch = as_batch(self.state, input_)
        everywhere, width = batch.home, input_["input_ids"].shape[1]
        metrics = passes.run(self.state, batch, ask, probe)
        for name, tokens in metrics.kept.items():
            moved = exchange.move(tokens, batch.lengths, batch.home, everywhere, batch.comm)
            metrics.kept[name] = moved.padded(width=width)
        return metrics

    @contextmanager
    def _inference(self, what: str) -> Iterator[None]:
        at_hand, scope = self.memory.at_hand(behind=True), self._scope(what, behind=True)
        with at_hand, scope, self._mode(False), torch.no_grad():
            yield

    def step_lr_scheduler(self) -> None:
        """Moves the learning-rate schedule on by one training step. Raises ValueError without an
        optimizer."""
        if self.state.schedule is None:
            raise ValueError("this engine has no optimizer, so no learning-rate schedule")
        self.state.schedule.step(1)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Returns a context in which passes run the model below the adapters. Raises ValueError
        without adapters."""
        adapters = self.state.adapters
        return adapters.disabled() if adapters else super().disable_adapter()

    # ---- weights -------------------------------------------------------------------------------

    def save(self, meta: SaveLoadMeta) -> None:
        """Writes weights or a training checkpoint to meta.path. What a checkpoint holds may be
        offloaded. Raises ValueError for a format that this engine does not have. Collective."""
        checkpoint.check_meta(meta, self.state)
        with self._saving(meta):
            checkpoint.save(self.state, meta, self._version)

    def begin_save(self, meta: SaveLoadMeta) -> PendingSave:
        """Begins a save: of the "dist" format, a thread writes what is copied to host memory here;
        other formats are saved at once."""
        if meta.weight_format != "dist":
            return super().begin_save(meta)
        checkpoint.check_meta(meta, self.state)
        with self._saving(meta):
            return checkpoint.begin_save(self.state, meta.path, meta.with_optim, self._version)

    @contextmanager
    def _saving(self, meta: SaveLoadMeta) -> Iterator[None]:
        resting = meta.weight_format == "dist"
        at_hand = self.memory.at_rest() if resting else self.memory.at_hand()
        with at_hand, self._scope("save", () if resting else ("params",)):
            yield

    def load(self, meta: SaveLoadMeta) -> None:
        """Loads what was saved at meta.path; with meta.with_optim the version comes with it. Raises
        ValueError for a checkpoint that does not fit this engine. Collective."""
        checkpoint.check_meta(meta, self.state)
        with self.memory.at_hand(changes=True), self._scope("load", ("params", "optimizer")):
            version = checkpoint.load(self.state, meta)
        if version is not None:
            self.set_version(version)

    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Sends the weights to the servers of `meta`; returns phases (s) and bytes. Raises
        ValueError for a version that does not rise, ServersLost where servers are lost on the way.
        Collective."""
        meta = meta.settled(self._version, self._uploaded)
        with self._scope("upload_weights"):
            optimizer.gather_params(self.state.chunks)
            if self._sender is None:
                self._sender = checkpoint.sender(self.state)
            stats: dict[str, float] = self._sender.upload(meta)
        self._uploaded = meta.number
        return stats

    def copy_weights(self, source: MegatronEngine, *, keep: float = 0.0) -> dict[str, float]:
        """Takes over the weights of `source`, an engine of the same model in any layout and on any
        ranks, from rank to rank: a reference that follows its actor, say. Adapters of `source`
        arrive merged. Main weights of an optimizer here follow; its moments stay.

        keep: share of its own weights that stays. With 0.99 in every step this engine is a moving
        average of `source`, which is kept in fp32 (4 bytes a weight) where the dtype is another.

        Returns this rank's bytes "sent" to others and "kept", and "peak", the largest message.
        Collective over the ranks of both engines; on any other it does nothing."""
        stats, version = copy_weights(source, self, keep)
        self.set_version(version)
        return stats

    def hf_state(self, *, grads: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full tensors by HF name, adapters merged in, on rank 0; the other ranks iterate
        too and see none. It needs the memory of one bucket.

        With `grads` it yields the gradients of the last backward_batch in fp32, those of adapters
        by PEFT's names; they are whole only without the distributed optimizer, which leaves each
        rank its own part. Raises ValueError for `grads` without an optimizer."""
        needs = ("params", "grads") if grads else ("params",)
        return checkpoint.hf_state(self.state, grads, partial(self._scope, "hf_state", needs))

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Returns the hash and the norm of every trained weight by HF name (of adapters by PEFT's
        names), the same on every rank and, to the last bit of a hash, in every layout. It needs no
        memory, and nothing but the hashes travels. Collective."""
        with self.memory.at_hand(), self._scope("fingerprints"):
            return checkpoint.fingerprints(self.state)

    def set_version(self, version: int) -> None:
        """Sets the version of the weights. After a return to earlier weights, later uploads may
        repeat versions."""
        self._version = version
        if self._uploaded is not None and version < self._uploaded:
            self._uploaded = None  # back at earlier weights, whose versions count anew

    def get_version(self) -> int:
        """Returns the version of the weights."""
        return self._version

    # ---- memory --------------------------------------------------------------------------------

    def offload(self, parts: Sequence[str] = PARTS, *, keep: bool = True) -> dict[str, int]:
        """Gives up the device memory of `parts`; returns bytes by part, and in use before and
        after. Without `keep` the numbers are lost: an engine without weights gets room for them by
        `onload`, and the weights by `copy_weights`. Collective."""
        with self._scope("offload", ()):
            return self.memory.offload(parts, keep=keep)

    def onload(self, parts: Sequence[str] = PARTS, *, behind: bool = False) -> dict[str, int]:
        """Undoes `offload`; returns bytes by part, and in use before and after. With `behind` it
        returns at once (TrainEngine.onload)."""
        return self.memory.onload(parts, behind=behind)

    def occupied(self) -> dict[str, int]:
        """Returns the bytes of each part that are on the device now."""
        return self.memory.occupied()

    def get_scheduling_config(self) -> dict[str, Any]:
        """Returns gpus_per_process and cpus_per_process for a scheduler; the process that asks need
        have no GPU itself."""
        on_gpu = uses_gpus(os.environ)
        return {"gpus_per_process": int(on_gpu), "cpus_per_process": 4 if on_gpu else 1}


def _by_sequence(
    outputs: Padded,
    batch: Padded,
    output_seqlens: Sequence[int] | None,
    post_hook: Callable[[Padded, Padded], Any] | None,
) -> list[Any]:
    """Returns for every sequence its outputs {name: [n]} (the first output_seqlens[i] positions,
    all S by default), with its row of the batch through `post_hook` if there is one. Raises
    ValueError for another number of output_seqlens, and for several outputs without a post_hook."""
    rows = len(batch["input_ids"])
    if output_seqlens is not None and len(output_seqlens) != rows:
        raise ValueError(f"output_seqlens has {len(output_seqlens)} entries for {rows} sequences")
    if post_hook is None and len(outputs) > 1:
        raise ValueError(f"several outputs {tuple(outputs)} by sequence need a post_hook")
    results = []
    for i in range(rows):
        n = None if output_seqlens is None else output_seqlens[i]
        own = {name: values[i, :n] for name, values in outputs.items()}
        row = {name: values[i] for name, values in batch.items()}
        results.append(post_hook(own, row) if post_hook else next(iter(own.values())))
    return results
