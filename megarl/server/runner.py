"""The model behind the server: batched prefill and decode over a slot KV cache.

Any transformers causal LM with a plain LM head runs here whose layers have full or sliding-window
attention, with sinks or without, or a state that they keep in transformers' cache; `ModelRunner`
checks itself against the model's own attention when it starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.models.hf_config import load_transformers, wrapper_at
from megarl.parallel import cpu_kernels as products
from megarl.server.args import ServerArgs
from megarl.server.kv_cache import (
    ATTENTION,
    Decode,
    KVCache,
    Prefill,
    RowStates,
    has_states,
    kv_shape,
)
from megarl.server.sequence import PromptLogprobs, ServedSequence

logger = logging.getLogger(__name__)
_MAX_PREFILL_TOKENS = 16384  # padded prompt tokens in one prefill batch
_SHAPES = 512  # of products that stay known: six for each number of sequences decoded at once
_LONGEST_PROMPT_RATIO = 2  # the most that prompts in one prefill batch differ in length
_LOGITS = 512  # positions of a prompt whose logits [_LOGITS,V] are in memory at once


class ModelRunner:
    """Loads a model and runs it: prefill and decode of sequences that own rows of its KV cache.

    Raises ValueError where the model cannot be served, or where the cache is too small for one
    sequence.
    """

    def __init__(self, args: ServerArgs) -> None:
        self.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.deterministic = args.deterministic
        dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
        self.wrapper = wrapper_at(args.model_path)
        model = load_transformers(args.model_path, args.override, dtype=dtype)
        self.model: Any = model.to(self.device).eval().requires_grad_(False)
        _use_fitting_experts(self.model)
        _use_fast_products(self.model)
        self.config: Any = self.model.config
        self.dtype: torch.dtype = self.model.dtype
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.context_length = self._context_length(args)
        self.max_rows = args.max_running_requests
        self._has_states = has_states(self.config)
        state_bytes = self._self_check()
        self.max_total_tokens = args.max_total_tokens or self._fitting_tokens(state_bytes)
        if self.max_total_tokens < self.context_length:
            raise ValueError(
                f"--max-total-tokens={self.max_total_tokens} holds not even one sequence of "
                f"--context-length={self.context_length}; raise one or lower the other"
            )
        self.cache = self._new_cache(
            rows=self.max_rows, positions=self.context_length, tokens=self.max_total_tokens
        )
        self._routes = RouteRecorder(self.model) if args.enable_return_routed_experts else None

    def _new_cache(self, *, rows: int, positions: int, tokens: int) -> KVCache:
        return KVCache(
            self.config,
            dtype=self.dtype,
            device=self.device,
            max_rows=rows,
            max_positions=positions,
            max_tokens=tokens,
        )

    def _context_length(self, args: ServerArgs) -> int:
        longest = int(self.config.max_position_embeddings)
        if args.context_length is not None and args.context_length > longest:
            logger.warning(
                "--context-length=%d is beyond the %d positions the model is made for",
                args.context_length,
                longest,
            )
        return args.context_length or longest

    def _fitting_tokens(self, state_bytes: int) -> int:
        """Returns how many KV positions fit into the memory set aside for them, beside the states
        of all rows, at most what could ever be used."""
        layers, heads, *dims = kv_shape(self.config)
        per_token = len(layers) * heads * sum(dims) * self.dtype.itemsize
        free = _cache_memory(self.device) - self.max_rows * state_bytes
        if free < 0:
            raise ValueError(
                f"--max-running-requests={self.max_rows}: a sequence has states of {state_bytes} "
                f"bytes, and those of all are {-free} more than there is memory for; lower it"
            )
        fitting = free // max(1, per_token)
        return max(self.context_length, min(self.max_rows * self.context_length, fitting))

    @torch.inference_mode()
    def _self_check(self) -> int:
        """Raises ValueError unless our attention, states and head give the model's own logits, for
        4 prompt tokens and 1 decoded. Returns the bytes of a row's states."""
        ids = torch.arange(5, device=self.device)[None] % self.vocab_size
        want = self.model(ids, use_cache=False).logits[0, 3:].float()
        self.model.set_attn_implementation(ATTENTION)
        cache = self._new_cache(rows=1, positions=5, tokens=5)
        cache.reserve(1, 5, used=0)
        first = self._head(self._forward(ids[:, :4], 0, Prefill(cache, 0))[:, -1])
        plan = Decode(cache, 0, [4], exact=self.deterministic)
        second = self._head(self._forward(ids[:, 4:], 4, plan)[:, -1])
        got = torch.cat([first, second]).float()
        bound = 1e-3 if self.dtype == torch.float32 else 0.1
        if not bool(((got - want).abs() <= bound * (1 + want.abs().max())).all()):
            raise ValueError(
                f"{type(self.model).__name__}: the embedded server does not reproduce this model's "
                f"logits (off by {(got - want).abs().max():.2g}); it supports full and sliding-"
                "window attention, sinks, states that layers keep in transformers' cache, and an "
                "LM head without post-processing"
            )
        return sum(state.nbytes for state in cache.states.values())

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor | int, plan: Any) -> torch.Tensor:
        """Returns hidden states [B,S,H] of ids [B,S]; an int is the first column's position."""
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + ids.shape[1], device=ids.device)[None]
        states = None
        if self._has_states:
            rows = slice(plan.row, plan.row + len(ids))
            states = RowStates(plan.cache, rows, begin=isinstance(plan, Prefill))
        return self.model.base_model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=states,
            use_cache=False,
            plan=plan,
        ).last_hidden_state

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.get_output_embeddings()(hidden)

    @torch.inference_mode()
    def prefill(
        self, seqs: Sequence[ServedSequence], first_row: int
    ) -> tuple[list[ServedSequence], torch.Tensor]:
        """Fills the cache for `seqs` from `first_row` on; prompts that are equal, and of one extra
        key, are run once. In deterministic mode `decode` reads what was written, as the first
        time: a pass over all of it has other last bits.

        `make_room` comes first. Returns the sequences in the order of the rows they got, and
        logits [n,V] behind the last token that was read of each.
        """
        by_prompt: dict[tuple[str | None, tuple[int, ...]], list[ServedSequence]] = {}
        for s in seqs:
            s.read = s.length - s.written if self.deterministic else s.length
            by_prompt.setdefault((s.extra_key, tuple(s.tokens[: s.read])), []).append(s)
        groups = sorted(by_prompt.values(), key=lambda group: group[0].read)
        logits, row = [], first_row
        for chunk in self._chunks(groups):
            lengths = [group[0].read for group in chunk]
            ids = [g[0].tokens[:n] + [0] * (lengths[-1] - n) for g, n in zip(chunk, lengths)]
            plan = Prefill(self.cache, row)
            hidden = self._forward(torch.tensor(ids, device=self.device), 0, plan)
            routes = None if self._routes is None else self._routes.take(len(chunk))
            for i, group in enumerate(chunk):
                for s in group:
                    if routes is not None:
                        s.routes = [routes[i, : s.read]]
                    if s.prompt_top is not None and s.prompt_logprobs is None:
                        states = hidden[i, : len(s.prompt)]
                        s.prompt_logprobs = prompt_logprobs(
                            self._head, states, s.prompt, s.prompt_top
                        )
            last = torch.tensor(lengths, device=self.device) - 1
            logits.append(self._head(hidden[torch.arange(len(chunk), device=self.device), last]))
            row += len(chunk)
        order, source = self._share(groups, first_row)
        return order, torch.cat(logits)[torch.tensor(source, device=self.device)]

    def _share(
        self, groups: list[list[ServedSequence]], row: int
    ) -> tuple[list[ServedSequence], list[int]]:
        """Copies the row of each group's first sequence to the rows of its other sequences.

        Returns all sequences in the order of their rows and the group that each is of.
        """
        order, source = [group[0] for group in groups], list(range(len(groups)))
        for i, group in enumerate(groups):
            for s in group[1:]:
                s.cached_tokens = s.read - 1
                order.append(s)
                source.append(i)
        copies = range(len(groups), len(order))
        self.cache.copy_rows(
            [row + source[i] for i in copies], [row + i for i in copies], groups[-1][0].read
        )
        return order, source

    def _chunks(self, groups: list[list[ServedSequence]]) -> Iterator[list[list[ServedSequence]]]:
        """Cuts groups sorted by length so that padding and activations stay bounded. Padding would
        go on changing a state: prompts of models with states are padded to no other's length."""
        chunk: list[list[ServedSequence]] = []
        for group in groups:
            length = group[0].read
            if chunk and (
                self.deterministic
                or (self._has_states and length > chunk[0][0].read)
                or length > _LONGEST_PROMPT_RATIO * chunk[0][0].read
                or length * (len(chunk) + 1) > _MAX_PREFILL_TOKENS
            ):
                yield chunk
                chunk = []
            chunk.append(group)
        yield chunk

    @torch.inference_mode()
    def probe(self) -> None:
        """Raises where the model can compute nothing any more, as after the loss of a GPU."""
        cache = self._new_cache(rows=1, positions=1, tokens=1)
        cache.reserve(1, 1, used=0)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._head(self._forward(ids, 0, Prefill(cache, 0))).sum().item()

    def make_room(self, seqs: Sequence[ServedSequence], *, used: int) -> None:
        """Grows the cache to hold all tokens of `seqs`, which own the rows from 0 on; the first
        `used` rows keep their content."""
        self.cache.reserve(len(seqs), max(s.length for s in seqs), used=used)

    @torch.inference_mode()
    def decode(self, seqs: Sequence[ServedSequence], first_row: int = 0) -> torch.Tensor:
        """Reads one more token of `seqs`, which own the rows from `first_row` on; returns logits
        [n,V] behind it."""
        lengths = [s.read for s in seqs]
        plan = Decode(self.cache, first_row, lengths, exact=self.deterministic)
        ids = torch.tensor([s.unread for s in seqs], device=self.device)[:, None]
        hidden = self._forward(ids, plan.positions[:, None], plan)
        for s in seqs:
            s.read += 1
        if self._routes is not None:
            for s, routes in zip(seqs, self._routes.take(len(seqs)), strict=True):
                s.routes.append(routes)
        return self._head(hidden[:, -1])


