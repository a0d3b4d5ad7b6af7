"""LoRA in every layout equals PEFT on Hugging Face's model: outputs, gradients, updates, files.

Experts are compared with the closed form W + scale * B A: transformers fuses them into tensors
that PEFT has no layers for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as T
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from megarl.algos import Actor, LoRARef, Ref
from megarl.api.records import SaveLoadMeta, WeightUpdateMeta
from megarl.config.algo import PPOActorConfig
from megarl.config.engine import LoRAConfig
from tests.dist.engine_jobs import (
    OPTIMIZER,
    PLAIN,
    RECOMPUTE,
    SP,
    ZERO,
    Parallel,
    Tensors,
    batch,
    loss_fn,
    make_engine,
    save_model,
    state,
    weight_fn,
)
from tests.dist.lora_files import ALL, lora, write_adapter
from tests.dist.reference import hf_outputs
from tests.dist.test_checkpoint import dist_meta, resume
from tests.embedded_server import address, checksums, embedded_server, load
from tests.tiny import hf_named, save_tiny, tiny_hf
from tests.tiny_tokenizer import save_tokenizer

KW: dict[str, Any] = dict(outputs=("logprobs", "entropy"), temperature=0.8)
# (processes, family, targets, layout, engine settings)
CASES: list[tuple[int, str, tuple[str, ...], Parallel, dict[str, Any]]] = [
    (1, "qwen3", ALL, dict(), PLAIN),
    (2, "qwen2", ALL, dict(tp=2), PLAIN),
    (2, "qwen3", ("q_proj", "v_proj", "up_proj", "down_proj"), SP, PLAIN | RECOMPUTE),
    (2, "qwen2", ALL, dict(pp=2), ZERO | RECOMPUTE),
    (2, "qwen3", ALL, dict(cp=2), PLAIN),
    (2, "qwen2", ("q_proj", "v_proj"), dict(), ZERO),  # dp2
    (2, "qwen3_moe", ALL, dict(ep=2), PLAIN),
    (2, "qwen2_moe", ALL, dict(**SP, ep=2), PLAIN),
    (2, "glm4", ("q_proj", "gate_up_proj", "down_proj"), SP, PLAIN),
    (2, "qwen3_5_text", ALL, SP, PLAIN),
]
FULL: list[tuple[int, str, tuple[str, ...], Parallel, dict[str, Any]]] = [
    (2, "llama", ALL, dict(pp=2, vpp=2), PLAIN),
    (4, "qwen2", ALL, dict(tp=4), PLAIN),  # two ranks share a KV head
    (4, "qwen3", ALL, dict(**SP, pp=2), ZERO),
    (4, "glm", ALL, dict(tp=4), PLAIN),
    (2, "mixtral", ALL, dict(etp=2), PLAIN),
    (2, "qwen3_next", ALL, dict(cp=2), PLAIN),
    (2, "gpt_oss", ("q_proj", "v_proj", "o_proj"), dict(**SP, ep=2), PLAIN),
    (2, "qwen3_moe", ALL, SP, ZERO),
    (2, "qwen3_moe", ALL, dict(**SP, etp=2), PLAIN),
    (4, "qwen3_moe", ALL, dict(**SP, ep=2, etp=2), PLAIN | RECOMPUTE),
    (4, "qwen2_moe", ("gate_proj", "down_proj"), dict(pp=2, ep=2), ZERO),
    (4, "mixtral", ("w1", "w2", "w3"), dict(ep=2), ZERO),  # experts only, dp2
]


def name(case: Any) -> str:
    n, kind, targets, parallel, over = case
    layout = "".join(f"{k if k[0] != 's' else 'sp'}{int(v)}" for k, v in parallel.items())
    zero = "-zero" if not over["optimizer"] else ""
    return f"{n}-{kind}-{layout or 'dp'}-{'all' if targets == ALL else '+'.join(targets)}{zero}"


@pytest.fixture(scope="module")
def references() -> dict[Any, Any]:
    return {}


# ---- the reference


def peft_model(kind: str, adapter: str) -> Any:
    return peft.PeftModel.from_pretrained(tiny_hf(kind), adapter, is_trainable=True).eval()


def by_file_name(model: Any) -> Tensors:
    """Returns the trained parameters by the names of PEFT's files."""
    return {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}


