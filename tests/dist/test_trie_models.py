"""Built models on a packed trie against the same models on its flat sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.models.trie_params import trie_params
from megarl.parallel.trie import build_trie
from tests.dist.models_util import all_gather_dim, built_model, positions, thd
from tests.dist.world import World
from tests.tiny import GLM_KINDS, MLA_KINDS, VOCAB, YARN, save_tiny

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16, rope_theta=500.0,
)  # fmt: skip


def rows() -> list[Tensor]:
    """A group of two, an episode with a turn that branches off, and a sequence of its own."""
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> Tensor:
        return torch.randint(3, VOCAB, (n,), generator=g)

    prompt, turn = draw(20), draw(10)
    answers = [torch.cat([prompt, draw(11)]), torch.cat([prompt, turn, draw(2)])]
    return [*answers, torch.cat([prompt, turn, draw(19)]), torch.cat([prompt, turn]), draw(16)]


def run(path: Path, parallel: dict[str, Any], **over: Any) -> list[dict[str, Tensor]]:
    """Returns, of a flat pass and of one over the trie, the logits of the flat tokens [T,V] and
    every gradient of one sum over them."""
    lengths = [len(r) for r in rows()]
    trie = build_trie(pad_sequence(rows(), batch_first=True), lengths, multiple_of=4)
    assert (sum(lengths), trie.tokens, len(trie.input_ids)) == (158, 78, 80)
    flat = torch.cat([trie.place[i, :n] for i, n in enumerate(lengths)])
    weight = torch.randn(len(flat), VOCAB, generator=torch.Generator().manual_seed(1))
    passes = ((torch.cat(rows()), thd(lengths)), (trie.input_ids, trie_params(trie)))
    out = []
    with built_model(path, parallel, share_prefixes=True, **over) as (model, groups):
        chunk = model.chunks[0].train()
        for tokens, params in passes:
            chunk.zero_grad()
            mine = chunk(tokens[None], positions(tokens[None]), None, packed_seq_params=params)[0]
            mine = mine if len(mine) == len(flat) else mine[flat]
            rank, width = groups.coords.tp, mine.shape[-1]
            part = weight[:, rank * width :][:, :width]
            (mine[:, : part.shape[1]] * part).sum().backward()
            grads = {n: p.grad for n, p in chunk.named_parameters() if p.grad is not None}
            for n, p in chunk.named_parameters():
                if getattr(p, "sequence_parallel", False):  # of this rank's tokens
                    torch.distributed.all_reduce(grads[n], group=groups.tp)
            logits = all_gather_dim(mine.detach(), groups.tp, -1)[:, :VOCAB]
            out.append({"logits": logits, **{n: g.clone() for n, g in grads.items()}})
    return out


FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{k: (k, {}) for k in ("llama", "qwen2", "qwen3", *GLM_KINDS, *MLA_KINDS)},
    **{k: (k, {}) for k in ("qwen3_moe", "glm4_moe")},
    "yarn": ("qwen3", dict(rope_parameters=YARN)),
    "llama3-rope": ("llama", dict(rope_parameters=LLAMA3)),
}


def assert_equal(flat: dict[str, Tensor], shared: dict[str, Tensor]) -> None:
    """To 1e-5 of the largest: gradients of shared tokens are sums in another order."""
    assert flat.keys() == shared.keys() and flat["logits"].std() > 0.3
    for name, want in flat.items():
        assert (shared[name] - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.parametrize("name", MODELS)
def test_a_trie_equals_its_flat_sequences(world1: World, name: str, tmp_path: Path) -> None:
    kind, over = MODELS[name]
    save_tiny(tmp_path, kind, layers=2, **over)
    assert_equal(*world1.run(run, tmp_path, {})[0])


@pytest.mark.parametrize("how", ("full", "selective"))
def test_recomputation_and_tensor_parallel_ranks(world2: World, how: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", layers=2)
    over = FULL if how == "full" else dict(recompute_granularity="selective")
    for flat, shared in world2.run(run, tmp_path, dict(tp=2, sequence_parallel=True), **over):
        assert_equal(flat, shared)
