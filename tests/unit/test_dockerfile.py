"""One installation for GPUs: README, docs/servers.md and the Dockerfile give the same lines."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = re.compile(r"^(?:RUN )?(pip install .*?)(?:  +#.*)?$", re.MULTILINE)


def installs(text: str) -> list[str]:
    """The lines of pip up to megarl's own, which is the last one."""
    found = PIP.findall(text)
    return found[: next(i for i, line in enumerate(found) if " -e " in line) + 1]


def of_page(page: str) -> str:
    """The section of a page about GPUs."""
    section = re.split(r"\n##+ On GPUs\n", (ROOT / page).read_text())[1]
    return re.split(r"\n##+ ", section)[0]


def test_the_image_is_the_documented_installation() -> None:
    dockerfile, documented = (ROOT / "Dockerfile").read_text(), of_page("docs/servers.md")
    lines = installs(dockerfile)
    bare = [line.replace(" -c constraints/gpu.txt", "") for line in lines]
    assert [line.split()[2].strip('"').partition("==")[0] for line in bare] == [
        "sglang", "wheel", "--no-build-isolation", "-e",
    ]  # fmt: skip
    assert lines == installs(documented) == installs(of_page("README.md"))
    assert dockerfile.index("COPY . .") < dockerfile.index(lines[-1])
    assert dockerfile.index("COPY constraints/gpu.txt") < dockerfile.index(lines[0])
    assert "We have built no image" in dockerfile.partition("FROM")[0]


def test_its_versions_are_those_of_the_tests() -> None:
    dockerfile, documented = (ROOT / "Dockerfile").read_text(), of_page("docs/servers.md")
    (pinned,) = re.findall(r'"sglang==([\d.]+)"', dockerfile)
    assert f"\nsglang=={pinned}\n" in (ROOT / "constraints" / "sglang-cpu.txt").read_text()
    of_gpus = (ROOT / "constraints" / "gpu.txt").read_text()
    for file in ("sglang-cpu.txt", "te-newest.txt", "mcore-newest.txt"):
        pins = re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints" / file).read_text(), re.M)
        for name, version in pins:
            if name in ("sglang", "transformers", "transformer-engine", "megatron-core"):
                assert f"\n{name}=={version}" in of_gpus
    (said,) = re.findall(rf"\({re.escape(pinned)}: .* with CUDA (\d+),", documented)
    (major,) = re.findall(r"^FROM nvidia/cuda:(\d+)\..*-devel-", dockerfile, re.MULTILINE)
    assert major == said