class ClosedForm:
    """Hugging Face's model with W + scale * B A in place of W, adapters by PEFT's names."""

    def __init__(self, kind: str, adapter: str, scale: float) -> None:
        self.hf, self.scale = tiny_hf(kind).requires_grad_(False), scale
        self.config = self.hf.config
        self.adapters = {n: p.requires_grad_() for n, p in load_file(f"{adapter}/{FILE}").items()}

    def weights(self) -> Tensors:
        """Returns the merged weights by the names of HF's files."""
        found = hf_named(self.hf, dict(self.hf.named_parameters()))
        for n, w in found.items():
            stem = "base_model.model." + n.removesuffix("weight")
            if f"{stem}lora_A.weight" in self.adapters:
                a, b = (self.adapters[f"{stem}lora_{x}.weight"] for x in "AB")
                found[n] = w + self.scale * b @ a
        return found

    def __call__(self, *args: Any, **kw: Any) -> Any:
        flat = self.weights()
        values = {}
        for n, p in self.hf.named_parameters():
            names = list(hf_named(self.hf, {n: p}))
            parts = [flat[m] for m in names]
            if n.endswith("gate_up_proj"):
                each = [torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
                values[n] = torch.stack(each)
            else:
                values[n] = torch.stack(parts) if n.endswith("down_proj") else parts[0]
        return torch.func.functional_call(self.hf, values, args, kw)


FILE = "adapter_model.safetensors"


def reference(model: Any, adapters: Tensors) -> dict[str, Any]:
    """Returns the expected result of `run`, from autograd and torch's AdamW over the adapters."""
    optimizer = torch.optim.AdamW(
        list(adapters.values()), lr=OPTIMIZER["lr"], betas=(0.9, 0.95), eps=OPTIMIZER["eps"],
        weight_decay=0.1,
    )  # fmt: skip
    result: dict[str, Any] = {}
    b = batch()
    for k in range(3):
        optimizer.zero_grad()
        outputs = hf_outputs(model, b)
        loss = loss_fn(outputs, b)[0] / weight_fn(b)
        loss.backward()
        if k == 0:
            result["logprobs"] = outputs["logprobs"].detach()
            result["loss"] = float(loss.detach())
            # an expert without tokens has none
            result["grads"] = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for n, p in adapters.items()
            }
        norm = torch.nn.utils.clip_grad_norm_(list(adapters.values()), 1.0)
        result.setdefault("grad_norm", float(norm))
        optimizer.step()
        if k != 1:
            result[f"after {k + 1}"] = {n: p.detach().clone() for n, p in adapters.items()}
    return result


def peft_reference(kind: str, adapter: str) -> dict[str, Any]:
    model = peft_model(kind, adapter)
    return reference(model, by_file_name(model))


def closed_reference(kind: str, adapter: str) -> dict[str, Any]:
    model = ClosedForm(kind, adapter, 6.0 / 4)
    return reference(model, model.adapters)


# ---- parity


def run(path: str, cfg: LoRAConfig, parallel: Parallel, out: str, **over: Any) -> dict[str, Any]:
    engine = make_engine(path, parallel, lora=cfg, **over)
    result: dict[str, Any] = {"logprobs": engine.forward(batch(), temperature=0.8)}
    with engine.disable_adapter():
        result["base"] = engine.forward(batch(), temperature=0.8)
    if not engine.config.optimizer.distributed:
        engine.backward_batch(batch(), loss_fn, weight_fn, **KW)
        result["grads"] = state(engine, grads=True)
    for k in range(3):
        stats = engine.train_batch(batch(), loss_fn, weight_fn, **KW)
        result.setdefault("stats", stats)
        if k != 1:
            engine.save(SaveLoadMeta(path=f"{out}/{k + 1}", weight_format="peft"))
    result["counts"] = counts(engine)
    engine.destroy()
    return result


