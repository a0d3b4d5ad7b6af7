"""Measures what a step saves without a pass for prox_logp, and passes that share micro-batches.

    python benchmarks/recompute.py [--sizes 5m 20m] [--rounds 5] [--threads 2] [--quick]

Two actors start from the same weights and train on the same batches with one update a step, one
with `actor.recompute_logprob=true`, one with `auto`, in turns within one process; a third row has
`false`, which takes the server's logprobs and is the least that a step can cost. Every round
compares the weights of the first two, which are the same to the bit. Then a reference in the
actor's layout computes its logprobs of one batch with micro-batches of its own and with those that
the actor's pass has packed, in turns too. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train_batch import SIZES, Case, make_model

WAYS = ("true", "auto", "false")


@dataclass(frozen=True)
class Spent:
    """Holds the seconds that a piece of work took, by the clock and of the processors."""

    wall: float
    cpu: float


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Holds what every round took: a step by way, and the reference's pass."""

    steps: dict[str, list[Spent]]
    apart: list[Spent]
    shared: list[Spent]


def timed(work: Callable[[], Any]) -> tuple[Spent, Any]:
    """Returns what `work` takes, and what it returns."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu), result


def make(case: Case, way: str | None) -> Any:
    """Returns an actor with `recompute_logprob` of that way, or for None a reference."""
    from megarl.config.algo import PPOActorConfig
    from megarl.config.engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
    from megarl.trainer.roles import MegatronActor, MegatronRef

    engine = dict(
        path=str(case.model),
        dtype="float32",
        mb_spec=MicroBatchSpec(max_tokens_per_mb=SIZES[case.size].budget),
    )
    if way is None:
        role: Any = MegatronRef(TrainEngineConfig(**engine), temperature=1.0)
    else:
        optimizer = OptimizerConfig(lr=1e-5)
        config = PPOActorConfig(recompute_logprob=way, logp_gap_warn=1e9, **engine)
        config.optimizer = optimizer
        role = MegatronActor(config, temperature=1.0)
    role.initialize()
    return role


def batch_of(case: Case, number: int) -> Any:
    from megarl.api.batch import Batch

    padded = case.batch(number)
    padded["logprobs"] = torch.full(padded["input_ids"].shape, -1.0) * padded["loss_mask"]
    padded["advantages"] = padded["advantages"][:, None] * padded["loss_mask"]
    return Batch.from_padded(padded)


def step(actor: Any, batch: Any) -> None:
    """Makes one step on a batch with advantages: an update, after a pass where one is due."""
    if actor.config.recompute_logprob == "true":
        actor.compute_prox_logp(batch)
    actor.ppo_update(batch)


def same_weights(a: Any, b: Any) -> bool:
    theirs = dict(b.engine.hf_state())
    return all(torch.equal(value, theirs[name]) for name, value in a.engine.hf_state())


def measure(case: Case, rounds: int) -> Rounds:
    """Returns what `rounds` rounds take after one to warm up. Raises RuntimeError where the
    weights of the first two ways differ, or the reference's two passes."""
    actors = {way: make(case, way) for way in WAYS}
    ref = make(case, None)
    found = Rounds(steps={way: [] for way in WAYS}, apart=[], shared=[])
    for number in range(rounds + 1):
        spent = {}
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            batch = batch_of(case, number)
            spent[way] = timed(lambda a=actors[way], b=batch: step(a, b))[0]
        if not same_weights(actors["true"], actors["auto"]):
            raise RuntimeError(f"{case.size} round {number}: the weights differ: not the same work")
        shared, of_shared = timed(lambda b=batch: ref.compute_logp(b))
        batch.packed.clear()
        apart, of_own = timed(lambda b=batch: ref.compute_logp(b))
        if not torch.equal(of_shared.values, of_own.values):
            raise RuntimeError(f"{case.size} round {number}: shared micro-batches changed a number")
        if number:
            for way in WAYS:
                found.steps[way].append(spent[way])
            found.shared.append(shared)
            found.apart.append(apart)
    for role in (*actors.values(), ref):
        role.destroy()
    return found


def row(case: Case, found: Rounds) -> str:
    def ratio(a: list[Spent], b: list[Spent], kind: str) -> str:
        r = sorted(getattr(x, kind) / getattr(y, kind) for x, y in zip(a, b, strict=True))
        return f"{statistics.median(r):.2f} ({r[0]:.2f}-{r[-1]:.2f})"

    steps = found.steps
    seconds = [f"{statistics.median(s.cpu for s in steps[way]):.2f}" for way in WAYS]
    ratios = [ratio(steps["true"], steps["auto"], kind) for kind in ("wall", "cpu")]
    ratios.append(ratio(steps["auto"], steps["false"], "cpu"))
    ratios.append(ratio(found.apart, found.shared, "cpu"))
    return f"| {' | '.join([case.size, case.lengths, *seconds, *ratios])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["5m", "20m"], choices=list(SIZES))
    parser.add_argument("--lengths", nargs="+", default=["equal", "ragged"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--quick", action="store_true", help="small batches, 5m only")
    args = parser.parse_args()
    if args.quick:
        args.sizes = ["5m"]
    os.environ.update(OMP_NUM_THREADS=str(args.threads), MEGARL_DEVICE="cpu")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", THP_MEM_ALLOC_ENABLE="1")
    torch.set_num_threads(args.threads)
    print(f"fp32, CPU, {args.threads} threads, median (min-max) of {args.rounds} rounds\n")
    print("| model | lengths | true, CPU s/step | auto | false | true / auto, wall | CPU "
          "| auto / false, CPU | ref pass, own / shared micro-batches, CPU |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            model = Path(folder) / size
            make_model(SIZES[size], model)
            for lengths in args.lengths:
                case = Case(
                    size=size, lengths=lengths, model=model, threads=args.threads, quick=args.quick
                )
                print(row(case, measure(case, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
