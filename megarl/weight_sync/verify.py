"""Compares what the servers hold with what was sent, by checksums, tensor by tensor."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from megarl.api.records import WeightUpdateMeta
from megarl.weight_sync.servers import Deadline, ServerInfo, Servers
from megarl.wire import block_fp8
from megarl.wire.checksums import tensor_checksum

log = logging.getLogger(__name__)

Checksums = Mapping[str, str]
SAMPLE = 8  # tensors
_TOLD: dict[int, set[str]] = {}  # the servers that a line at this level has named


class Verifier:
    """Collects checksums of the tensors sent, in the dtype the servers hold them, then asks the
    servers.

    names: the tensors to compare, None for all.

    A stock SGLang server fuses (qkv, gate/up) and shards its parameters and hashes them in its own
    way, so its checksums say nothing about HF tensors. When all tensors are compared, such servers
    are compared by fingerprints (slices.fingerprints) where they can be. The others are only
    compared with each other, and a warning says so. Raises RuntimeError where the dtypes that
    servers hold differ.
    """

    def __init__(
        self, info: Mapping[str, ServerInfo], names: Collection[str] | None = None
    ) -> None:
        self.names = names
        self.comparable = [s for s, i in info.items() if i.hf_checksums]
        self.others = [s for s, i in info.items() if not i.hf_checksums]
        self._replicas = {s: i.replicas for s, i in info.items()}
        dtypes = {info[s].dtype for s in self.comparable}
        if len(dtypes) > 1:
            raise RuntimeError(f"servers hold weights in different dtypes: {dtypes}")
        self.dtype = dtypes.pop() if dtypes else None
        self.sent: dict[str, str] = {}

    @classmethod
    def of(
        cls, meta: WeightUpdateMeta, info: Mapping[str, ServerInfo], names: Collection[str]
    ) -> Verifier | None:
        """Returns the verifier that `meta.verify` asks for, None for "off". With "sample" it
        compares some of `names`, but all at the first update."""
        if meta.verify == "off":
            return None
        return cls(info, None if meta.compares_all else sample(names, meta.number))

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Adds the checksums of these tensors by HF name; FP8 tensors come with their scales."""
        if not self.comparable:
            return
        wanted = (
            (n, t)
            for n, t in tensors
            if self.names is None or n.removesuffix(block_fp8.SUFFIX) in self.names
        )
        self.sent |= {
            n: tensor_checksum(t.to(self.dtype or t.dtype))
            for n, t in block_fp8.dequantized(wanted)
        }

    def check(self, deadline: Deadline, proved: Mapping[str, bool] | None = None) -> bool:
        """Returns whether all servers were compared. proved: servers that fingerprints agree with,
        and whether they do of all tensors. Raises RuntimeError naming what differs."""
        proved = proved or {}
        answers = self._ask(self.comparable, deadline)
        for server, sums in answers.items():
            if wrong := differences(self.sent, sums[0]):
                raise RuntimeError(f"server {server} does not hold the weights sent: {wrong}")
        if answers:
            log.log(
                once_each(logging.INFO, answers),
                "checksums of %d tensors agree with server %s",
                len(self.sent),
                ", ".join(answers),
            )
        left = [s for s in self.others if not proved.get(s)]
        others = self._ask(left, deadline) if self.names is None else {}
        compare_with_each_other(by_replica(others, self._replicas))
        others = {s: sums for s, sums in others.items() if s not in proved}
        if others:
            log.log(
                once_each(logging.WARNING, others),
                "weights on %s not verified: checksums there are of fused and sharded parameters, "
                "which cannot be compared with HF tensors%s",
                ", ".join(others),
                "; these servers do agree with each other" if len(others) > 1 else "",
            )
        return not left

    def _ask(self, addresses: Sequence[str], deadline: Deadline) -> dict[str, list[Checksums]]:
        return held_checksums(addresses, deadline, self.names)


def held_checksums(
    addresses: Sequence[str], deadline: Deadline, names: Collection[str] | None = None
) -> dict[str, list[Checksums]]:
    """Returns the checksums of the tensors that servers hold, of `names` or (None) of all, by
    server and its ranks. Raises RuntimeError where a server has none, ServersLost where some are
    lost."""
    if not addresses:
        return {}
    body: dict[str, Any] = {"action": "checksum"}
    if names is not None:
        body["names"] = sorted(names)
    answers = Servers(addresses).call("/weights_checker", body, deadline)
    return {server: _checksums(server, answer) for server, answer in answers.items()}


def once_each(level: int, servers: Collection[str]) -> int:
    """Returns `level` if a line at it has not yet named each of these servers, else DEBUG."""
    told = _TOLD.setdefault(level, set())
    if told.issuperset(servers):
        return logging.DEBUG
    told.update(servers)
    return level


def sample(names: Collection[str], seed: int, size: int = SAMPLE) -> frozenset[str]:
    """Returns `size` of the names at most, always the same for a seed and others for another."""
    ordered = sorted(names)
    return frozenset(random.Random(seed).sample(ordered, min(size, len(ordered))))


def differences(sent: Checksums, held: Checksums, show: int = 3) -> str:
    """Words the first tensors that are missing, differ, or were never sent; "" if all is well.

    A tensor that was not sent may only be another name of one that was (a tied output layer).
    """
    known = set(sent.values())
    kinds = {
        "missing": [n for n in sent if n not in held],
        "different": [n for n in sent if n in held and held[n] != sent[n]],
        "never sent": [n for n, c in held.items() if n not in sent and c not in known],
    }
    return "; ".join(
        f"{kind}: {', '.join(names[:show])}"
        + (f" and {len(names) - show} more" if len(names) > show else "")
        for kind, names in kinds.items()
        if names
    )


def by_replica(
    held: Mapping[str, Sequence[Checksums]], replicas: Mapping[str, int]
) -> dict[str, Sequence[Checksums]]:
    """Returns the checksums of servers' ranks with an entry for each replica of a server, whose
    ranks follow each other."""
    found = {}
    for server, ranks in held.items():
        size = len(ranks) // replicas[server]
        for i in range(replicas[server]):
            name = server if replicas[server] == 1 else f"{server} (replica {i})"
            found[name] = ranks[i * size : (i + 1) * size]
    return found


def compare_with_each_other(held: Mapping[str, Sequence[Checksums]]) -> None:
    """Raises RuntimeError where servers, or replicas, of one tensor-parallel degree hold different
    weights."""
    by_degree: dict[int, str] = {}
    for server, ranks in held.items():
        first = by_degree.setdefault(len(ranks), server)
        if ranks != held[first]:
            raise RuntimeError(f"servers {first} and {server} hold different weights")


def _checksums(server: str, answer: Any) -> list[Checksums]:
    """Returns the checksums by the server's ranks. Raises RuntimeError without any."""
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    if not isinstance(ranks, list) or not all(
        isinstance(r, dict) and r.get("checksums") and isinstance(r["checksums"], dict)
        for r in ranks or [None]
    ):
        raise RuntimeError(f"server {server}: /weights_checker answered without checksums")
    return [r["checksums"] for r in ranks]