def _use_fitting_experts(model: Any) -> None:
    """Has experts computed one by one where a row of their weights is no multiple of 16 bytes, as
    products of all at once need."""
    rows = (p.shape[-1] * p.element_size() for p in model.parameters() if p.ndim == 3)
    if any(size % 16 for size in rows):
        model.set_experts_implementation("eager")


def _use_fast_products(model: torch.nn.Module) -> None:
    """Has linear layers multiply by the faster of torch's libraries for CPUs."""
    if products.by_onednn():
        products.remember_shapes(_SHAPES)
    for layer in model.modules():
        if type(layer) is torch.nn.Linear:
            layer.forward = partial(products.linear, weight=layer.weight, bias=layer.bias)  # type: ignore[method-assign]


def _cache_memory(device: torch.device) -> int:
    """Returns bytes: most of what the model leaves free on a GPU, or a quarter of main memory."""
    if device.type == "cuda":
        return int(0.6 * torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, ids: list[int], top: int
) -> PromptLogprobs:
    """Returns those of a prompt by its hidden states [n,H]: log_softmax of what `head` makes of
    them, without a temperature, as SGLang's of a prompt."""
    tokens: list[list[Any]] = [[None, ids[0], None]]
    likeliest: list[list[list[Any]] | None] = [None]
    rest = torch.tensor(ids[1:], dtype=torch.long)
    for states, own_ids in zip(hidden[:-1].split(_LOGITS), rest.split(_LOGITS), strict=True):
        logprobs = head(states).float().log_softmax(-1)
        own = logprobs.gather(-1, own_ids.to(logprobs.device)[:, None])[:, 0].tolist()
        tokens += [[lp, token, None] for lp, token in zip(own, own_ids.tolist(), strict=True)]
        values, which = (x.tolist() for x in logprobs.topk(top))
        pairs = zip(values, which, strict=True)
        likeliest += [[[lp, i, None] for lp, i in zip(*pair, strict=True)] for pair in pairs]
    return PromptLogprobs(tokens, likeliest)


