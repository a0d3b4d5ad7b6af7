"""Weights go by slices from sharded ranks to one real server of tp 2.

What is right: a server's own checksums after a sync equal those it shows after it has loaded, from
disk, what `save` wrote.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megarl.api.records import WeightUpdateMeta
from tests.dist.uploads import Upload, run_uploads
from tests.dist.world import World
from tests.sglang.conftest import Pair
from tests.sglang.servers import save_model

LAYOUTS = {"tp2": dict(tp=2), "pp2": dict(pp=2)}
SOME = 100_000  # bytes of two rounds: several of them
_versions = itertools.count(1000)


def meta(pair: Pair, **kw: Any) -> WeightUpdateMeta:
    given: dict[str, Any] = dict(
        type="distributed", bucket_bytes=SOME, timeout=120.0, sharded="on",
        addresses=pair.addresses,
    )  # fmt: skip
    return WeightUpdateMeta(version=next(_versions), **(given | kw))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_are_what_a_load_from_disk_makes_of_them(
    pair: Pair, world: World, tmp_path: Path, layout: str
) -> None:
    """Two syncs through one plan, to servers of tp 1 and 2 at once."""
    pair.load(pair.m0)
    old = [s.checksums() for s in pair.both]
    saved = tmp_path / "saved"
    there, back = Upload(pair.m1, saved, meta(pair)), Upload(pair.m0, None, meta(pair))
    results = world.run(run_uploads, LAYOUTS[layout], [back, there])
    for figures in results:
        assert all(isinstance(f, dict) for f in figures), figures
    print(results)
    assert [s.version for s in pair.both] == [str(there.meta.version)] * 2
    new = [s.checksums() for s in pair.both]
    assert new != old
    pair.load(saved)
    assert [s.checksums() for s in pair.both] == new
