"""Prefill and decode over the slot cache against the model's own forward."""

from __future__ import annotations

import pytest
import torch
import transformers

from megarl.data.tokenizer import load_hf_tokenizer
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.server import kv_cache
from megarl.server.args import ServerArgs, parse_args
from megarl.server.protocol import SamplingParams
from megarl.server.runner import ModelRunner
from megarl.server.sequence import ServedSequence, TextTools
from megarl.server.weights import WeightStore
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import hash_text, tensor_hash
from tests.dist.moe_routing import hf_routers
from tests.tiny import (
    HYBRID_KINDS,
    HYBRID_MOE_KINDS,
    KINDS,
    MLA_KINDS,
    MOE_KINDS,
    VOCAB,
    WINDOW_ROPE_KINDS,
    save_tiny,
    tiny_hf,
)


def make_sequence(prompt, extra_key=None):
    return ServedSequence(
        rid="r",
        prompt=prompt,
        params=SamplingParams(),
        max_new_tokens=99,
        stop_ids=frozenset(),
        seed=0,
        done=None,
        extra_key=extra_key,
        wants_logprobs=True,
    )


def prompts(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in lengths]


@pytest.fixture(scope="module", params=(*KINDS, "glm4", "qwen3_5_text", *WINDOW_ROPE_KINDS))
def pair(request, tmp_path_factory):
    """(runner, the HF model it serves)."""
    torch.set_num_threads(1)
    kind = request.param
    path = save_tiny(tmp_path_factory.mktemp(kind), kind, tie=kind == "qwen3")
    runner = ModelRunner(ServerArgs(model_path=str(path), dtype="float32", device="cpu"))
    return runner, tiny_hf(kind, tie=kind == "qwen3")


def teacher_forced(runner, seqs, steps):
    """Logits [n,steps,V] in the order of `seqs`, feeding tokens 3, 4, ... whatever they say."""
    runner.make_room(seqs, used=0)
    rows, logits = runner.prefill(seqs, 0)
    columns = [logits]
    for t in range(steps - 1):
        for s in rows:
            s.output.append(3 + t)
        runner.make_room(rows, used=len(rows))
        columns.append(runner.decode(rows))
    back = [rows.index(s) for s in seqs]
    return torch.stack(columns, 1)[back]


def reference(model, prompt, steps):
    ids = torch.tensor([prompt + list(range(3, 2 + steps))])
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 :]


# most of what is read is padding
APART = [200, *[5] * 55, *[17] * 30, *[40] * 4]


@pytest.mark.parametrize("lengths", [[5, 1, 90, 17, 7, 60], APART])
def test_ragged_batches_give_the_models_logits(pair, lengths):
    runner, model = pair
    given = prompts(lengths)
    seqs = [make_sequence(p) for p in given]
    got = teacher_forced(runner, seqs, steps=4)
    for i, p in enumerate(given):
        torch.testing.assert_close(got[i], reference(model, p, 4), atol=1e-4, rtol=1e-4)


def small_model(name, **fields):
    """A random model of transformers."""
    base = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}ForCausalLM")
    model = cls(cls.config_class(**(base | fields))).float().eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith(("bias", "sinks")):
                p.normal_()
            elif p.ndim > 1:
                p.mul_(4)
    return model


# every other layer has a window, and every head a sink
GPT_OSS = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    head_dim=24,
    sliding_window=5,
    rope_parameters=dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=32, rope_theta=10000.0
    ),
)
# the last layer of six attends in full, rotated by another base
GEMMA = dict(
    num_hidden_layers=6,
    head_dim=24,
    query_pre_attn_scalar=20,
    sliding_window=5,
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", factor=4.0, rope_theta=50000.0),
        sliding_attention=dict(rope_type="default", rope_theta=300.0),
    ),
)
QWEN = dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=5, max_window_layers=2)