class RouteRecorder:
    """Notes what the routers of `model` chose in the pass that ran last.

    A router is the `gate` or `router` of a layer's `mlp`, as in transformers' models with experts;
    it answers with logits, weights and the numbers of the chosen experts. Raises ValueError for a
    model without.
    """

    def __init__(self, model: Any) -> None:
        layers = model.base_model.layers
        gates = {i: gate for i, layer in enumerate(layers) if (gate := _gate(layer)) is not None}
        if not gates:
            raise ValueError(
                f"--enable-return-routed-experts: {type(model).__name__} has no experts to route "
                "to; leave it out"
            )
        self._layers, self._chosen = len(layers), dict[int, Tensor]()
        for i, gate in gates.items():
            gate.register_forward_hook(partial(self._note, i))

    def _note(self, layer: int, _gate: Any, _args: Any, out: Any) -> None:
        self._chosen[layer] = out[2]

    def take(self, rows: int) -> Tensor:
        """Returns the routes [rows,S,L,k] of a pass of `rows` sequences; 0 in dense layers."""
        some = next(iter(self._chosen.values()))
        out = some.new_zeros(len(some), self._layers, some.shape[-1])
        for layer, chosen in self._chosen.items():
            out[:, layer] = chosen
        return out.to(torch.int16).cpu().unflatten(0, (rows, -1))


def _gate(layer: Any) -> Any:
    """Returns a layer's router; None in a dense layer."""
    mlp = getattr(layer, "mlp", None)
    gate = getattr(mlp, "gate", getattr(mlp, "router", None))
    return gate if isinstance(gate, torch.nn.Module) else None
