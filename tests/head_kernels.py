"""What the kernels of the LM head must do, for any device: tests/unit runs these under Triton's
interpreter, tests/gpu on a GPU.

Hidden states are unit vectors and the weight's columns are the logits, so that products are exact
in every dtype, and the weight's gradient is that of the logits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.api.engine import OUTPUTS
from megarl.parallel.vocab_parallel import VocabShard, by_kernels, columns, token_outputs

OUT = (
    "logprobs", "entropy", "greedy_match", "topk_logprobs", "topk_ids", "topk_tail",
    "given_logprobs", "given_tail",
)  # fmt: skip
TRAINED = ("logprobs", "entropy", "given_logprobs", "given_tail")
TOKENS, VOCAB, K, N = 7, 9001, 3, 5  # two whole blocks and a part of one
# logits up to 20 in fp32, sums of 9001 of them, and a log: some roundings of 1e-6
VALUES = 1e-5
# of the gradient in its dtype: arithmetic is in fp32, then it is rounded once, and the interpreter
# cuts bf16 off where a GPU rounds to the nearest
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LEAST = 1e-6
SUMS = 1e-4  # of 9001 products in fp32, one after the other


class Lockstep:
    """Stands for a process group whose ranks are threads, of which one runs at a time: the
    interpreter's kernels know one place in the grid."""

    def __init__(self, size: int) -> None:
        self._size, self._turn = size, threading.Lock()
        self._barrier, self._local = threading.Barrier(size, timeout=120), threading.local()
        self._sent: list[Any] = [None] * size

    def size(self) -> int:
        return self._size

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Returns what every rank brings."""
        self._sent[self._local.rank] = x.clone()
        self._turn.release()
        self._barrier.wait()
        found = list(self._sent)
        self._barrier.wait()
        self._turn.acquire()
        return found

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """Returns what fn(rank) does on every rank."""
        found: list[Any] = [None] * self._size

        def rank(number: int) -> None:
            self._local.rank = number
            try:
                with self._turn:
                    found[number] = fn(number)
            except BaseException as error:
                found[number] = error
                self._barrier.abort()

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [x for x in found if isinstance(x, BaseException)]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return found


def _all_reduce(x: Tensor, op: Any, group: Lockstep) -> None:
    whole = torch.stack(group.exchange(x))
    by = {
        dist.ReduceOp.MAX: whole.amax,
        dist.ReduceOp.MIN: whole.amin,
        dist.ReduceOp.SUM: whole.sum,
    }
    x.copy_(by[op](0))


def _all_gather(out: list[Tensor], x: Tensor, group: Lockstep) -> None:
    for mine, theirs in zip(out, group.exchange(x), strict=True):
        mine.copy_(theirs)


@contextmanager
def collectives() -> Iterator[None]:
    """Collectives are those of Lockstep."""
    with (
        mock.patch.object(dist, "all_reduce", _all_reduce),
        mock.patch.object(dist, "all_gather", _all_gather),
    ):
        yield


@contextmanager
def torch_only() -> Iterator[None]:
    """On a CPU, torch computes what kernels would."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
        yield


@dataclass
class Case:
    """Logits [T,V], labels [T], given ids [T,n], and the gradient of the outputs [T,K]."""

    logits: Tensor
    labels: Tensor
    ids: Tensor
    temperature: float = 1.0

    @property
    def at(self) -> dict[str, slice]:
        return columns(OUT, K, self.ids.shape[1])

    def mix(self) -> Tensor:
        """Returns weights of the outputs: 0 of those that have no gradient."""
        g = torch.Generator().manual_seed(1)
        out = torch.zeros(len(self.labels), max(x.stop for x in self.at.values()))
        for name in TRAINED:
            width = self.at[name].stop - self.at[name].start
            out[:, self.at[name]] = torch.randn(len(out), width, generator=g)
        return out