@pytest.mark.parametrize(
    ("name", "fields"), [("Qwen2", QWEN), ("GptOss", GPT_OSS), ("Gemma3", GEMMA)]
)
def test_windows_in_some_layers_are_served_deterministically_too(tmp_path, name, fields):
    """Also with sinks, and with rotary bases that differ."""
    model = small_model(name, **fields)
    model.save_pretrained(tmp_path)
    given = prompts([3, 17, 30, 40])
    for deterministic in (False, True):
        runner = ModelRunner(
            ServerArgs(
                model_path=str(tmp_path), dtype="float32", device="cpu", deterministic=deterministic
            )
        )
        for batch in [[p] for p in given] if deterministic else [given]:
            got = teacher_forced(runner, [make_sequence(p) for p in batch], steps=4)
            for logits, prompt in zip(got, batch, strict=True):
                torch.testing.assert_close(
                    logits, reference(model, prompt, 4), atol=1e-4, rtol=1e-4
                )


def test_equal_prompts_are_run_once_and_share_their_logits(pair):
    runner, model = pair
    a, b = prompts([12, 7])
    batches = []
    seen = runner.model.base_model.register_forward_pre_hook(
        lambda _, args, given: batches.append(given["input_ids"].shape), with_kwargs=True
    )
    seqs = [make_sequence(p) for p in (a, b, a, a, b)]
    with seen:
        got = teacher_forced(runner, seqs, steps=3)
    prefilled = [(1, 7), (1, 12)] if runner.cache.states else [(2, 12)]  # a state takes no padding
    assert [tuple(b) for b in batches] == [*prefilled, (5, 1), (5, 1)]
    for i, p in enumerate((a, b, a, a, b)):
        torch.testing.assert_close(got[i], reference(model, p, 3), atol=1e-4, rtol=1e-4)
    assert sorted(s.cached_tokens for s in seqs) == [0, 0, 6, 11, 11]


def test_no_kv_is_shared_between_extra_keys(pair):
    runner, model = pair
    (a,) = prompts([9])
    keys = ["v1", "v2", "v1", None, None]
    seqs = [make_sequence(a, extra_key=key) for key in keys]
    got = teacher_forced(runner, seqs, steps=2)
    assert [s.cached_tokens for s in seqs] == [0, 0, 8, 0, 8]
    for row in got:
        torch.testing.assert_close(row, reference(model, a, 2), atol=1e-4, rtol=1e-4)


def test_masked_positions_are_finite_whatever_memory_held(pair):
    """0 * NaN is NaN: neither fresh memory nor a broken model's rows may leak through a mask."""
    runner, model = pair
    runner.cache.clear()
    runner.cache.reserve(2, 100, used=0)
    assert not runner.cache.keys.any() and not runner.cache.values.any()
    runner.cache.values.fill_(torch.nan)
    runner.cache.keys.fill_(torch.nan)
    runner.cache.scrub(range(runner.cache.rows, runner.cache.rows))
    runner.probe()  # beside what runs
    assert bool(runner.cache.keys.isnan().all())
    runner.cache.scrub([0, 1])
    given = prompts([3, 60])
    got = teacher_forced(runner, [make_sequence(p) for p in given], steps=3)
    for i, p in enumerate(given):
        torch.testing.assert_close(got[i], reference(model, p, 3), atol=1e-4, rtol=1e-4)


def test_the_cache_keeps_to_its_budget_and_its_content():
    cache = kv_cache.KVCache(
        tiny_hf("llama", layers=1).config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=64,
        max_positions=2048,
        max_tokens=8192,
    )
    cache.reserve(60, 100, used=0)  # short and many
    assert cache.rows >= 60 and cache.positions >= 100
    assert cache.rows * cache.positions <= 8192
    cache.keys[:, :3, :, :50] = 7.0
    cache.reserve(4, 2000, used=3)  # then few and long: the empty rows go
    assert cache.rows >= 4 and cache.positions >= 2000
    assert cache.rows * cache.positions <= 8192
    assert bool((cache.keys[:, :3, :, :50] == 7.0).all()) and not cache.keys[:, :3, :, 50:].any()


