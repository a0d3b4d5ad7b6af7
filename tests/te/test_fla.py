"""The kernels of flash-linear-attention that megarl calls: their names and arguments in the oldest
and the newest version looked at. The source is read, not run: it needs triton."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.te.conftest import HOME, VERSIONS

# name -> (module that megarl imports it from, files that may define it, arguments by name)
KERNELS = {
    "causal_conv1d": (
        "fla.modules.convolution",
        ("modules/convolution.py", "modules/causal_conv1d/ops.py"),
        {"activation", "cu_seqlens", "cu_seqlens_cpu"},
    ),
    "chunk_gated_delta_rule": (
        "fla.ops.gated_delta_rule",
        ("ops/gated_delta_rule/chunk.py",),
        {"q", "k", "v", "g", "beta", "use_qk_l2norm_in_kernel", "cu_seqlens", "cu_seqlens_cpu"},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_take_what_they_are_given(version: str, name: str) -> None:
    """An older version that lacks an argument of the newest takes it among its keywords."""
    fla = HOME / version / "fla"
    module, files, given = KERNELS[name]
    (found,) = (
        node
        for file in files
        if (fla / file).is_file()
        for node in ast.parse((fla / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    names = {arg.arg for arg in (*found.args.args, *found.args.kwonlyargs)}
    assert found.args.kwarg is not None and given - names <= {"cu_seqlens_cpu"}
    positional = [arg.arg for arg in found.args.args]
    assert positional[:2] == (["x", "weight"] if name == "causal_conv1d" else ["q", "k"])
    assert exported(fla, module, name)


def exported(fla: Path, module: str, name: str) -> bool:
    """Returns whether `module` has `name`: defined, imported, or of another that it stands for."""
    place = fla.joinpath(*module.split(".")[1:])
    if place.is_dir():
        return name in (place / "__init__.py").read_text(encoding="utf-8")
    if place.with_suffix(".py").is_file():
        return name in place.with_suffix(".py").read_text(encoding="utf-8")
    tree = ast.parse((place.parent / "__init__.py").read_text(encoding="utf-8"))
    (aliases,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_MODULE_ALIASES"
    )
    targets = aliases[place.name]
    return any(
        name
        in (place.parent / target.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
        for target in targets
        if (place.parent / target.replace(".", "/") / "__init__.py").is_file()
    )