def counts(engine: Any) -> tuple[int, int, int, int]:
    """Returns this rank's elements of adapters, of gradient buffers and of all parameters, and the
    number of tensors with optimizer state."""
    from megarl.engine.offload import gradient_tensors

    adapters = sum(p.numel() for n, p in engine.state.params.items() if "_lora." in n)
    grads = sum(t.numel() for t in gradient_tensors(engine.state.chunks))
    states = sum(
        len(part.optimizer.state)
        for part in engine.state.optimizer.chained_optimizers
        if part.optimizer is not None
    )
    return adapters, grads, sum(p.numel() for p in engine.state.params.values()), states


def check_parity(case: Any, worlds: Any, models: Path, references: Any, tmp_path: Path) -> None:
    n, kind, targets, parallel, over = case
    path = save_model(models, kind, False)
    cfg = lora(targets)
    adapter = write_adapter(models / f"{kind}-{'-'.join(targets)}", path, cfg)
    if (kind, targets) not in references:
        closed = "moe" in kind or kind in ("mixtral", "qwen3_next")  # experts in one tensor
        make = closed_reference if closed else peft_reference
        references[kind, targets] = make(kind, adapter)
    want = references[kind, targets]
    cfg.adapter_path = adapter
    ranks = worlds(n).run(run, path, cfg, parallel, str(tmp_path), **over)

    got = ranks[0]
    torch.testing.assert_close(got["logprobs"], want["logprobs"], rtol=0, atol=1e-4)
    base = hf_outputs(tiny_hf(kind), batch())["logprobs"].detach()
    torch.testing.assert_close(got["base"], base, rtol=0, atol=1e-4)
    assert (got["base"] - got["logprobs"]).abs().max() > 0.1
    assert got["stats"]["loss"] == pytest.approx(want["loss"], abs=1e-4)
    assert got["stats"]["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    if "grads" in got:
        assert got["grads"].keys() == want["grads"].keys()
        for key, value in want["grads"].items():
            assert (got["grads"][key] - value).norm() <= 1e-4 * value.norm(), key
    for k, atol in ((1, 2e-6), (3, 1e-5)):
        saved = load_file(tmp_path / str(k) / FILE)
        assert saved.keys() == want[f"after {k}"].keys()
        for key, value in want[f"after {k}"].items():
            torch.testing.assert_close(saved[key], value, rtol=0, atol=atol, msg=key)
    for adapters, grads, everything, states in (r["counts"] for r in ranks):
        # buffers are padded; the engine trains and keeps state for the adapters only
        assert adapters <= grads < adapters + 4096 and adapters < everything / 3
        assert states > 0


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_peft(case: Any, worlds: Any, models: Path, references: Any, tmp_path: Path) -> None:
    check_parity(case, worlds, models, references, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=name)
def test_more_layouts(
    case: Any, worlds: Any, models: Path, references: Any, tmp_path: Path
) -> None:
    check_parity(case, worlds, models, references, tmp_path)


# ---- the reference of the actor


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [("qwen3", SP), ("qwen2_moe", dict(**SP, ep=2))],
    ids=("qwen3-sp2", "qwen2_moe-sp2ep2"),
)
def test_the_actor_without_its_adapters_is_the_reference(
    kind: str, parallel: Parallel, worlds: Any, models: Path
) -> None:
    """Bit for bit, before and between updates; the actor itself is not changed by the passes."""
    path = save_model(models, kind, False)
    cfg = lora(adapter_path=write_adapter(models / f"{kind}-all-linear", path, lora()))
    assert all(worlds(2).run(run_reference, path, cfg, parallel))