def test_rows_survive_growth_and_moves_of_the_cache(pair):
    runner, model = pair
    runner.cache.clear()
    given = prompts([10, 20, 30])
    seqs = [make_sequence(p) for p in given]
    runner.make_room(seqs, used=0)
    rows, _ = runner.prefill(seqs, 0)
    before = runner.cache.positions
    runner.cache.reserve(9, 150, used=3)
    assert runner.cache.rows >= 9 and runner.cache.positions >= 150 > before
    runner.cache.copy_rows([2], [0], rows[2].length)  # the last row moves into a hole
    rows[2].output.append(3)
    torch.testing.assert_close(
        runner.decode([rows[2]])[0], reference(model, rows[2].prompt, 2)[1], atol=1e-4, rtol=1e-4
    )


def test_attention_the_server_does_not_have_is_refused_by_name(tmp_path):
    config = transformers.Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_logit_softcapping=30.0,
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Gemma2Attention.*softcap"):
        ModelRunner(ServerArgs(model_path=str(tmp_path), device="cpu"))


def test_a_cache_too_small_for_one_sequence_is_refused(tmp_path):
    path = save_tiny(tmp_path, "llama", layers=1)
    with pytest.raises(ValueError, match="max-total-tokens=64"):
        ModelRunner(ServerArgs(model_path=str(path), device="cpu", max_total_tokens=64))


def test_experts_are_served_and_loaded_under_their_checkpoint_names(tmp_path):
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    runner = ModelRunner(ServerArgs(model_path=str(tmp_path), dtype="float32", device="cpu"))
    (prompt,) = prompts([9])
    logits = teacher_forced(runner, [make_sequence(prompt)], steps=1)[:, 0]
    torch.testing.assert_close(logits[0], reference(model, prompt, 1)[0], atol=1e-4, rtol=1e-4)
    store = WeightStore(runner.model)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert store.tensors[name].shape == (16, 32)
    sums = store.checksums()
    store.load([(name, torch.zeros(16, 32))])
    store.load_directory(str(tmp_path))  # every name of the checkpoint is known
    assert store.checksums() == sums


@pytest.mark.parametrize("kind", (*HYBRID_KINDS, *WINDOW_ROPE_KINDS, "minimax_m2", "gpt_oss"))
def test_weights_have_the_names_that_trainers_send(tmp_path, kind):
    path = save_tiny(tmp_path, kind)
    runner = ModelRunner(ServerArgs(model_path=str(path), dtype="float32", device="cpu"))
    store = WeightStore(runner.model)
    table = build_piece_table(read_hf_config(path), Layout())
    assert store.tensors.keys() == {t.name for t in table.tensors}
    sums = store.checksums()
    for tensor in store.tensors.values():
        tensor.zero_()
    store.load_directory(str(path))
    assert store.checksums() == sums


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 44), ("float32", 138)])
def test_experts_of_any_size_are_served(tmp_path, dtype, size):
    """Also where their rows are no multiple of 16 bytes."""
    path = save_tiny(tmp_path, "qwen3_moe", layers=2, moe_intermediate_size=size)
    runner = ModelRunner(ServerArgs(model_path=str(path), dtype=dtype, device="cpu"))
    (prompt,) = prompts([9])
    logits = teacher_forced(runner, [make_sequence(prompt)], steps=1)[:, 0]
    model = tiny_hf("qwen3_moe", layers=2, moe_intermediate_size=size)
    model.set_experts_implementation("eager")
    tol = 1e-3 if dtype == "float32" else 0.5
    torch.testing.assert_close(
        logits[0].float(), reference(model, prompt, 1)[0], atol=tol, rtol=tol
    )


def test_a_tokenizer_that_cannot_be_loaded_is_named_with_its_directory(tmp_path):
    path = save_tiny(tmp_path, "llama", layers=1)
    assert TextTools(str(path)).tokenizer is None
    (path / "tokenizer_config.json").write_text("{}")
    for load in (TextTools, load_hf_tokenizer):
        with pytest.raises(ValueError, match="tokenizer") as refused:
            load(str(path))
        assert str(path) in str(refused.value)


