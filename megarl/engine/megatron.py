"""MegatronEngine: TrainEngine on megatron-core, one process per device.

The same code runs over NCCL on GPUs and over gloo on CPUs. Every method is a collective over the
world: all ranks call it with the same arguments.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.engine import PARTS, Batch, LossFn, LossWeightFn, TrainEngine
from megarl.api.records import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from megarl.ckpt.hf import load_hf, save_hf
from megarl.ckpt.peft import load_peft, save_peft
from megarl.config.engine import TrainEngineConfig
from megarl.engine import checkpoint, micro_batch, optimizer, schedule
from megarl.engine.lm_head import LMHead, check_outputs, output_widths
from megarl.engine.micro_batch import MicroBatch
from megarl.engine.offload import (
    ParkedStorages,
    check_parts,
    gradient_tensors,
    memory_in_use,
    optimizer_tensors,
)
from megarl.engine.routing import ROUTED, Routing
from megarl.models import build_model, check_layout, named_params, read_hf_config
from megarl.models.adapters import Adapters, base_params
from megarl.models.build import resolve_attention
from megarl.models.context_parallel import resolve_cp_comm_type
from megarl.models.flops import sequence_cost
from megarl.models.fp8 import fp8_fields, token_unit
from megarl.models.gather import BucketGatherer, plan_buckets
from megarl.models.lora import lora_fields
from megarl.models.recompute import recompute_fields
from megarl.observability.logging import get_logger
from megarl.parallel import mcore
from megarl.parallel.groups import ProcessGroups, init_distributed, model_scope, waiting_for
from megarl.parallel.layout import Layout
from megarl.parallel.packing import check_right_padded
from megarl.weight_sync import WeightSender

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # isort: skip
from megatron.core.transformer.module import Float16Module  # isort: skip

log = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STATE_BUCKET_BYTES = 256 << 20


class MegatronEngine(TrainEngine):
    """One model in one layout. `initialize` makes it real, `destroy` gives everything back."""

    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        self.config, self.seed = config, seed
        self._version = 0
        self.chunks: list[torch.nn.Module] = []
        self.params: dict[str, torch.Tensor] = {}
        self._training = config.optimizer is not None
        self._routing: Routing | None = None
        self._groups: ProcessGroups | None = None
        self._optimizer: Any = None
        self._lr_schedule: Any = None
        self._parked = ParkedStorages()
        self._sender: WeightSender | None = None
        self._adapters: Adapters | None = None

    # ---- life ----------------------------------------------------------------------------------

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        if self._groups is not None:
            raise ValueError("initialize() was called twice; call destroy() in between")
        cfg = self.config
        init_distributed(addr)
        self.model_config = read_hf_config(cfg.path, head=cfg.head)
        check_layout(self.model_config, cfg.parallel)
        self._widths = output_widths(self.model_config.vocab_size, cfg.lm_head_topk)
        self.layout = Layout.from_config(cfg.parallel, dist.get_world_size())
        self._sequence_cost = sequence_cost(self.model_config)
        self._cp_comm_type = resolve_cp_comm_type(
            self.model_config, cfg.parallel, resolve_attention(cfg.attention, mcore.device())
        )
        self._recompute = recompute_fields(cfg, self.layout, self.model_config.num_layers)
        self.dtype = self._resolve_dtype()
        self._check_precision()
        self._groups = ProcessGroups(self.layout)
        with self._scope("initialize"):
            self._build()
            if cfg.optimizer is not None:
                self._optimizer = optimizer.build_optimizer(cfg.optimizer, self.chunks, self.dtype)
                self._lr_schedule = optimizer.build_schedule(
                    cfg.optimizer, self._optimizer, ft_spec
                )
            self.train(self._training)
        if cfg.offload:
            self.offload(("params",))

    def _resolve_dtype(self) -> torch.dtype:
        name = self.config.dtype
        if name == "auto":
            name = "bfloat16" if mcore.on_cuda() else "float32"
        if name not in _DTYPES:
            raise ValueError(f"dtype={name!r}: use 'auto' or one of {sorted(_DTYPES)}")
        return _DTYPES[name]

    def _check_precision(self) -> None:
        cfg = self.config
        self._fp8 = fp8_fields(
            cfg.fp8, self.model_config, self.layout, dtype=self.dtype,
            attention=resolve_attention(cfg.attention, mcore.device()),
        )  # fmt: skip
        if cfg.optimizer is not None:
            optimizer.check(cfg.optimizer, self.dtype)
            if cfg.offload:
                raise ValueError(
                    "offload=True is for frozen models, and this one has an optimizer; use "
                    "engine.offload() and onload(), or optimizer.cpu_offload"
                )

    def _build(self) -> None:
        """Model, precision, weights, data parallelism; in this order, since what converts makes new
        buffers, and what is data-parallel moves the weights."""
        cfg, groups = self.config, self.groups
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay its own
            model_parallel_cuda_manual_seed(self.seed)
            built = build_model(
                self.model_config, self.layout, dtype=self.dtype, device=mcore.device(),
                attention=cfg.attention,
                seed=self.seed if cfg.init_from_scratch else None, moe=cfg.moe,
                cp_comm_type=self._cp_comm_type, **self._recompute, **self._fp8,
                **lora_fields(self.model_config, cfg.lora),
            )  # fmt: skip
        self.table = built.table
        if self.model_config.moe is not None:
            self._routing = Routing(built.chunks, self.model_config, cfg.moe, groups)
        chunks: list[torch.nn.Module] = list(built.chunks)
        for chunk in built.chunks:
            if chunk.post_process and cfg.head == "lm":
                chunk.output_layer = LMHead(
                    chunk.output_layer,
                    vocab_size=self.model_config.vocab_size,
                    tp_group=groups.tp,
                    sequence_parallel=self.layout.sequence_parallel,
                    chunk_tokens=cfg.lm_head_chunk_tokens,
                    keep_bytes=cfg.lm_head_keep_mb << 20,
                    topk=cfg.lm_head_topk,
                )
        if self.dtype != torch.float32:
            chunks = [Float16Module(built.config, chunk) for chunk in chunks]
        self.params = named_params(chunks)
        if not cfg.init_from_scratch:
            self._load_hf(cfg.path)
        if cfg.lora is not None:
            self._adapters = Adapters(
                built.chunks, self.model_config, self.layout, cfg.lora, dtype=self.dtype,
                device=mcore.device(), seed=self.seed,
            )  # fmt: skip
            self.params = named_params(chunks)
            if cfg.lora.adapter_path:
                load_peft(cfg.lora.adapter_path, self._adapters)
        if cfg.optimizer is None:
            for param in self.params.values():
                param.requires_grad_(False)
        else:
            chunks = optimizer.wrap_chunks(built.config, chunks, cfg.optimizer)
        self.chunks = chunks

    def _load_hf(self, path: str) -> None:
        seed = self.seed if self.config.value_head_init == "random" else None
        load_hf(
            path, self.table, self.layout, self.groups.rank, base_params(self.params),
            head_seed=seed,
        )  # fmt: skip

    def destroy(self) -> None:
        if self._groups is None:
            return
        if self._sender is not None:
            self._sender.close()
        self._sender = self._adapters = self._optimizer = self._lr_schedule = self._routing = None
        self._parked = ParkedStorages()
        self.chunks, self.params = [], {}
        gc.collect()
        torch.cuda.empty_cache()
        groups, self._groups = self._groups, None
        with waiting_for(groups, "destroy"):
            groups.barrier()
            groups.release()

    @property
    def groups(self) -> ProcessGroups:
        if self._groups is None:
            raise RuntimeError("the engine is not initialized: call initialize() first")
        return self._groups

    @contextmanager
    def _scope(self, what: str, needs: Sequence[str] = ("params",)) -> Iterator[None]:
        """megatron-core's globals are ours, and a wait that fails says who waited for what."""
        if away := tuple(part for part in needs if part in self._parked):
            raise RuntimeError(f"{what} needs {away}, which are offloaded; call onload({away})")
        with model_scope(self.groups), waiting_for(self.groups, what):
            yield

    def train(self, mode: bool = True) -> MegatronEngine:
        self._training = mode
        for chunk in self.chunks:
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

    # ---- training ------------------------------------------------------------------------------

    def train_batch(
        self, input_: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        stats = self.backward_batch(
            input_, loss_fn, loss_weight_fn, outputs=outputs, temperature=temperature,
            whole_groups=whole_groups,
        )  # fmt: skip
        with self._scope("train_batch (optimizer step)", PARTS):
            lr = optimizer.current_lr(self._optimizer)
            return {**stats, "lr": lr, **optimizer.step(self._optimizer, stats["loss"])}

    def backward_batch(
        self, input_: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """train_batch without its optimizer step: the gradients stay in place (see `hf_state`)."""
        if self._optimizer is None:
            raise ValueError("this engine has no optimizer: set its `optimizer` to train it")
        if self.config.moe.router_replay and ROUTED not in input_:
            raise ValueError(
                f"moe.router_replay=True: the batch has no {ROUTED!r} to replay; put forward()'s "
                "output of that name into it, as an actor with recompute_logprob does"
            )
        with self._scope("train_batch", PARTS), self._mode(True):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()  # type: ignore[operator]
            self._optimizer.zero_grad()
            return self._loss_pass(
                input_, loss_fn, loss_weight_fn, outputs, temperature, whole_groups, backward=True
            )

    def eval_batch(
        self, input_: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        with self._at_hand(), self._scope("eval_batch"), self._mode(False), torch.no_grad():
            return self._loss_pass(
                input_, loss_fn, loss_weight_fn, outputs, temperature, whole_groups, backward=False
            )

    def _loss_pass(
        self, input_: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn,
        outputs: Sequence[str], temperature: float, whole_groups: bool, *, backward: bool,
    ) -> dict[str, float]:  # fmt: skip
        plan = self._plan(input_, whole_groups, backward=backward)
        weight = float(loss_weight_fn(input_))
        if not weight > 0:
            raise ValueError(
                f"loss_weight_fn gave {weight} for the whole batch, but the loss is divided by it; "
                "is there nothing to train on (loss_mask all False)?"
            )
        mine = self._mine(input_, plan)
        job = schedule.Pass(
            outputs=check_outputs(outputs, self.config.head, backward=backward),
            temperature=_checked_temperature(temperature),
            cp_group=self.groups.cp,
            loss_fn=loss_fn,
            loss_scale=len(mine) * self.layout.dp / weight,
            routing=self._routing,
        )
        with self._taped():
            schedule.run(self.chunks, mine, job, backward=backward)
        sums = schedule.reduce_sums(job, self.groups)
        routing = self._routing.figures(len(mine)) if self._routing else {}
        loss_sum, _ = sums.pop("loss")
        means = {k: s / w if w else float("nan") for k, (s, w) in sums.items()}
        return {"loss": loss_sum / weight, **means, **routing}

    def _taped(self, *, record: bool = False) -> AbstractContextManager[None]:
        if self._routing is not None:
            return self._routing.of_pass(record=record)
        if record:
            raise ValueError(f"outputs: {ROUTED!r} needs a mixture-of-experts model")
        return nullcontext()

    def forward(
        self, input_: Batch, output_seqlens: Sequence[int] | None = None,
        post_hook: Callable[[Batch, Batch], Any] | None = None,
        aggregate_fn: Callable[[list[Any]], Any] = torch.cat, *,
        outputs: Sequence[str] = ("logprobs",), temperature: float = 1.0,
    ) -> Any:  # fmt: skip
        """See TrainEngine. With `output_seqlens` or `post_hook` every sequence is taken by itself:
        its outputs {name: [n]} (the first output_seqlens[i] positions, all S by default) and its
        row of the batch go through `post_hook`, and `aggregate_fn` joins the list.
        """
        with self._at_hand(), self._scope("forward"), self._mode(False), torch.no_grad():
            plan = self._plan(input_, backward=False)
            mine = self._mine(input_, plan)
            job = schedule.Pass(
                outputs=check_outputs([o for o in outputs if o != ROUTED], self.config.head),
                temperature=_checked_temperature(temperature),
                cp_group=self.groups.cp,
                routing=self._routing,
            )  # fmt: skip
            shape = input_["input_ids"].shape
            with self._taped(record=ROUTED in outputs):
                schedule.run(self.chunks, mine, job, backward=False)
                result = schedule.collect_outputs(job, mine, shape, self.groups, extra=self._widths)
                if self._routing is not None and ROUTED in outputs:
                    result[ROUTED] = self._routing.collect(mine, shape)
        if output_seqlens is None and post_hook is None:
            return result if len(result) > 1 else result[job.outputs[0]]
        return aggregate_fn(_by_sequence(result, input_, output_seqlens, post_hook))

    def _plan(
        self, input_: Batch, whole_groups: bool = False, *, backward: bool
    ) -> list[list[list[int]]]:
        check_right_padded(input_)
        spec = self.config.mb_spec
        larger = None if backward else spec.forward_max_tokens_per_mb
        return micro_batch.plan(
            input_, self.layout, larger or spec.max_tokens_per_mb, self._sequence_cost,
            whole_groups=whole_groups, token_unit=token_unit(self.config.fp8),
        )  # fmt: skip

    def _mine(self, input_: Batch, plan: list[list[list[int]]]) -> list[MicroBatch]:
        c = self.groups.coords
        return micro_batch.build(
            input_, plan[c.dp], self.layout, cp_rank=c.cp, token_unit=token_unit(self.config.fp8)
        )

    def step_lr_scheduler(self) -> None:
        if self._lr_schedule is None:
            raise ValueError("this engine has no optimizer, so no learning-rate schedule")
        self._lr_schedule.step(1)

    # ---- weights -------------------------------------------------------------------------------

    def save(self, meta: SaveLoadMeta) -> None:
        self._check_meta(meta)
        with self._scope("save", ("params", "optimizer") if meta.with_optim else ("params",)):
            optimizer.gather_params(self.chunks)
            if meta.weight_format == "dist":
                checkpoint.save(self._trainee(), meta.path, meta.with_optim, self._version)
            elif meta.weight_format == "peft":
                assert self._adapters is not None
                save_peft(
                    meta.path, self._adapters, self.layout, self.groups.rank,
                    base_model_path=meta.base_model_path or self.config.path,
                )  # fmt: skip
            else:
                save_hf(
                    meta.path, self.table, self.layout, self.groups.rank, self._whole_weights(),
                    base_model_path=meta.base_model_path or self.config.path,
                    tokenizer=meta.tokenizer,
                )  # fmt: skip
            self.groups.barrier()

    def load(self, meta: SaveLoadMeta) -> None:
        self._check_meta(meta)
        with self._scope("load", ("params", "optimizer")):
            if meta.weight_format == "dist":
                found = checkpoint.load(self._trainee(), meta.path, meta.with_optim)
                if meta.with_optim:
                    self._version = found["version"]
            else:
                self._load_weights(meta)
                if self._optimizer is not None:
                    optimizer.reload_main_params(self._optimizer)
            self.groups.barrier()

    def _load_weights(self, meta: SaveLoadMeta) -> None:
        """Whole weights come without adapters: these start anew."""
        if meta.weight_format == "peft":
            assert self._adapters is not None
            load_peft(meta.path, self._adapters)
            return
        self._load_hf(meta.path)
        if self._adapters is not None:
            self._adapters.reset(self.seed)

    def _check_meta(self, meta: SaveLoadMeta) -> None:
        trained, adapted = self._optimizer is not None, self._adapters is not None
        checkpoint.check_meta(meta, trained=trained, adapted=adapted)

    def _whole_weights(self) -> Mapping[str, torch.Tensor]:
        """The model's weights by name; adapters are merged in as they are asked for."""
        return self._adapters.merged(self.params) if self._adapters else self.params

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Within it, `forward` and the like run the model below the adapters: the reference of a
        policy trained with LoRA, at no cost in memory. Exports are not affected."""
        if self._adapters is None:
            raise ValueError("this engine has no adapters to disable: set its `lora`")
        return self._adapters.disabled()

    def _trainee(self) -> checkpoint.Trainee:
        return checkpoint.Trainee(
            model=self.model_config, dtype=self.dtype, groups=self.groups, chunks=self.chunks,
            optimizer=self._optimizer, schedule=self._lr_schedule, seed=self.seed,
            lora=self.config.lora,
        )  # fmt: skip

    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        with self._scope("upload_weights"):
            optimizer.gather_params(self.chunks)
            if self._sender is None:
                self._sender = WeightSender(
                    self.table, self.layout, self.groups.rank, self._whole_weights(),
                    self.groups.world, dtype=self.dtype if self._adapters else None,
                )  # fmt: skip
            stats: dict[str, float] = self._sender.upload(meta)
        return stats

    def hf_state(self, *, grads: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors by HF name, adapters merged in, on rank 0; the other ranks iterate too and
        see none.

        With `grads`, the gradients of the last backward_batch in fp32; they are whole only without
        the distributed optimizer, which leaves each rank its own part. Those of adapters have
        PEFT's names. Memory: one bucket.
        """
        values, table = self._whole_weights(), self.table
        if grads:
            if self._optimizer is None:
                raise ValueError("this engine has no optimizer, so it keeps no gradients")
            table = self._adapters.table if self._adapters else table.trained
            trained = {n: p for n, p in self.params.items() if p.requires_grad}
            values = {n: p.main_grad for n, p in trained.items()}  # type: ignore[attr-defined]
        dtype = torch.float32 if grads else self.dtype
        buckets = plan_buckets(table, dtype, _STATE_BUCKET_BYTES)
        gatherer = BucketGatherer(
            table, self.layout, self.groups.rank, values, buckets, device=mcore.device()
        )
        for bucket in buckets:
            with self._scope("hf_state", ("params", "grads") if grads else ("params",)):
                optimizer.gather_params(self.chunks)
                flat = gatherer.gather(bucket)
            if flat is not None:
                yield from bucket.views(flat)

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    # ---- memory --------------------------------------------------------------------------------

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        parts = tuple(p for p in check_parts(parts) if p not in self._parked)
        before, freed = memory_in_use(), {}
        with self._scope("offload", ()):
            optimizer.gather_params(self.chunks if "params" in parts else ())
            for part in parts:
                owned = [t for p in PARTS[: PARTS.index(part)] for t in self._tensors(p)]
                freed[part] = self._parked.park(
                    part, self._tensors(part), keep=part != "grads", but_not=owned
                )
        return self._moved("offload", freed, before)

    def onload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        before = memory_in_use()
        taken = {p: self._parked.restore(p) for p in check_parts(parts) if p in self._parked}
        return self._moved("onload", taken, before)

    def _moved(self, verb: str, moved: dict[str, int], before: int) -> dict[str, int]:
        after = memory_in_use()
        each = ", ".join(f"{part} {n / 1e6:.1f} MB" for part, n in moved.items()) or "nothing"
        say = log.debug if self.config.offload else log.info  # twice a pass, or when asked to
        say("%s: %s; in use %.1f -> %.1f MB", verb, each, before / 1e6, after / 1e6)
        return {**moved, "in_use_before": before, "in_use_after": after}

    def _tensors(self, part: str) -> list[torch.Tensor]:
        if part == "params":
            return list(self.params.values())
        if self._optimizer is None:
            return []
        if part == "grads":
            return list(gradient_tensors(self.chunks))
        return list(optimizer_tensors(self._optimizer))

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """A pass of a model whose weights rest in host memory (`offload` of its config)."""
        resting = self.config.offload and "params" in self._parked
        if resting:
            self.onload(("params",))
        try:
            yield
        finally:
            if resting:
                self.offload(("params",))

    def get_scheduling_config(self) -> dict[str, Any]:
        """What a launcher needs to place this engine's processes."""
        parallel = asdict(self.config.parallel)
        on_gpu = mcore.on_cuda()
        return {"gpus_per_process": int(on_gpu), "cpus_per_process": 4 if on_gpu else 1} | parallel


def _checked_temperature(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: logits are divided by it, it must be > 0")
    return float(temperature)


def _by_sequence(
    outputs: Batch, batch: Batch, output_seqlens: Sequence[int] | None,
    post_hook: Callable[[Batch, Batch], Any] | None,
) -> list[Any]:  # fmt: skip
    rows = len(batch["input_ids"])
    if output_seqlens is not None and len(output_seqlens) != rows:
        raise ValueError(f"output_seqlens has {len(output_seqlens)} entries for {rows} sequences")
    if post_hook is None and len(outputs) > 1:
        raise ValueError(f"several outputs {tuple(outputs)} by sequence need a post_hook")
    results = []
    for i in range(rows):
        n = None if output_seqlens is None else output_seqlens[i]
        mine = {name: values[i, :n] for name, values in outputs.items()}
        row = {name: values[i] for name, values in batch.items()}
        results.append(post_hook(mine, row) if post_hook else next(iter(mine.values())))
    return results