def run_reference(path: str, cfg: LoRAConfig, parallel: Parallel) -> bool:
    from megarl.engine.offload import gradient_tensors

    alone = make_engine(path, parallel, trained=False)
    want = Ref(alone.config, alone, temperature=0.8).compute_logp(batch())
    alone.destroy()

    results = []
    for asked in (True, False):
        engine = make_engine(path, parallel, lora=cfg)
        actor = Actor(PPOActorConfig(lora=cfg), engine, temperature=0.8)
        ref = LoRARef(actor)
        for _ in range(2):
            if asked:
                assert torch.equal(ref.compute_logp(batch()), want)
            engine.train_batch(batch(), loss_fn, weight_fn, **KW)
        engine.backward_batch(batch(), loss_fn, weight_fn, **KW)
        if asked:
            assert torch.equal(ref.compute_logp(batch()), want)
        ref.destroy()
        logp = actor.compute_logp(batch())
        assert not torch.equal(logp, want)
        grads = [t.clone() for t in gradient_tensors(engine.state.chunks)]
        adapters = [p.clone() for n, p in engine.state.params.items() if "_lora." in n]
        results.append((logp, *grads, *adapters))
        engine.destroy()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- files


def test_peft_reads_what_the_engine_writes_and_the_other_way_round(
    worlds: Any, models: Path, tmp_path: Path
) -> None:
    """PEFT writes and reads the directories; logits, names and merged weights agree."""
    path = save_model(models, "qwen3", False)
    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "o_proj", "up_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=targets, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(tiny_hf("qwen3"), config).eval()
    with torch.no_grad():
        for p in by_file_name(model).values():
            p.normal_(std=0.1)
    model.save_pretrained(tmp_path / "peft")
    want = hf_outputs(model, batch())["logprobs"].detach()

    cfg = lora(tuple(targets), use_rslora=True, adapter_path=str(tmp_path / "peft"))
    logprobs = worlds(2).run(run_files, path, cfg, dict(**SP), str(tmp_path))[0]
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-4)

    # another user's server, elsewhere, can read it
    adapter = tmp_path / "adapter"
    assert (adapter / FILE).stat().st_mode == (adapter / "adapter_config.json").stat().st_mode
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(base).is_absolute()
    assert (adapter / "tokenizer.json").is_file()
    again = peft.PeftModel.from_pretrained(tiny_hf("qwen3"), adapter).eval()
    mine, theirs = (load_file(tmp_path / d / FILE) for d in ("adapter", "peft"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert torch.equal(hf_outputs(again, batch())["logprobs"], want)
    merged = model.merge_and_unload().state_dict()
    for n, w in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(w, merged[n], rtol=0, atol=1e-6, msg=n)


def run_files(path: str, cfg: LoRAConfig, parallel: Parallel, out: str) -> torch.Tensor:
    engine = make_engine(path, parallel, lora=cfg)
    logprobs = engine.forward(batch(), temperature=0.8)
    tokenizer = save_tokenizer(Path(f"{out}/tokenizer-{engine.state.groups.rank}"))
    engine.save(SaveLoadMeta(path=f"{out}/adapter", weight_format="peft", tokenizer=tokenizer))
    engine.save(SaveLoadMeta(path=f"{out}/merged"))
    engine.load(SaveLoadMeta(path=f"{out}/merged"))  # adapters are initialised anew
    again = engine.forward(batch(), temperature=0.8)
    torch.testing.assert_close(again, logprobs, rtol=0, atol=1e-4)
    engine.load(SaveLoadMeta(path=path))
    engine.load(SaveLoadMeta(path=f"{out}/adapter", weight_format="peft"))
    assert torch.equal(engine.forward(batch(), temperature=0.8), logprobs)
    engine.destroy()
    return logprobs


@pytest.mark.full
def test_merged_weights_reach_a_server(worlds: Any, models: Path, tmp_path: Path) -> None:
    """Streamed in bf16, they give the checksums of a server that loads the merged directory."""
    path = str(save_tiny(tmp_path / "model", "qwen2", dtype=torch.bfloat16))
    cfg = lora(adapter_path=write_adapter(tmp_path / "adapter", path, lora()))
    with embedded_server(Path(path), log=tmp_path / "log") as server:
        before = checksums(server)
        worlds(2).run(run_sync, path, cfg, address(server), str(tmp_path / "merged"))
        streamed = checksums(server)
        load(server, tmp_path / "merged")
        assert checksums(server) == streamed != before


def run_sync(path: str, cfg: LoRAConfig, server: str, out: str) -> None:
    engine = make_engine(path, SP, lora=cfg, dtype="bfloat16")
    meta = WeightUpdateMeta(
        type="distributed", version=3, addresses=(server,), bucket_bytes=20_000, verify=True
    )
    engine.upload_weights(meta)
    engine.save(SaveLoadMeta(path=out))
    engine.destroy()


@pytest.mark.parametrize(
    "kind, parallel, over",
    [
        ("qwen3", SP, dict()),
        ("qwen3", dict(pp=2), dict(dtype="bfloat16")),
        ("qwen3_moe", dict(ep=2), dict()),
    ],
    ids=("sp2", "pp2-bf16", "ep2"),
)
def test_resumed_training_is_bitwise_the_uninterrupted_one(
    kind: str, parallel: Parallel, over: Any, worlds: Any, models: Path, tmp_path: Path
) -> None:
    """The checkpoint holds the adapters alone, and another layout loads it."""
    path = save_model(models, kind, False)
    out = str(tmp_path / "ck")
    for r in worlds(2).run(resume, path, out, parallel, {"lora": lora(), **over}):
        assert r["at_load"] == [] and r["at_end"] == []
        assert r["figures"][0] == r["figures"][1]
        assert r["trained"] > 0 and r["resumed"] > 0
    stored = FileSystemReader(out).read_metadata().state_dict_metadata
    weights = [k for k in stored if k.startswith("decoder.") or "weight" in k]
    assert weights and all("_lora." in k for k in weights)
    here, there = (
        worlds(n).run(run_reload, path, out, p, over) for n, p in ((2, parallel), (1, {}))
    )
    (before, after), (_, elsewhere) = here[0], there[0]
    assert sum(not torch.equal(after[n], before[n]) for n in before) >= 7 * 4
    assert all(torch.equal(after[n], elsewhere[n]) for n in before)


def run_reload(
    path: str, checkpoint: str, parallel: Parallel, over: Any
) -> tuple[Tensors, Tensors]:
    engine = make_engine(path, parallel, lora=lora(), **over)
    before = state(engine)
    engine.load(dist_meta(checkpoint))
    after = state(engine)
    engine.destroy()
    return before, after


# ---- value heads


def test_a_value_head_is_trained_as_a_whole(worlds: Any, models: Path, tmp_path: Path) -> None:
    """The head is saved with the adapters, as PEFT's modules_to_save."""
    path = save_model(models, "qwen2", True)
    loaded = worlds(2).run(run_critic, path, dict(pp=2), str(tmp_path / "critic"))
    saved = load_file(tmp_path / "critic" / FILE)
    score = saved["base_model.model.score.weight"]
    assert score.abs().max() > 0 and len(saved) == 2 + 4 * 7 * 2
    assert all(loaded)

    base = T.AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "critic").eval()
    b = batch()
    with torch.no_grad():
        scores = model(b["input_ids"], attention_mask=b["attention_mask"].long()).logits[..., 0]
    want = torch.cat([torch.zeros_like(scores[:, :1]), scores[:, :-1]], 1)
    got = torch.load(tmp_path / "values.pt")
    torch.testing.assert_close(got, want * b["attention_mask"], rtol=0, atol=1e-4)


def run_critic(path: str, parallel: Parallel, out: str) -> bool:
    def value_loss(outputs: Tensors, b: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
        return ((outputs["values"] - 1.0).square() * b["loss_mask"]).sum(), {}

    kw: dict[str, Any] = dict(head="value", lora=lora(), optimizer={"eps": 1e-8})
    engine = make_engine(path, parallel, **kw)
    for _ in range(3):
        engine.train_batch(batch(), value_loss, weight_fn, outputs=("values",))
    engine.save(SaveLoadMeta(path=out, weight_format="peft"))
    values = engine.forward(batch(), outputs=("values",))
    if torch.distributed.get_rank() == 0:
        torch.save(values, Path(out).parent / "values.pt")
    engine.destroy()

    engine = make_engine(path, parallel, **kw)
    engine.load(SaveLoadMeta(path=out, weight_format="peft"))
    again = engine.forward(batch(), outputs=("values",))
    engine.destroy()
    return torch.equal(values, again)