@pytest.mark.parametrize("kind", MLA_KINDS)
def test_latent_attention_is_served_and_loaded(kind, tmp_path):
    """Keys and values of unlike sizes, cached and grown; the router's bias is loaded in float32
    even where the model is not."""
    path = save_tiny(tmp_path, kind, layers=2)
    runner = ModelRunner(ServerArgs(model_path=str(path), dtype="float32", device="cpu"))
    assert runner.cache.keys.shape[-1] == 20 and runner.cache.values.shape[-1] == 16
    model = tiny_hf(kind, layers=2)
    for given in map(prompts, ([5, 70, 5, 17], APART)):
        got = teacher_forced(runner, [make_sequence(p) for p in given], steps=3)
        for logits, prompt in zip(got, given, strict=True):
            torch.testing.assert_close(logits, reference(model, prompt, 3), atol=1e-4, rtol=1e-4)

    half = ModelRunner(ServerArgs(model_path=str(path), dtype="bfloat16", device="cpu"))
    store = WeightStore(half.model)
    before = store.checksums()
    save_tiny(tmp_path / "other", kind, layers=2, seed=1)
    store.load_directory(str(tmp_path / "other"))
    assert all(sum_ != before[name] for name, sum_ in store.checksums().items())
    other = dict(tiny_hf(kind, layers=2, seed=1).named_buffers())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert (name in store.tensors) == (kind in ("deepseek_v3", "kimi_k2", "glm4_moe_lite"))
    if kind == "deepseek_v3":
        assert torch.equal(store.tensors[name], other[name])


@pytest.mark.parametrize("kind", (*MOE_KINDS, *MLA_KINDS, *HYBRID_MOE_KINDS, "gpt_oss"))
def test_routes_are_those_of_the_model(kind, tmp_path):
    """Of every layer by its place in the model; two equal prompts, prefilled once, have their own
    afterwards."""
    layers = 4 if kind in HYBRID_MOE_KINDS else 3
    path, model, chosen = save_tiny(tmp_path, kind, layers=layers), tiny_hf(kind, layers=layers), {}
    args = ServerArgs(model_path=str(path), device="cpu", enable_return_routed_experts=True)
    given = prompts([5, 12, 5])
    seqs = [make_sequence(p) for p in [*given, given[0]]]
    teacher_forced(ModelRunner(args), seqs, steps=3)
    for i, router in hf_routers(model).items():
        router.register_forward_hook(lambda _m, _a, out, i=i: chosen.update({i: out[2]}))
    assert 0 < len(hf_routers(model)) <= layers
    for s in seqs:
        with torch.no_grad():
            model(torch.tensor([s.tokens]))
        got = torch.cat(s.routes).long()
        assert got.shape == (s.length, layers, model.config.num_experts_per_tok)
        for i in range(layers):
            want = chosen[i].sort().values if i in chosen else torch.zeros_like(got[:, i])
            assert torch.equal(got[:, i].sort().values, want)


def test_a_dense_model_has_no_routes_to_return(tmp_path):
    args = ServerArgs(
        model_path=str(save_tiny(tmp_path, "qwen3", layers=1)),
        device="cpu",
        enable_return_routed_experts=True,
    )
    with pytest.raises(ValueError, match=r"routed-experts: Qwen3ForCausalLM has no experts"):
        ModelRunner(args)


def test_a_hash_is_of_the_bits_in_row_major_order():
    t = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    whole = tensor_hash(t)
    assert tensor_hash(t.T.contiguous().T) == whole != tensor_hash(t.T)
    assert tensor_hash(t.bfloat16()) != whole
    flipped = t.clone()
    flipped.view(torch.int32)[2, 4] ^= 1
    assert tensor_hash(flipped) != whole
    assert tensor_hash(torch.tensor([0.0])) != tensor_hash(torch.tensor([-0.0]))
    assert len(hash_text(tensor_hash(torch.tensor(1.0)))) == 16


def test_command_line(capsys):
    args = parse_args(["--model-path", "m", "--port", "7", "--deterministic", "--threads", "2"])
    assert args == ServerArgs(model_path="m", port=7, deterministic=True, threads=2)
    for flag, value in (("max-running-requests", "0"), ("threads", "-1"), ("port", "70000")):
        with pytest.raises(SystemExit):
            parse_args(["--model-path", "m", f"--{flag}", value])
        assert f"--{flag}={value}" in capsys.readouterr().err
