"""Models with layers that keep a state in place of keys and values: through the scheduler, beside
transformers' own cache."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future

import pytest
import torch
import transformers

from megarl.models.hf_config import read_hf_config
from megarl.planning.memory import kv_bytes_per_token, state_bytes_per_sequence
from megarl.server.args import ServerArgs
from megarl.server.protocol import SamplingParams
from megarl.server.runner import ModelRunner
from megarl.server.scheduler import Scheduler
from megarl.server.sequence import ServedSequence
from megarl.server.weights import WeightStore
from tests.tiny import save_tiny, tiny_hf
from tests.unit.test_server_runner import (
    make_sequence,
    prompts,
    reference,
    small_model,
    teacher_forced,
)

KIND = "qwen3_next"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp(KIND), KIND)


def load(path, **over):
    return ModelRunner(ServerArgs(model_path=str(path), dtype="float32", device="cpu", **over))


class Served:
    """A scheduler over `runner` whose sequences are greedy. The decode step number `hold_at` begins
    when `gate` is open; `held` says that it waits."""

    def __init__(self, runner, hold_at):
        self.runner, self.done, self.left = runner, {}, hold_at
        self.held, self.gate, self.plain = threading.Event(), threading.Event(), runner.decode
        runner.decode = self.decode
        self.scheduler = Scheduler(
            runner,
            None,
            notify=lambda ended: [self.done[s].set_result(s) for s in ended],
            on_death=lambda: None,
        )
        self.scheduler.start()

    def decode(self, *args):
        self.left -= 1
        if self.left == 0:
            self.held.set()
            assert self.gate.wait(60)
        return self.plain(*args)

    def submit(self, prompt, tokens):
        s = ServedSequence(
            rid="r",
            prompt=list(prompt),
            params=SamplingParams(temperature=0.0),
            max_new_tokens=tokens,
            stop_ids=frozenset(),
            seed=0,
            wants_logprobs=True,
            done=None,
        )
        self.done[s] = Future()
        self.scheduler.submit([s])
        return s


@pytest.fixture
def serve():
    servers = []

    def start(runner, hold_at):
        servers.append(Served(runner, hold_at))
        return servers[-1]

    yield start
    for server in servers:
        server.gate.set()
        assert server.scheduler.stop(60)


def greedy(model, tokens, count, cache=None):
    """The next `count` tokens, with transformers' own cache where one is given."""
    tokens, out = list(tokens), []
    for _ in range(count):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logits = model(ids, past_key_values=cache, use_cache=cache is not None).logits
        out.append(int(logits[0, -1].argmax()))
        tokens = [*tokens, out[-1]] if cache is None else out[-1:]
    return out


def test_rows_that_move_and_end_leave_the_others_as_they_are(path, serve):
    """Sequences of unlike lengths, two of them of one prompt: some end early, one is aborted, and
    one waits for a row."""
    server, model = serve(load(path, max_running_requests=6), hold_at=5), tiny_hf(KIND)
    given, lengths = prompts([30, 9, 4, 4, 17, 70]), [200, 2, 12, 9, 1, 7, 11]
    given.append(given[1])
    seqs = [server.submit(p, n) for p, n in zip(given, lengths, strict=True)]
    assert server.held.wait(60)
    server.scheduler.abort(lambda s: s is seqs[0])
    server.gate.set()
    ended = [server.done[s].result(60) for s in seqs]
    assert ended[0].finish_reason["type"] == "abort" and len(ended[0].output) < 20
    for s, prompt, count in zip(ended[1:], given[1:], lengths[1:], strict=True):
        assert s.output == greedy(model, prompt, count)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_states_are_of_the_weights_that_keys_and_values_are_of(path, serve, mode, tmp_path):
    """After an update in the middle. retract: all are computed anew by the new weights; in_place:
    the new weights go on from what the old ones left, as with transformers' own cache."""
    old, new = tiny_hf(KIND), tiny_hf(KIND, seed=1)
    save_tiny(tmp_path, KIND, seed=1)
    server = serve(load(path), hold_at=6)
    given = prompts([7, 12])
    seqs = [server.submit(p, 14) for p in given]
    assert server.held.wait(60)
    paused = server.scheduler.call(lambda: server.scheduler.pause(mode))
    server.gate.set()
    paused.result(60)
    cuts = [len(s.output) for s in seqs]
    store = WeightStore(server.runner.model)
    server.scheduler.call_exclusive(lambda: store.load_directory(str(tmp_path))).result(60)
    server.scheduler.call(server.scheduler.resume).result(60)
    for s, prompt, cut in zip(seqs, given, cuts, strict=True):
        got = server.done[s].result(60).output
        cache = transformers.DynamicCache(config=old.config)
        assert got[:cut] == greedy(old, prompt, cut, cache) and 0 < cut < 14
        anew = greedy(new, [*prompt, *got[:cut]], 14 - cut)
        went_on = greedy(new, got[cut - 1 : cut], 14 - cut, cache)
        assert anew != went_on and got[cut:] == (anew if mode == "retract" else went_on)


