"""A YAML file by a stranger ends in one line within a second, whichever command reads it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.compose import read_yaml
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config


def bomb(row: str) -> str:
    """Returns nine levels of nine aliases: 387 million texts in 300 bytes."""
    rows = [row.format(f"b{i}", ",".join([f"*b{i - 1}"] * 9)) for i in range(1, 9)]
    return "b0: &b0 {x: 1}\n" + "\n".join(rows)


TEXTS: dict[str, bytes] = {
    "not UTF-8": b"a: \xff\xfe",
    "an alias of its mapping": b"a: &a {b: *a}",
    "an alias of its list": b"a: &a [1, *a]",
    "500 levels": b"a: " + b"[" * 500 + b"]" * 500,
    "5000 levels": b"a: " + b"[" * 5000 + b"]" * 5000,
    "a million levels": b"a: " + b"[" * 1_000_000,
    "3000 levels of blocks": b"\n".join(b" " * i + b"a:" for i in range(3000)),
    "levels by aliases": (
        "a0: &a0 " + "[" * 40 + "]" * 40
        + "".join(f"\na{i}: &a{i} " + "[" * 40 + f"*a{i - 1}" + "]" * 40 for i in range(1, 90))
    ).encode(),
    "Python's objects": b"a: !!python/object/apply:os.getcwd []",
    "a list as key": b"? [1, 2]\n: 3",
    "a bomb of lists": bomb("{0}: &{0} [{1}]").encode(),
    "a bomb of merges": bomb("{0}: &{0} {{<<: [{1}]}}").encode(),
    "a decimal number of 5000 digits": b"seed: " + b"1" * 5000,
    "a hexadecimal number of 5000 digits": b"seed: 0x" + b"f" * 5000,
    "a NUL": b"a: \0",
    "90000 keys": b"\n".join(b"k%d: 1" % i for i in range(90_000)),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_file_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(TEXTS[name])
    for command in ("from-verl", "from-areal"):
        begin = time.monotonic()
        assert main([command, str(file)]) == 2
        assert time.monotonic() - begin < 2  # 1 s, on a busy machine
        printed = capsys.readouterr()
        assert printed.err.count("config error: ") == 1 and not printed.out
        assert "Traceback" not in printed.err
    with pytest.raises(ConfigError):
        load_config(file)


def test_an_alias_may_be_used_often() -> None:
    text = "base: &base {a: 1, b: [2, 3]}\n" + "".join(f"k{i}: *base\n" for i in range(1000))
    assert read_yaml(text)["k999"] == {"a": "1", "b": ["2", "3"]}
