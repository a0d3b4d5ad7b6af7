"""Puts a server together: the model, its scheduler, its tokenizer, its weight updates; and gives
its memory back for a while, by SGLang's tags.

As in SGLang, weights come back empty, unless the server keeps a copy in host memory
(--enable-weights-cpu-backup), and the KV cache comes back flushed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from megarl.server.args import ServerArgs
from megarl.server.kv_cache import KVCache
from megarl.server.protocol import ControlError, GenerateBody, SamplingParams, ServerError
from megarl.server.runner import ModelRunner
from megarl.server.scheduler import Scheduler
from megarl.server.sequence import DEFAULT_MAX_NEW_TOKENS, ServedSequence, TextTools, eos_token_ids
from megarl.server.updates import WeightUpdates
from megarl.server.weights import WeightStore

T = TypeVar("T")


class ServerCore:
    """Holds the parts of a server below its HTTP face. `on_death` is called, in the scheduler's
    thread, when the generation loop fails."""

    def __init__(self, args: ServerArgs, *, on_death: Callable[[], None]) -> None:
        self.args = args
        # OpenMP gives workers to each thread that computes; with more workers than cores they sleep
        # between operations. So only the scheduler's thread has workers.
        threads = args.threads or torch.get_num_threads()
        torch.set_num_threads(1)
        self.runner = ModelRunner(args)
        self.text = TextTools(args.model_path)
        self.model_path = args.model_path
        _make_resizable(self.runner.model)
        self.updates = WeightUpdates(
            WeightStore(self.runner.model, self.runner.wrapper),
            self.runner.device,
            timeout=args.dist_timeout,
        )
        self.occupation = Occupation(
            self.runner.model,
            self.runner.cache,
            self.updates,
            keep=args.enable_weights_cpu_backup,
        )
        eos = eos_token_ids(args.model_path, self.runner.config, self.text.tokenizer)
        self._eos = eos & frozenset(range(self.runner.vocab_size))
        self._rng = np.random.default_rng(args.random_seed)  # of requests that bring no seed
        self.scheduler = Scheduler(
            self.runner,
            self.text,
            notify=self._notify,
            on_death=on_death,
            unfit=self.occupation.unfit,
            threads=threads,
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the scheduler. Call it in the event loop that serves requests."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    def check_alive(self) -> None:
        """Raises ServerError (503) where the generation loop has ended."""
        if not self.scheduler.alive:
            raise ServerError(self.scheduler.error or "the server is stopping", status=503)

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Returns fn(*args), run in the scheduler's thread before its next step."""
        return await asyncio.wrap_future(self.scheduler.call(functools.partial(fn, *args)))

    def sequences(self, prompts: list[GenerateBody]) -> list[ServedSequence]:
        """Returns what a request asks to write. Raises ServerError for what this model cannot do.
        Call it in the event loop."""
        return [self._sequence(prompt) for prompt in prompts]

    def _sequence(self, asked: GenerateBody) -> ServedSequence:
        prompt, params = asked.input_ids, asked.sampling_params
        vocab_size = self.runner.vocab_size
        for name, ids in (("input_ids", prompt), ("stop_token_ids", params.stop_token_ids)):
            for bad in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= bad < vocab_size:
                    raise ServerError(
                        f"{name} contains token id {bad}, outside the vocabulary of {vocab_size} "
                        "tokens"
                    )
        if params.stop and self.text.tokenizer is None:
            raise ServerError("stop needs a tokenizer and this model has none; use stop_token_ids")
        if asked.top_logprobs_num > vocab_size:
            raise ServerError(
                f"top_logprobs_num={asked.top_logprobs_num}: use a number from 0 to {vocab_size}"
            )
        seed = params.sampling_seed
        stops = self._eos.union(params.stop_token_ids)
        tells_prompt = asked.return_logprob and asked.logprob_start_len == 0
        return ServedSequence(
            rid=asked.rid,
            prompt=prompt,
            written=0 if tells_prompt else asked.written,  # one pass gives a prompt's logprobs
            params=params,
            max_new_tokens=self._max_new_tokens(prompt, params),
            # as in SGLang, ignore_eos is about stop tokens of every kind
            stop_ids=frozenset() if params.ignore_eos else stops,
            seed=int(self._rng.integers(2**63)) if seed is None else seed,
            wants_logprobs=asked.return_logprob,
            routes_from=asked.routed_experts_start_len if asked.return_routed_experts else None,
            prompt_top=asked.top_logprobs_num if tells_prompt else None,
            done=asyncio.get_running_loop().create_future(),
            extra_key=asked.extra_key or None,
        )

    def _max_new_tokens(self, prompt: list[int], params: SamplingParams) -> int:
        longest, wanted = self.runner.context_length, params.max_new_tokens
        room = longest - len(prompt)
        if room < 1:
            raise ServerError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({longest} tokens)."
            )
        if wanted is None:
            return min(DEFAULT_MAX_NEW_TOKENS, room)
        if wanted > room:
            raise ServerError(
                "Requested token count exceeds the model's maximum context length of "
                f"{longest} tokens. You requested a total of {wanted + len(prompt)} "
                f"tokens: {len(prompt)} tokens from the input messages and {wanted} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit."
            )
        return wanted

    def _notify(self, ended: list[ServedSequence]) -> None:
        def tell() -> None:
            for seq in ended:
                if not seq.done.done():
                    seq.done.set_result(None)

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)


