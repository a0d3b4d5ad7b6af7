"""The rollout client, executor and workflow against a real embedded server."""

import asyncio
import dataclasses
import os
import threading

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.data.dataset import build_dataloader, build_dataset
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.local import SGLangEngine
from megarl.rollout.rewards import RewardPool, get_reward_fn
from megarl.rollout.server_process import start_server
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.utils.http import call_json
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

SERVER = ServerConfig(context_length=1024, max_running_requests=16, deterministic=True, threads=1)
ROLLOUT = RolloutConfig(request_timeout=60, setup_timeout=30, episode_timeout=120)


def pids_of(engine: SGLangEngine) -> list[int]:
    """Those of its servers, in the order of their addresses."""
    ports = [address.rpartition(":")[2] for address in engine.addresses]
    children = psutil.Process().children(recursive=True)
    pids = [c.pid for port in ports for c in children if port in c.cmdline()]
    assert len(pids) == len(ports)
    return pids


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one shape and one tokenizer: m0 to start from, m1 to update to."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_tiny(root / f"m{seed}", "qwen3", layers=2, seed=seed, max_position_embeddings=1024)
        save_tokenizer(root / f"m{seed}")
    return root


@pytest.fixture(scope="module")
def client(models, tmp_path_factory):
    engine = SGLangEngine(
        ROLLOUT,
        SERVER,
        model_path=str(models / "m0"),
        dtype="float32",
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    engine.initialize()
    yield engine
    pids = pids_of(engine)
    engine.destroy()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(scope="module")
def tokenizer(models):
    return save_tokenizer(models / "m0")


def request(*, rid="r", ids=(2, 40, 50, 60), seed=None, **gconfig):
    g = GenerationHyperparameters(**({"max_new_tokens": 16, "ignore_eos": True} | gconfig))
    return ModelRequest(rid=rid, input_ids=list(ids), gconfig=g, seed=seed)


def load(client, path, version):
    """What a disk weight sync does to the only server."""
    (address,) = client.addresses
    body = {"model_path": str(path), "weight_version": str(version)}
    call_json("POST", address, "/update_weights_from_disk", body, timeout=60)
    meta = WeightUpdateMeta(type="disk", path=str(path), version=version, timeout=30)
    client.update_weights(meta).result(timeout=60)


def hf_logprobs(path, response, temperature):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    with torch.no_grad():
        logp = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    n = response.input_len
    return logp[n - 1 : -1].gather(1, ids[0, n:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_temperature(client, models, temperature):
    reqs = [request(rid=str(i), seed=i, temperature=temperature) for i in range(4)]
    out = asyncio.run(client.agenerate_many(reqs))
    assert len({tuple(r.output_tokens) for r in out}) > 1
    for r in out:
        expected = hf_logprobs(models / "m0", r, temperature)
        torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=1e-4, rtol=0)
        assert r.stop_reason == "length" and r.output_len == 16


def test_greedy_is_hfs_greedy(client, models):
    out = asyncio.run(client.agenerate(request(greedy=True)))
    model = AutoModelForCausalLM.from_pretrained(models / "m0", dtype=torch.float32)
    ids = torch.tensor([[2, 40, 50, 60]])
    for _ in range(16):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert out.output_tokens == ids[0, 4:].tolist()


def test_seeded_samples_are_reproducible_and_differ_by_seed(client):
    def tokens(*seeds):
        reqs = [request(rid=str(i), seed=s) for i, s in enumerate(seeds)]
        return [r.output_tokens for r in asyncio.run(client.agenerate_many(reqs))]

    first = tokens(1, 2, 3)
    assert tokens(3, 1) == [first[2], first[0]]
    assert first[0] != first[1] != first[2]


def test_samples_aborted_by_a_pause_end_as_if_nothing_had_happened(client, monkeypatch):
    n, sent = 400, []
    reqs = [request(rid=str(i), seed=i, max_new_tokens=n) for i in range(3)]
    whole = asyncio.run(client.agenerate_many(reqs))
    pool = client.opened().pool
    call = pool.call

    def spy(address, method, path, body=None, **kwargs):
        if path == "/generate":
            sent.append([len(ids) for ids in body["input_ids"]])
        return call(address, method, path, body, **kwargs)

    monkeypatch.setattr(pool, "call", spy)

    async def interrupted():
        task = asyncio.ensure_future(client.agenerate_many(reqs))
        for _ in range(5):
            await asyncio.sleep(0.1)
            await asyncio.to_thread(client.pause)
            await asyncio.to_thread(client.resume)
        return await asyncio.wait_for(task, 60)

    again = asyncio.run(interrupted())
    assert any(length > 4 for lengths in sent for length in lengths), "nothing was interrupted"
    for a, b in zip(whole, again):
        assert a.output_tokens == b.output_tokens and b.output_len == n
        torch.testing.assert_close(
            torch.tensor(a.output_logprobs), torch.tensor(b.output_logprobs), atol=1e-5, rtol=0
        )


def test_refused_requests_carry_the_servers_message(client):
    with pytest.raises(RuntimeError, match=r"400.*context length"):
        asyncio.run(client.agenerate(request(ids=[5] * 1100)))


def test_a_weight_update_in_mid_sample_shows_in_its_versions(client, models):
    """Tokens before the update carry the old version, those after it the new, and the logprobs of
    both are those of the weights that wrote them.
    """
    n = 800

    async def across(delay, version):
        task = asyncio.ensure_future(client.agenerate(request(seed=5, max_new_tokens=n)))
        await asyncio.sleep(delay)
        await asyncio.to_thread(client.pause)
        await asyncio.to_thread(load, client, models / "m1", version)
        await asyncio.to_thread(client.resume)
        return await asyncio.wait_for(task, 60)

    for version, delay in ((2, 0.2), (4, 0.4), (6, 0.8), (8, 0.1)):  # machines differ in speed
        load(client, models / "m0", version - 1)
        out = asyncio.run(across(delay, version))
        assert client.get_version() == version
        old = sum(v == version - 1 for v in out.output_versions)
        assert out.output_versions == [version - 1] * old + [version] * (n - old)
        if 0 < old < n:
            break
    assert 0 < old < n, "no update fell into a sample"
    before, after = (hf_logprobs(models / m, out, 1.0) for m in ("m0", "m1"))
    expected = torch.cat([before[:old], after[old:]])
    torch.testing.assert_close(torch.tensor(out.output_logprobs), expected, atol=2e-4, rtol=0)
    load(client, models / "m0", version + 1)


@pytest.fixture(scope="module")
def pool():
    with RewardPool(1, timeout=30) as p:
        yield p


def digits(prompt, completion, prompt_ids, completion_ids, *, answer, **row):
    """Something a random model earns now and then, and a check of what a reward is given."""
    assert prompt.endswith("assistant: ") and len(prompt_ids) > 3 and "messages" in row
    return float(sum(c.isdigit() for c in completion)) / 10


def test_prepare_batch_makes_the_contracts_batch(client, tokenizer, pool):
    cfg = DatasetConfig(type="arithmetic", size=12, batch_size=4)
    data = build_dataset(cfg, tokenizer, purpose="rl", seed=1)
    g = GenerationHyperparameters(n_samples=3, max_new_tokens=12, temperature=0.7, seed=9)
    flow = RLVRWorkflow(digits, g, tokenizer, reward_pool=pool)
    version = client.get_version()
    batch = client.prepare_batch(build_dataloader(data, cfg, seed=1), flow).padded()
    b, s = batch["input_ids"].shape
    assert b == 12
    assert batch["group_ids"].tolist() == [i // 3 for i in range(12)]
    dtypes = {
        "input_ids": torch.int64,
        "attention_mask": torch.bool,
        "loss_mask": torch.bool,
        "logprobs": torch.float32,
        "versions": torch.int32,
    }
    for key, dtype in dtypes.items():
        assert batch[key].shape == (b, s) and batch[key].dtype == dtype
    trained = batch["loss_mask"]
    assert not (trained & ~batch["attention_mask"]).any() and trained.any(1).all()
    assert (batch["logprobs"][~trained] == 0).all() and (batch["logprobs"][trained] < 0).all()
    assert (batch["versions"][~trained] == -1).all()
    assert (batch["versions"][trained] == version).all()
    first = next(iter(build_dataloader(data, cfg, seed=1)))
    for i in range(b):
        ids = first[i // 3]["prompt_ids"]
        assert batch["input_ids"][i, : len(ids)].tolist() == ids
        assert not trained[i, : len(ids)].any() and trained[i, len(ids)]
        text = tokenizer.decode(batch["input_ids"][i][trained[i]], skip_special_tokens=True)
        earned = sum(c.isdigit() for c in text) / 10
        assert batch["rewards"][i] == pytest.approx(earned)
        ended = batch["input_ids"][i][trained[i]][-1] == tokenizer.eos_token_id
        assert bool(batch["truncated"][i]) == (not ended)
    stats = client.stats()
    assert stats["accepted"] == stats["submitted"] == 4 and stats["wait_time"] > 0
    client.set_version(version + 1)

    evaluation = client.rollout_batch(
        data,
        RLVRWorkflow(
            get_reward_fn("arithmetic"),
            GenerationHyperparameters(greedy=True, max_new_tokens=4),
            tokenizer,
            reward_pool=pool,
        ),
    )
    assert len(evaluation["rewards"]) == 12
    again = client.rollout_batch(data, flow).padded()
    assert torch.equal(again["input_ids"], client.rollout_batch(data, flow).padded()["input_ids"])


@pytest.mark.parametrize("order, base", [("submission", 100), ("completion", 200)])
def test_asynchronous_batches_stay_within_the_staleness_bound(
    client, models, tokenizer, pool, order, base
):
    """Weights change under running episodes; every token carries the version that wrote it, and
    none is older than the bound when its batch is handed out.
    """
    eta, before, (address,) = 2, client.get_version(), client.addresses

    def serve(path, version):
        body = {"model_path": str(path), "weight_version": str(version)}
        call_json("POST", address, "/update_weights_from_disk", body, timeout=60)

    serve(models / "m0", base)
    remote = RemoteSGLangEngine(
        dataclasses.replace(
            ROLLOUT, addresses=[address], max_head_offpolicyness=eta, order=order,
            max_concurrent_rollouts=6,
        )
    )  # fmt: skip
    remote.set_version(base)
    remote.initialize()
    try:
        cfg = DatasetConfig(type="arithmetic", size=40, batch_size=4)
        data = build_dataset(cfg, tokenizer, purpose="rl", seed=1)
        loader = build_dataloader(data, cfg, seed=1)
        g = GenerationHyperparameters(n_samples=2, max_new_tokens=60, ignore_eos=True, seed=1)
        flow = Uneven(digits, g, tokenizer, reward_pool=pool)
        remote.executor.expect(6)
        ages, episodes = set(), []
        for version in range(base, base + 6):
            batch = remote.prepare_batch(loader, flow).padded()
            assert len(batch["rewards"]) == 8
            episodes += batch["episode_ids"][::2].tolist()
            trained = batch["versions"][batch["loss_mask"]]
            assert trained.min() >= version - eta and trained.max() <= version
            ages |= set((version - trained).tolist())
            remote.executor.trained(batch["episode_ids"])
            remote.pause()
            load(remote, models / f"m{version % 2}", version + 1)
            remote.resume()
        stats = remote.stats()
        assert max(ages) >= 1, "nothing was generated ahead"
        assert stats["submitted"] == stats["accepted"] == stats["trained"] == 24
        assert sorted(episodes) == list(range(24))
        assert (episodes == sorted(episodes)) == (order == "submission")
    finally:
        remote.destroy()
        serve(models / "m0", before)


class Uneven(RLVRWorkflow):
    """Every third row's answers are longer."""

    async def arun_episode(self, engine, data):
        tokens = 160 if data["episode_id"] % 3 == 0 else 20
        self.gconfig = self.gconfig.new(max_new_tokens=tokens)
        return await super().arun_episode(engine, data)


def test_a_raising_reward_stops_the_run(client, tokenizer, pool):
    cfg = DatasetConfig(type="arithmetic", size=2)
    data = build_dataset(cfg, tokenizer, purpose="rl", seed=1)
    rows = [data[i] | {"prompt": "not the template"} for i in range(2)]
    g = GenerationHyperparameters(max_new_tokens=2)
    with pytest.raises(RuntimeError, match=r"reward digits on row \d raised AssertionError"):
        client.rollout_batch(rows, RLVRWorkflow(digits, g, tokenizer, reward_pool=pool))


def test_two_servers_share_the_work_and_end_with_the_client(models, tmp_path):
    before = threading.active_count()
    engine = SGLangEngine(
        ROLLOUT,
        ServerConfig(**vars(SERVER) | {"count": 2}),
        model_path=str(models / "m0"),
        dtype="float32",
        log_dir=tmp_path,
    )
    engine.initialize()
    try:
        assert len(set(engine.addresses)) == 2

        async def several():
            return await asyncio.gather(*(engine.agenerate(request(seed=i)) for i in range(4)))

        asyncio.run(several())
        engine.check_health()
        pids = pids_of(engine)
        os.kill(pids[0], 9)
        out = asyncio.run(several())  # the living one takes over
        assert all(r.output_len == 16 for r in out)
        with pytest.raises(RuntimeError, match=engine.addresses[0]):
            engine.check_health()
    finally:
        engine.destroy()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert threading.active_count() == before


def test_a_server_that_dies_at_start_shows_its_log(tmp_path):
    expected = r"(?s)exited with \d+\n--- end of .*server.log ---\n.*nowhere"
    with pytest.raises(RuntimeError, match=expected):
        start_server(
            SERVER,
            model_path=str(tmp_path / "nowhere"),
            dtype="float32",
            log_path=tmp_path / "server.log",
        )