def case(dtype: torch.dtype, temperature: float = 1.0, vocab: int = VOCAB) -> Case:
    """Draws logits with ties, labels that are and that are not the largest, and given ids: with the
    label, with what is no token, none."""
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(TOKENS, vocab, generator=g)).to(dtype)
    labels = torch.randint(vocab, (TOKENS,), generator=g)
    labels[0] = logits[0].float().argmax()
    for token, label in ((1, 3), (2, vocab - 2)):  # the lowest wins
        logits[token, [3, vocab // 2, vocab - 2]] = 14.0
        labels[token] = label
    ids = torch.stack([torch.randperm(vocab, generator=g)[:N] for _ in range(TOKENS)])
    ids[0, 0], ids[3, 1], ids[1, 0] = labels[0], labels[3], vocab
    ids[2, :3] = torch.tensor([3, vocab // 2, -1])
    ids[-2, 2:] = -1
    ids[-1] = -1
    return Case(logits, labels, ids, temperature)


def finite(x: Tensor) -> Tensor:
    return x.where(x.isfinite(), 0.0)


def exact(c: Case, trained: tuple[str, ...] = TRAINED) -> tuple[Tensor, Tensor]:
    """Returns the outputs and the gradient of the logits by the dense formulas in fp64."""
    leaf = c.logits.double().requires_grad_()
    vocab = leaf.shape[1]
    logp = (leaf / c.temperature).log_softmax(-1)
    spread = logp.exp() * logp.masked_fill(logp.isinf(), 0.0)
    top = c.logits.float().sort(dim=-1, descending=True, stable=True).indices
    known = (c.ids >= 0) & (c.ids < vocab)
    own = logp.gather(-1, c.ids.clamp(0, vocab - 1))
    values = {
        "logprobs": logp.gather(-1, c.labels[:, None]),
        "entropy": -spread.sum(-1, keepdim=True),
        "greedy_match": (top[:, :1] == c.labels[:, None]).double(),
        "topk_logprobs": logp.gather(-1, top[:, :K]),
        "topk_ids": top[:, :K].double(),
        "topk_tail": _outside(logp, top[:, :K]),
        "given_logprobs": torch.where(known, own, -torch.inf),
        "given_tail": _outside(logp, torch.where(known, c.ids, vocab)),
    }
    out = torch.cat([values[name] for name in OUT], -1)
    mix = c.mix().double()
    for name in set(TRAINED) - set(trained):
        mix[:, c.at[name]] = 0.0
    (grad,) = torch.autograd.grad((finite(out) * mix).sum(), leaf)
    return out.detach(), grad


def _outside(logp: Tensor, ids: Tensor) -> Tensor:
    """Returns [T,1]: the log mass outside of ids [T,n]; the vocabulary's size is no id."""
    inside = torch.zeros(len(logp), logp.shape[1] + 1, dtype=torch.bool)
    inside.scatter_(-1, ids, True)
    return logp.masked_fill(inside[:, :-1], -torch.inf).logsumexp(-1, keepdim=True)


@dataclass
class Found:
    """Outputs [T,K], and the gradients of logits [T,V] and hidden states [T,T], in fp64 on the
    host."""

    out: Tensor
    logits: Tensor
    hidden: Tensor


def of_rank(
    c: Case, device: str, number: int, tp: int, group: Any, *, spare: int = 0, used: Any = OUTPUTS,
    keep: int = 0, frozen: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Runs token_outputs forward and backward on shard `number` of tp, of which the `spare` last
    are padding alone; padding has logits that would be seen. Returns the outputs, and the gradients
    of the shard's weight and of the hidden states, on the host."""
    tokens, vocab = c.logits.shape
    rows = -(-vocab // (8 * (tp - spare))) * 8
    weight = torch.full((rows * tp, tokens), 30.0, dtype=c.logits.dtype)
    weight[:vocab] = c.logits.t()
    hidden = torch.eye(tokens, dtype=weight.dtype, device=device).requires_grad_()
    mine = weight[number * rows : (number + 1) * rows].to(device, copy=True)
    mine.requires_grad_(not frozen)
    out = token_outputs(
        hidden, mine, c.labels.to(device), outputs=OUT, topk=K, temperature=c.temperature,
        shard=VocabShard(start=number * rows, rows=rows, vocab_size=vocab, group=group),
        chunk_tokens=3, given=c.ids.to(device), used=used, keep_bytes=keep,
    )  # fmt: skip
    (finite(out) * c.mix().to(device)).sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == weight.dtype
    grad = None if mine.grad is None else mine.grad.cpu().double()
    return out.detach().cpu(), grad, hidden.grad.cpu().double()


def of_process(c: Case, number: int) -> tuple[Tensor, Tensor | None, Tensor]:
    return of_rank(c, "cpu", number, dist.get_world_size(), dist.group.WORLD)


def run(c: Case, device: str, *, tp: int = 1, **how: Any) -> Found:
    """Returns what `tp` shards find together."""
    group = Lockstep(tp)
    with collectives():
        return together(c, group.run(lambda n: of_rank(c, device, n, tp, group, **how)))


def together(c: Case, ranks: Sequence[tuple[Tensor, Tensor | None, Tensor]]) -> Found:
    """Joins what the shards returned. Their outputs are the same bits."""
    outs, grads, hidden = zip(*ranks, strict=True)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=0, equal_nan=True)
    whole = torch.cat([torch.zeros(0, len(c.logits)) if g is None else g for g in grads])
    vocab = c.logits.shape[1]
    assert not whole[vocab:].any()  # padding learns nothing
    return Found(outs[0].double(), whole[:vocab].t(), sum(hidden))


def close(got: Tensor, want: Tensor, rtol: float, atol: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


def values_and_gradients(
    device: str, dtype: torch.dtype, temperature: float, tp: int, spare: int
) -> None:
    """They equal fp64's, and those of torch in the same dtype."""
    c = case(dtype, temperature)
    assert by_kernels(c.logits.to(device))
    found = run(c, device, tp=tp, spare=spare)
    with torch_only():
        assert not by_kernels(c.logits)
        twin = run(c, "cpu", tp=tp, spare=spare)
    out, grad = exact(c)
    assert {0.0, 1.0} == set(out[:, c.at["greedy_match"]].flatten().tolist())
    size = grad.abs() @ c.logits.double().abs().t()  # of what is added up
    for want, by, hidden in (
        (out, grad, grad @ c.logits.double().t()),
        (twin.out, twin.logits, twin.hidden),
    ):
        close(found.out, want, 0, VALUES)
        close(found.logits, by, ROUNDING[dtype], LEAST)
        assert ((found.hidden - hidden).abs() <= (2 * ROUNDING[dtype] + SUMS) * size).all()


def a_watched_entropy_costs_nothing(device: str) -> None:
    """Its gradient is not looked at."""
    c = case(torch.float32, 0.7)
    found = run(c, device, used=())
    out, grad = exact(c, ("logprobs", "given_logprobs", "given_tail"))
    close(found.out, out, 0, VALUES)
    close(found.logits, grad, ROUNDING[torch.float32], LEAST)


def a_frozen_weight_has_no_gradient(device: str) -> None:
    """As with LoRA, whose adapters are below the head."""
    c = case(torch.bfloat16)
    (frozen, trained) = (run(c, device, tp=2, frozen=x) for x in (True, False))
    assert not frozen.logits.numel()
    assert torch.equal(frozen.hidden, trained.hidden) and frozen.hidden.any()


def kept_logits_are_not_computed_again(device: str) -> None:
    """They are kept in their own dtype, and give the same bits."""
    from megarl.parallel import cpu_kernels as products

    c = case(torch.bfloat16, 0.7)
    linear, made = products.linear, []

    def counted(x: Tensor, w: Tensor) -> Tensor:
        made.extend([1] if x.shape[1] == TOKENS else [])  # logits; else a gradient
        return linear(x, w)

    counts, results = [], []
    with mock.patch.object(products, "linear", counted):
        for keep in (TOKENS * VOCAB * 2, TOKENS * VOCAB * 2 - 1):
            made.clear()
            results.append(run(c, device, keep=keep))
            counts.append(len(made))
    assert counts == [3, 6]
    assert torch.equal(results[0].logits, results[1].logits)


class Widest(TorchDispatchMode):
    """Keeps the dtypes of everything made that has as many numbers as `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.dtypes = size, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= self.size:
            self.dtypes.add(out.dtype)
        return out


def logits_never_leave_their_dtype(device: str) -> None:
    """Neither values nor gradients of a chunk are copied to fp32, or a mask made of them. top-k
    stands apart: it sorts."""
    tokens, vocab = 16, 4104
    shard = VocabShard(start=0, rows=vocab, vocab_size=vocab)
    outputs = ("logprobs", "entropy", "greedy_match", "given_logprobs", "given_tail")
    hidden = torch.randn(tokens, 8).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, 8).to(device, torch.bfloat16).requires_grad_()
    labels, ids = torch.arange(tokens).to(device), torch.arange(4).repeat(tokens, 1).to(device)
    with Widest(tokens * vocab) as seen:
        out = token_outputs(hidden, weight, labels, shard=shard, outputs=outputs, given=ids)
        out.sum().backward()
    assert seen.dtypes - {torch.uint8} == {torch.bfloat16}  # the interpreter's storages


def no_rows(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        c = case(dtype)
        found = run(Case(c.logits[:0], c.labels[:0], c.ids[:0]), device, tp=2)
        assert found.out.shape == (0, found.out.shape[1]) and found.logits.shape == (0, VOCAB)


def infinite_logits(device: str) -> None:
    """-inf is a probability of 0, also where it fills a block, or a shard; NaN is seen."""
    c = case(torch.float32, 0.7)
    row = c.logits[:1].clone()
    row[:, 1000 : VOCAB - 40] = -torch.inf  # the second block of one shard; of four, two shards
    c = Case(row, torch.tensor([17]), torch.tensor([[5, 2000, 900, -1, VOCAB - 1]]), 0.7)
    want, grad = exact(c)
    for tp in (1, 4):
        found = run(c, device, tp=tp)
        close(found.out, want, 0, VALUES)
        close(found.logits, grad, ROUNDING[torch.float32], LEAST)
    c.logits[0, 8000] = torch.nan
    found = run(c, device, tp=2)
    for name in ("logprobs", "entropy", "given_tail"):
        assert found.out[:, c.at[name]].isnan().all(), name


def offsets_beyond_32_bits(device: str) -> None:
    """The second row begins 2^31 numbers after the first; nothing between is touched."""
    from megarl.kernels.lm_head import gradient_, read

    vocab, apart = 5000, 2**31 + 8
    memory = torch.empty(apart + vocab, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((2, vocab), (apart, 1))
    small = 3 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
    x.copy_(small.bfloat16())
    rows = torch.tensor([[7, 4999], [-1, 3]], device=device)
    small, labels = x.clone(), rows[:, 1].contiguous()
    pair = [read(y, {"t": rows}, ("t",), 1.0, entropy=True, greedy=True) for y in (x, small)]
    for far, near in zip(*(n.parts(n.largest).values() for n in pair), strict=True):
        assert torch.equal(far, near)
    assert torch.equal(x, small) and torch.equal(*(n.winner for n in pair))
    top, g = pair[0].largest, torch.ones(2, device=device)
    assert torch.equal(*(gradient_(y, labels, top, g, g, -g, 1.0) for y in (x, small)))


def an_update_of_an_engine(model: str, lora: Any) -> None:
    """In fp32 and in one process, after one step of a policy gradient with entropy: loss and
    gradient norm to 1e-5, all weights to 1e-4 of the way they went."""
    from tests.dist.engine_jobs import batch, loss_fn, make_engine, state, weight_fn

    def updated() -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        engine = make_engine(model, {}, dtype="float32", lora=lora)
        before = state(engine)
        metrics = engine.train_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
        after = state(engine)
        engine.destroy()
        return metrics, before, after

    metrics, start, end = updated()
    with torch_only():
        metrics_of_torch, _, end_of_torch = updated()
    for name in ("loss", "grad_norm"):
        assert abs(metrics[name] - metrics_of_torch[name]) <= 1e-5 * abs(metrics_of_torch[name])
    moved = {name: end[name] - x for name, x in start.items()}
    apart = {name: end[name] - end_of_torch[name] for name in start}
    assert any(x.any() for x in apart.values())  # two programs
    for name, way in moved.items():
        assert apart[name].norm() <= 1e-4 * way.norm(), name


OF_A_CHUNK = (
    a_watched_entropy_costs_nothing,
    a_frozen_weight_has_no_gradient,
    kept_logits_are_not_computed_again,
    logits_never_leave_their_dtype,
    no_rows,
    infinite_logits,
    offsets_beyond_32_bits,
)
