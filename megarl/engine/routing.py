"""Measures how evenly the routers of a mixture-of-experts model load the experts, records what they
chose, and replays that choice.

Rounding, or another implementation of the same model, can send a token to other experts and change
its logprob by far more than rounding should. An update that replays the routing of the logp pass
compares like with like, and so does a logp pass that replays the server's (Ma et al., Stabilizing
MoE RL by aligning training and inference routers, 2025, arXiv 2510.11370). A token whose routes are
unknown, -1, goes where its router sends it.

B sequences of the batch, b of a micro-batch, S positions, T packed tokens of this rank, L
layers, E experts, k experts per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.engine import TrainEngineConfig
from megarl.engine.micro_batch import MicroBatch, Result, ResultRows, Writes
from megarl.models.hf_config import ModelConfig
from megarl.models.options import EngineOptions
from megarl.parallel import mcore
from megarl.parallel.groups import ProcessGroups

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

ROUTED = "routed_experts"  # output and batch key: [B,S,L,k], expert numbers, 0 in dense layers


# (scores [T,E], k, groups, groups a token may go to) -> (scores of the chosen experts, numbers)
Choose = Callable[..., tuple[Tensor, Tensor]]


class RouterTape:
    """Records and replays the choices of one router, in the place of megatron-core's RouterReplay
    (which keeps the routers of all engines in one list, and has to be told when a recomputation
    begins).

    given:    what to choose in the micro-batch that comes next [T,k], -1 for a token that its
              router sends; None lets the router send all.
    recorded: what was chosen, one tensor a micro-batch, if a list.
    counts:   [E+2], tokens by expert, then the choices that were given and those of them that the
              router would not have made.
    """

    def __init__(self, router: TopKRouter) -> None:
        assert hasattr(router, "router_replay"), "megatron-core >= 0.16.1 calls router_replay"
        self._model_choice = router.router_replay  # of a model that does not choose as usual
        router.router_replay = self
        self.layer: int = router.layer_number - 1  # megatron counts from 1
        self.router = router
        self.counts = torch.zeros(router.num_experts + 2, dtype=torch.long, device=mcore.device())
        self.recorded: list[Tensor] | None = None
        self.given: Tensor | None = None
        self._recomputed_later: deque[Tensor] = deque()

    def start(self, *, record: bool) -> None:
        """Begins a pass: sets the counts to zero, and with `record` keeps every choice."""
        self.counts.zero_()
        self.recorded = [] if record else None

    def stop(self) -> None:
        """Ends a pass: forgets what was given and recorded, but not the counts."""
        self.given = self.recorded = None
        self._recomputed_later.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Choose,
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, their numbers), [T,k]; the router calls it."""
        how = (topk, num_groups, group_topk)
        if self.given is None:
            values, chosen = self._own(scores, how, compute_topk)
        else:
            _, own = self._own(scores.detach(), how, compute_topk)
            chosen = self._or_own(self._replayed(self.given), own)
            values = scores.gather(1, chosen)
        flat = chosen.flatten()
        self.counts.scatter_add_(0, flat, torch.ones_like(flat))
        if self.recorded is not None:
            self.recorded.append(chosen)
        return values, chosen

    def _own(
        self, scores: Tensor, how: tuple[int, int | None, int | None], compute_topk: Choose
    ) -> tuple[Tensor, Tensor]:
        """Returns what get_replay_topk does, as the model chooses."""
        if self._model_choice is None:
            return compute_topk(scores, *how)
        chosen: tuple[Tensor, Tensor] = self._model_choice.get_replay_topk(
            scores, *how, compute_topk
        )
        return chosen

    def _or_own(self, given: Tensor, own: Tensor) -> Tensor:
        """Returns the choices [T,k] that were given, and the router's own where none was. Counts
        how the two differ, in whatever order they name a token's experts."""
        is_given = given >= 0
        differs = is_given & (given[:, :, None] != own[:, None]).all(2)
        self.counts[-2:] += torch.stack([is_given.sum(), differs.sum()])
        return torch.where(is_given, given, own)

    def _replayed(self, given: Tensor) -> Tensor:
        """Returns the choice of the micro-batch at hand. Under recomputation a micro-batch comes
        twice: without gradients, and, when later ones may have come already, with them. Each
        pipeline chunk goes back in the order it went forth."""
        if torch.is_grad_enabled():
            return self._recomputed_later.popleft() if self._recomputed_later else given
        if self.router.training:
            self._recomputed_later.append(given)
        return given