WEIGHTS, KV_CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, GRAPHS)


class Occupation:
    """Keeps which of the server's memory is given back: that of a tag in `released`.

    `keep` has weights rest in host memory meanwhile. There are no CUDA graphs here: their tag
    changes nothing. Its methods are called in the scheduler's thread.
    """

    def __init__(
        self, model: torch.nn.Module, cache: KVCache, updates: WeightUpdates, *, keep: bool
    ) -> None:
        self._model, self._cache, self._updates, self._keep = model, cache, updates, keep
        self.released: set[str] = set()
        self._away: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    def release(self, tags: Any, scheduler: Scheduler) -> None:
        """Frees the memory of `tags` (None: of all). Raises ControlError, having freed nothing, for
        a tag that does not exist or is released, and while there are requests: those that wait
        while the server is paused may stay."""
        wanted = _checked(tags)
        if again := [tag for tag in wanted if tag in self.released]:
            raise ControlError(f"{', '.join(again)}: released already; resume it first")
        if scheduler.running or (not scheduler.paused and scheduler.waiting):
            raise ControlError(
                "memory can be released only while nothing runs: pause with mode 'abort' first"
            )
        self.released |= set(wanted)
        if KV_CACHE in wanted:
            self._cache.clear()
        if WEIGHTS in wanted:
            if not self._keep:
                self._updates.emptied()
            for storage in self._storages():
                kept = _bytes(storage).to("cpu", copy=True) if self._keep else None
                self._away.append((storage, storage.nbytes(), kept))
                storage.resize_(0)

    def resume(self, tags: Any) -> None:
        """Takes the memory of `tags` (None: of all) again. Raises ControlError, having taken
        nothing, for a tag that does not exist or is not released."""
        wanted = _checked(tags)
        if held := [tag for tag in wanted if tag not in self.released]:
            raise ControlError(f"{', '.join(held)}: not released")
        if WEIGHTS in wanted:
            for storage, nbytes, kept in self._away:
                storage.resize_(nbytes)
                whole = _bytes(storage)
                whole.zero_() if kept is None else whole.copy_(kept)
            self._away.clear()
        self.released -= set(wanted)

    def unfit(self) -> str:
        """Says why nothing may be generated with the memory there is, "" where it may."""
        if away := [tag for tag in TAGS if tag in self.released]:
            return f"the memory of {' and '.join(away)} is released; resume_memory_occupation first"
        return self._updates.unfit()

    def check_weights(self) -> None:
        """Raises ControlError while there is no memory for weights."""
        if WEIGHTS in self.released:
            raise ControlError("the weights are released; resume_memory_occupation first")

    def usage(self) -> dict[str, int]:
        """Returns the bytes that each tag's memory takes now."""
        weights = sum(s.nbytes() for s in self._storages())
        return {WEIGHTS: weights, KV_CACHE: self._cache.nbytes}

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Yields every storage of the parameters once; buffers are not weights, as in SGLang."""
        seen: set[int] = set()
        for param in self._model.parameters():
            storage = param.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage


def _make_resizable(model: torch.nn.Module) -> None:
    """Copies parameters whose memory cannot be given back, as it is a file that is mapped."""
    for param in model.parameters():
        if not param.untyped_storage().resizable():
            param.data = param.data.clone()


def _checked(tags: Any) -> tuple[str, ...]:
    if tags is None or tags == []:
        return TAGS
    if not isinstance(tags, list) or not all(tag in TAGS for tag in tags):
        raise ControlError(f"tags={tags!r}: a list of some of {', '.join(TAGS)}, or null for all")
    return tuple(dict.fromkeys(tags))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