def row_by_row(runner, given, steps):
    """Logits [n,steps,V], as the scheduler's deterministic mode asks for them."""
    seqs = [make_sequence(p) for p in given]
    runner.make_room(seqs, used=0)
    rows, logits = runner.prefill(seqs, 0)
    columns = [logits]
    for t in range(steps - 1):
        for s in rows:
            s.output.append(3 + t)
        runner.make_room(rows, used=len(rows))
        columns.append(torch.cat([runner.decode([s], i) for i, s in enumerate(rows)]))
    return torch.stack(columns, 1)[[rows.index(s) for s in seqs]]


def test_a_deterministic_answer_depends_on_no_company_and_no_cut(path):
    """To the bit: alone and among others, and gone on with after it was cut."""
    runner = load(path, deterministic=True)
    given = prompts([11, 5, 40])
    (alone,) = row_by_row(runner, given[:1], 6)
    assert torch.equal(alone, row_by_row(runner, given, 6)[0])
    s = make_sequence([*given[0], 3, 4, 5])
    s.written = 3
    runner.make_room([s], used=0)
    logits = [runner.prefill([s], 0)[1]]
    while s.read < s.length:
        logits.append(runner.decode([s], 0))
    assert torch.equal(torch.cat(logits), alone[:4])


def test_memory_is_for_the_states_of_all_rows_and_for_keys_and_values(path, monkeypatch):
    plain = os.sysconf
    pages = 320

    def sysconf(name):
        return pages * 4096 // plain("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else plain(name)

    monkeypatch.setattr(os, "sysconf", sysconf)
    with pytest.raises(ValueError, match="--max-running-requests=16"):
        load(path, max_running_requests=16)
    pages = 1280
    memory = pages * 1024  # a quarter of main memory
    runner = load(path, max_running_requests=8)
    length = runner.max_total_tokens // 8
    seqs = [make_sequence(p) for p in prompts([length] * 8)]
    runner.make_room(seqs, used=0)
    runner.prefill(seqs, 0)
    per_position = 2 * 2 * 2 * 32 * 4  # of two layers: keys and values of two heads
    assert len(runner.cache.states) == 4
    assert memory - 8 * per_position < runner.cache.nbytes <= memory
    runner.cache.clear()
    assert runner.cache.nbytes == 0


@pytest.mark.parametrize("kind", ["qwen3", KIND])
def test_the_planner_counts_what_the_cache_takes(kind, tmp_path):
    """But that transformers keeps an input of the convolution more than there is to look back at,
    and that the planner's server is bf16."""
    runner, m = load(save_tiny(tmp_path, kind)), read_hf_config(tmp_path)
    seqs = [make_sequence(p) for p in prompts([5, 9, 30])]
    runner.make_room(seqs, used=0)
    runner.prefill(seqs, 0)
    cache = runner.cache
    tokens = cache.rows * cache.positions
    assert cache.keys.nbytes + cache.values.nbytes == tokens * 2 * kv_bytes_per_token(m, 1)
    more = sum(s[0, :, 0].nbytes for (kind, *_), s in cache.states.items() if kind == "conv")
    states = sum(s[0].nbytes for s in cache.states.values())
    assert states - more == state_bytes_per_sequence(m, 1)


MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1)
OTHERS = {
    "Lfm2": dict(layer_types=["conv", "full_attention"], block_multiple_of=8),
    "FalconH1": MAMBA | dict(mamba_d_ssm=128),
    "KimiLinear": dict(
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=16,
        linear_num_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_with_states_are_served(name, tmp_path):
    """As they keep them in transformers' cache: short convolutions, attention and a state-space
    model side by side in a layer, gated delta nets of another kind beside latent attention."""
    model = small_model(name, **OTHERS[name])
    model.save_pretrained(tmp_path)
    given = prompts([5, 1, 70, 17, 5])
    got = teacher_forced(load(tmp_path), [make_sequence(p) for p in given], steps=4)
    for logits, prompt in zip(got, given, strict=True):
        torch.testing.assert_close(logits, reference(model, prompt, 4), atol=1e-4, rtol=1e-4)
