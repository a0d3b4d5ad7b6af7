"""MegatronEngine: TrainEngine on megatron-core, one process per device.

The same code runs over NCCL on GPUs and over gloo on CPUs. Every method is a collective over the
world: all ranks call it with the same arguments.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.batch import Batch, Padded
from megarl.api.engine import PARTS, LossFn, LossWeightFn, PendingSave, TrainEngine
from megarl.api.records import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from megarl.config.engine import TrainEngineConfig
from megarl.engine import checkpoint, intake, optimizer, passes, weights
from megarl.engine.memory import Memory
from megarl.engine.setup import EngineState, build, release, resolve
from megarl.parallel import mcore
from megarl.parallel.exchange import world_comm
from megarl.parallel.groups import ProcessGroups, init_distributed, model_scope, waiting_for
from megarl.weight_sync import WeightSender
from megarl.weight_sync.reallocate import Reallocator

_UNINITIALIZED = "the engine is not initialized: call initialize() first"


class MegatronEngine(TrainEngine):
    """One model in one layout. `initialize` makes it real, `destroy` gives everything back."""

    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        self.config, self.seed = config, seed
        self._version = 0
        self._uploaded: int | None = None  # the last version that reached the servers
        self._training = config.optimizer is not None
        self._groups: ProcessGroups | None = None
        self._built: EngineState | None = None
        self._memory: Memory | None = None
        self._sender: WeightSender | None = None
        self._inflow: tuple[EngineState, Reallocator] | None = None

    # ---- life ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return mcore.device()

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        if self._groups is not None:
            raise ValueError("initialize() was called twice; call destroy() in between")
        init_distributed(addr)
        what = resolve(self.config, dist.get_world_size())
        self.model_config, self.layout, self.dtype = what.model, what.layout, what.dtype
        self._groups = ProcessGroups(what.layout)
        world_comm()  # where it has to be made, all ranks make it here
        with model_scope(self._groups), waiting_for(self._groups, "initialize"):
            self._built = build(self.config, what, self._groups, self.seed, ft_spec)
            self._memory = Memory(self._built)
            self.train(self._training)
            if self.config.offload:
                self._memory.offload(("params",))

    def destroy(self) -> None:
        if self._groups is None:
            return
        if self._sender is not None:
            self._sender.close()
        if self._built is not None:
            release(self._built)
        self._sender = self._memory = self._built = self._inflow = None
        gc.collect()
        torch.cuda.empty_cache()
        groups, self._groups = self._groups, None
        with waiting_for(groups, "destroy"):
            groups.barrier()
            groups.release()

    @property
    def groups(self) -> ProcessGroups:
        if self._groups is None:
            raise RuntimeError(_UNINITIALIZED)
        return self._groups

    @property
    def state(self) -> EngineState:
        if self._built is None:
            raise RuntimeError(_UNINITIALIZED)
        return self._built

    @property
    def memory(self) -> Memory:
        if self._memory is None:
            raise RuntimeError(_UNINITIALIZED)
        return self._memory

    @contextmanager
    def _scope(self, what: str, needs: Sequence[str] = ("params",)) -> Iterator[None]:
        """megatron-core's globals are ours, and a wait that fails says who waited for what."""
        self.memory.require(what, needs)
        with model_scope(self.groups), waiting_for(self.groups, what):
            yield

    def train(self, mode: bool = True) -> MegatronEngine:
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
        with self._scope("place", ()):
            intake.place(self.state, batch)

    def train_batch(
        self, input_: Batch | Padded, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        stats = self.backward_batch(
            input_, loss_fn, loss_weight_fn, outputs=outputs, temperature=temperature,
            whole_groups=whole_groups,
        )  # fmt: skip
        mine = self.state.optimizer
        with self._scope("train_batch (optimizer step)", PARTS):
            lr = optimizer.current_lr(mine)
            return {**stats, "lr": lr, **optimizer.step(mine, stats["loss"])}

    def backward_batch(
        self, input_: Batch | Padded, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """train_batch without its optimizer step: the gradients stay in place (see `hf_state`)."""
        if self.state.optimizer is None:
            raise ValueError("this engine has no optimizer: set its `optimizer` to train it")
        with self._scope("train_batch", PARTS), self._mode(True):
            optimizer.zero_grad(self.state.optimizer, self.state.chunks)
            return passes.loss_pass(
                self.state, input_, loss_fn, loss_weight_fn, outputs=outputs,
                temperature=temperature, whole_groups=whole_groups, backward=True,
            )  # fmt: skip

    def eval_batch(
        self, input_: Batch | Padded, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        with self._inference("eval_batch"):
            return passes.loss_pass(
                self.state, input_, loss_fn, loss_weight_fn, outputs=outputs,
                temperature=temperature, whole_groups=whole_groups, backward=False,
            )  # fmt: skip

    def forward(
        self, input_: Batch | Padded, output_seqlens: Sequence[int] | None = None,
        post_hook: Callable[[Padded, Padded], Any] | None = None,
        aggregate_fn: Callable[[list[Any]], Any] = torch.cat, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
    ) -> Any:  # fmt: skip
        """See TrainEngine. With `output_seqlens` or `post_hook` every sequence is taken by itself
        (passes.by_sequence), and `aggregate_fn` joins the list."""
        whole = output_seqlens is None and post_hook is None
        if isinstance(input_, Batch) and not whole:
            raise ValueError("output_seqlens and post_hook go with a plain dict of padded tensors")
        with self._inference("forward"):
            result = passes.forward_pass(self.state, input_, outputs, temperature)
        if whole:
            return result if len(result) > 1 else next(iter(result.values()))
        assert not isinstance(input_, Batch)
        return aggregate_fn(passes.by_sequence(result, input_, output_seqlens, post_hook))

    @contextmanager
    def _inference(self, what: str) -> Iterator[None]:
        with self.memory.at_hand(), self._scope(what), self._mode(False), torch.no_grad():
            yield

    def step_lr_scheduler(self) -> None:
        if self.state.schedule is None:
            raise ValueError("this engine has no optimizer, so no learning-rate schedule")
        self.state.schedule.step(1)

    def disable_adapter(self) -> AbstractContextManager[None]:
        adapters = self.state.adapters
        return adapters.disabled() if adapters else super().disable_adapter()

    # ---- weights -------------------------------------------------------------------------------

    def save(self, meta: SaveLoadMeta) -> None:
        checkpoint.check_meta(meta, self.state)
        with self._scope("save", ("params", "optimizer") if meta.with_optim else ("params",)):
            weights.save(self.state, meta, self._version)

    def begin_save(self, meta: SaveLoadMeta) -> PendingSave:
        """For the "dist" format: a thread writes what is copied to host memory here."""
        if meta.weight_format != "dist":
            return super().begin_save(meta)
        checkpoint.check_meta(meta, self.state)
        with self._scope("save", ("params", "optimizer") if meta.with_optim else ("params",)):
            return weights.begin_save(self.state, meta, self._version)

    def load(self, meta: SaveLoadMeta) -> None:
        checkpoint.check_meta(meta, self.state)
        with self._scope("load", ("params", "optimizer")):
            version = weights.load(self.state, meta)
        if version is not None:
            self.set_version(version)

    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        meta = meta.settled(self._version, self._uploaded)
        with self._scope("upload_weights"):
            optimizer.gather_params(self.state.chunks)
            if self._sender is None:
                self._sender = weights.sender(self.state)
            stats: dict[str, float] = self._sender.upload(meta)
        self._uploaded = meta.number
        return stats

    def copy_weights(self, source: MegatronEngine) -> dict[str, float]:
        """Takes over the weights of `source`, an engine of the same model and ranks in any layout,
        from rank to rank: a reference that follows its actor, say. Adapters of `source` arrive
        merged. Main weights of an optimizer here follow; its moments stay.

        Returns this rank's bytes "sent" to others and "kept", and "peak", the largest message.
        """
        with self.memory.at_hand(), source.memory.at_hand(), self._scope("copy_weights"):
            source.memory.require("copy_weights", ("params",))
            if self._inflow is None or self._inflow[0] is not source.state:
                self._inflow = source.state, weights.reallocation(source.state, self.state)
            stats = weights.reallocate(self._inflow[1], source.state, self.state)
        self.set_version(source.get_version())
        return stats

    def hf_state(self, *, grads: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors by HF name, adapters merged in, on rank 0; the other ranks iterate too and
        see none.

        With `grads`, the gradients of the last backward_batch in fp32; they are whole only without
        the distributed optimizer, which leaves each rank its own part. Those of adapters have
        PEFT's names. Memory: one bucket.
        """
        needs = ("params", "grads") if grads else ("params",)
        return weights.hf_state(self.state, grads, partial(self._scope, "hf_state", needs))

    def set_version(self, version: int) -> None:
        self._version = version
        if self._uploaded is not None and version < self._uploaded:
            self._uploaded = None  # back at earlier weights, whose versions count anew

    def get_version(self) -> int:
        return self._version

    # ---- memory --------------------------------------------------------------------------------

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        with self._scope("offload", ()):
            return self.memory.offload(parts)

    def onload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        return self.memory.onload(parts)

    def get_scheduling_config(self) -> dict[str, Any]:
        """What a launcher needs to place this engine's processes."""
        parallel = asdict(self.config.parallel)
        on_gpu = mcore.on_cuda()
        return {"gpus_per_process": int(on_gpu), "cpus_per_process": 4 if on_gpu else 1} | parallel
