"""Transformer Engine's layers as megarl builds them: the oldest and the newest version allowed.

Nothing is computed. Names, shapes, marks, checkpoint keys and signatures are Transformer Engine's.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib.metadata import PathDistribution

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.dist.self_keeping_adam import SelfKeepingAdam
from tests.te.cases import CASES, FUSED_CASES, LORA_CASES, NEWEST_ALONE
from tests.te.conftest import HOME, ROOT, VERSIONS, Facts

# read only with moe_permute_fusion or moe_router_fusion; megarl never sets the latter, and the
# former only where Transformer Engine is
BEHIND_FUSION = {
    "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_permute",
    "fused_permute_with_probs", "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs", "fused_topk_with_score_function", "fused_unpermute",
}  # fmt: skip

PARTS = r"(?<=weight)\.(query|key|value|z|beta|alpha)$"
each_version = pytest.mark.parametrize("version", VERSIONS)
each_case_and_version = pytest.mark.parametrize(
    ("version", "case"),
    [(v, c) for v in VERSIONS for c in CASES if v == "newest" or c not in NEWEST_ALONE],
)


def test_the_versions_are_the_ends_of_what_the_extra_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extra,) = map(Requirement, project["optional-dependencies"]["gpu"])
    found = []
    for version in VERSIONS:
        (info,) = (HOME / version).glob("transformer_engine-*.dist-info")
        found.append(PathDistribution(info).version)
    oldest, newest = found
    (floor,) = (s.version for s in extra.specifier if s.operator == ">=")
    assert Version(oldest) == Version(floor) and newest in extra.specifier


@each_case_and_version
def test_names_and_shapes_are_the_piece_tables(facts: Facts, version: str, case: str) -> None:
    for found in facts(version, "contract")["builds"][case].values():
        shapes = {name: param["shape"] for name, param in found["params"].items()}
        assert shapes == {name: param["shape"] for name, param in found["table"].items()}


@each_case_and_version
def test_the_gradient_norm_counts_what_ranks_do_not_share(
    facts: Facts, version: str, case: str
) -> None:
    _, layout, rank, _ = CASES[case]
    first = layout.coords(rank).tp == 0
    for found in facts(version, "contract")["builds"][case].values():
        for name, local in found["table"].items():
            if name not in found["buffers"]:
                param = found["params"][name]
                own = local["expert"] and layout.etp == 1  # no rank has the same expert
                shared = local["replicated"] and not own
                assert param["tensor_model_parallel"] is not shared, name
                assert param["counted"] is (first or not shared), name
                assert (param["allreduce"] is False) is local["expert"], name


@pytest.mark.parametrize("case", LORA_CASES)
@each_version
def test_attention_of_a_model_that_takes_tries_is_its_own_over_tries_alone(
    facts: Facts, version: str, case: str
) -> None:
    assert facts(version, "contract")["tries"][case] == {
        "attention": ["TEAttentionWithTries", "TEDotProductAttention"],
        "ours": True,
        "linear_proj": "TERowParallelLinear",
        "rotary_pos_emb": "RotaryByDepth",
    }


@each_case_and_version
def test_marks_of_sequence_parallelism_and_of_shared_weights_are_the_local_layers(
    facts: Facts, version: str, case: str
) -> None:
    te, local = (facts(version, "contract")["builds"][case][s]["params"] for s in ("te", "sdpa"))
    for mark in ("sequence_parallel", "shared"):
        marked = [{n for n, p in params.items() if p[mark]} for params in (te, local)]
        assert marked[0] == marked[1], mark


@each_case_and_version
def test_checkpoints_have_one_set_of_keys(facts: Facts, version: str, case: str) -> None:
    te, local = (facts(version, "contract")["builds"][case][s] for s in ("te", "sdpa"))
    assert te["stored"] == local["stored"]
    # megatron-core's own names with these layers, as in Megatron-LM's checkpoints
    # (whose parts of a gated delta network's weights it names as it saves them)
    keys = {re.sub(PARTS, "", key) for key, *_ in te["stored"]}
    assert te["megatron_keys"] == sorted(keys)


@pytest.mark.parametrize("case", LORA_CASES)
@each_version
def test_adapters_are_the_adapter_tables(facts: Facts, version: str, case: str) -> None:
    found = facts(version, "contract")["adapters"][case]
    assert found["params"] == found["table"] and found["params"]


@pytest.mark.parametrize("case", FUSED_CASES)
@each_version
def test_products_of_trained_layers_add_weight_gradients_to_the_buffers(
    facts: Facts, version: str, case: str
) -> None:
    """No kernel but the product's own touches a gradient. The LM head and the embedding, which are
    not Transformer Engine's, add theirs elsewhere."""
    found = facts(version, "contract")["fused"][case]
    linear = {"TELayerNormColumnParallelLinear", "TERowParallelLinear"}
    if "moe" in case or "deepseek" in case:
        linear |= {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
    for facts_ in (found["plain"], *([found["overlap"]] if version == "newest" else [])):
        assert linear <= set(facts_["fused"]) and not facts_["unfused"]
        outside = {"VocabParallelEmbedding", "ColumnParallelLinear", "ValueHead", "TopKRouter"}
        assert set(facts_["others"]) <= outside
    if version == "oldest":  # its layers may return no gradient, which overlapping refuses
        assert not found["overlap"]["fused"]


@pytest.mark.parametrize("case", LORA_CASES)
@each_version
def test_frozen_layers_have_no_buffers_to_add_to(facts: Facts, version: str, case: str) -> None:
    found = facts(version, "contract")["adapters"][case]["fused"]
    assert not found["fused"] and found["unfused"] and found["others"] == ["Adapter"]


@each_version
def test_layers_read_when_they_run_whether_they_add_to_the_buffers(version: str) -> None:
    """megarl sets the attribute after the layers are made. A buffer is found on the weight itself,
    and what the wrapper marks is told that its gradient is in."""
    module = HOME / version / "transformer_engine" / "pytorch" / "module"
    for name in ("linear", "layernorm_linear", "grouped_linear"):
        source = (module / f"{name}.py").read_text(encoding="utf-8")
        read = "=self.fuse_wgrad_accumulation" if name == "linear" and version == "newest" else ""
        assert (read or "                self.fuse_wgrad_accumulation,\n") in source, name
        assert ".grad_added_to_main_grad = True" in source and ".main_grad" in source, name


@each_version
def test_every_call_of_megatron_core_is_taken(facts: Facts, version: str) -> None:
    wrong = {call: why for call, why in facts(version, "contract")["calls"].items() if why}
    assert not wrong


@each_version
def test_the_stand_in_of_the_optimizer_has_its_signatures(facts: Facts, version: str) -> None:
    """tests/dist/test_optimizer_options.py: what the CPU tests call is what a GPU has."""
    for method, upstream in facts(version, "contract")["adam"].items():
        parameters = inspect.signature(getattr(SelfKeepingAdam, method)).parameters.values()
        own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        if method == "__init__":  # by name
            assert {p.name for p in own} <= {name for name, _ in upstream}
            continue
        assert [p.name for p in own] == [name for name, _ in upstream][: len(own)], method
        assert all(default for _, default in upstream[len(own) :]), method


@pytest.mark.parametrize("version", [*VERSIONS, "none"])
def test_megatron_core_uses_no_name_that_it_lacks_on_gpus(facts: Facts, version: str) -> None:
    found = facts(version, "names")
    assert found["on_cuda"] and found["te"] is (version != "none")
    unguarded = {m: set(names) - BEHIND_FUSION for m, names in found["missing"].items()}
    assert unguarded == {"moe_utils": set(), "rope_utils": set(), "clip_grads": set()}
    assert version == "none" or not any(found["missing"].values())


def test_gpus_get_no_communicator_for_the_collectives_of_one_rank(facts: Facts) -> None:
    """There is no process group at all in that process."""
    assert facts("none", "names")["skipped_alone"] == [True, True]


@each_version
def test_layers_keep_quantised_weights_where_offloading_looks_for_them(version: str) -> None:
    module = HOME / version / "transformer_engine" / "pytorch" / "module"
    assert "self._fp8_workspaces: Dict[str, " in (module / "base.py").read_text(encoding="utf-8")