class Routing:
    """Holds the tapes of an engine's chunks: replays routing, collects and measures it."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        model: ModelConfig,
        config: TrainEngineConfig,
        groups: ProcessGroups,
    ) -> None:
        self.model, self.shape, self.groups = model, model.experts, groups
        self.replays, self.options = config.replays, EngineOptions(**config.options)
        self._tapes = {
            chunk: [RouterTape(m) for m in chunk.modules() if isinstance(m, TopKRouter)]
            for chunk in chunks
        }

    @property
    def tapes(self) -> Iterator[RouterTape]:
        """Returns the tapes of all chunks."""
        return (tape for tapes in self._tapes.values() for tape in tapes)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the smallest integers that hold the number of an expert."""
        experts = self.shape.num_experts
        bounds = {torch.uint8: 1 << 8, torch.int16: 1 << 15, torch.int32: 1 << 31}
        return next(dtype for dtype, bound in bounds.items() if experts <= bound)

    @contextmanager
    def of_pass(self, *, record: bool = False) -> Iterator[None]:
        """Starts the tapes before all micro-batches of a pass and stops them after it."""
        moe_utils.clear_aux_losses_tracker()
        for tape in self.tapes:
            tape.start(record=record)
        try:
            yield
        finally:
            for tape in self.tapes:
                tape.stop()

    def prepare(self, chunk: torch.nn.Module, mb: MicroBatch) -> None:
        """Gives the tapes the choices for `mb` before `chunk` meets it: with router_replay, the
        batch says who is routed where, as far as it knows. Raises ValueError for a batch of other
        layers or experts than the model's."""
        tapes = self._tapes[chunk]
        if not self.replays or ROUTED not in mb.source or not tapes:
            return
        layers, top_k = mb.source[ROUTED].values.shape[1:]
        if (layers, top_k) != (self.model.num_layers, self.shape.top_k):
            raise ValueError(
                f"batch[{ROUTED!r}] has {layers} layers of {top_k} experts, the "
                f"model {self.model.num_layers} of {self.shape.top_k}"
            )
        first = tapes[0].layer
        given = mb.inner(ROUTED, slice(first, tapes[-1].layer + 1)).flatten(0, 1)  # [b*S,l,k]
        given = torch.cat([given, given.new_zeros(1, *given.shape[1:])])  # filling's, token -1
        given = mcore.to_device(given)
        token = mb.tokens(self.groups.layout, self.groups.coords.tp)
        filling = (token < 0)[:, None]  # it goes where its router sends it
        for tape in tapes:
            tape.given = given[token, tape.layer - first].long().masked_fill(filling, -1)

    def padding_mask(self, chunk: torch.nn.Module, mb: MicroBatch) -> Tensor | None:
        """Returns which tokens of `chunk` are padding, bool [1,T]; None if no option of the routers
        counts tokens. The first chunk takes the tokens of all tensor-parallel ranks."""
        options = self.options
        if not (
            options.moe_aux_loss_coeff
            or options.moe_z_loss_coeff
            or options.moe_router_bias_update_rate
        ):
            return None
        own = mb.tokens(self.groups.layout, self.groups.coords.tp)
        return (mb.packed.token if chunk.pre_process else own)[None] < 0

    def results(self, micro_batches: Sequence[MicroBatch], at: ResultRows) -> Iterator[Result]:
        """Yields what was chosen, [T,L,k] in the smallest integers that hold an expert's number.
        Inside a recording pass."""
        inner = self.model.num_layers, self.shape.top_k
        yield ROUTED, inner, self.dtype, self._writes(micro_batches, at)

    def _writes(self, micro_batches: Sequence[MicroBatch], at: ResultRows) -> Writes:
        # with experts, tensor parallelism shares the tokens out, too: each has one owner
        for i, mb in enumerate(micro_batches):
            places, real = at.of_layers(mb)
            for tape in self.tapes:
                assert tape.recorded is not None
                yield (places, tape.layer), tape.recorded[i][real]

    def metrics(self, n_micro_batches: int) -> dict[str, float]:
        """Returns the balance of the experts' loads, auxiliary losses where they are on, and the
        share of replayed choices that the routers would not have made, if there were any, after a
        pass. Collective."""
        layout, n_layers = self.groups.layout, self.model.num_layers
        counts = torch.zeros(
            n_layers, self.shape.num_experts + 2, dtype=torch.long, device=mcore.device()
        )
        for tape in self.tapes:
            counts[tape.layer] = tape.counts
        aux = ("load_balancing_loss", "z_loss")
        losses = torch.stack([_aux(name, n_layers) for name in aux])
        if layout.world_size > 1:
            dist.all_reduce(counts)
            dist.all_reduce(losses)
        layers = [i for i in range(n_layers) if i not in self.shape.dense_layers]
        whole = torch.cat([counts.double(), losses.double().t()], 1).cpu()[layers]  # in one go
        counts, losses = whole[:, :-2].long(), whole[:, -2:].float().mean(0) / n_micro_batches
        load = counts[:, :-2].float()
        peaks = load.amax(1) / load.mean(1)
        out = {
            "moe/load_max_over_mean": float(peaks.mean()),
            "moe/idle_experts": float((load == 0).float().mean()),
        }
        if self.options.load_per_layer:
            named = zip(layers, peaks.tolist(), strict=True)
            out |= {f"moe/load_max_over_mean/layer_{i}": peak for i, peak in named}
        if self.options.moe_aux_loss_coeff:
            out["moe/aux_loss"] = float(losses[0]) / layout.dp
        if self.options.moe_z_loss_coeff:
            out["moe/z_loss"] = float(losses[1]) / (layout.world_size // layout.pp)
        replayed, flipped = counts[:, -2:].sum(0).tolist()
        return out | ({"moe/replay_flips": flipped / replayed} if replayed else {})


def _aux(name: str, layers: int) -> Tensor:
    """Returns this rank's sums over micro-batches, by layer; megatron-core divides by
    coefficients."""
    tracked: Any = moe_utils.get_moe_layer_wise_logging_tracker().get(name)
    return tracked["values"] if tracked else torch.zeros(layers, device=mcore.device())
