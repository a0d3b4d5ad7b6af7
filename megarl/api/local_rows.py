"""Joins rows that several ranks bring to one batch: every rank has the same names, lengths and
order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.api.failures import gather
from megarl.api.tokens import (
    IDS,
    MASK,
    Comm,
    Home,
    Tokens,
    as_bytes,
    from_bytes,
    is_per_token,
    row_lengths,
)

# of a batch: lengths [B] and per-sample fields [B] everywhere, tokens and their home
Rows = tuple[Tensor, dict[str, Tensor], dict[str, Tokens], Home]


def gather_rows(parts: Sequence[Mapping[str, Tensor]], comm: Comm | None) -> Rows:
    """Joins what the ranks bring (see Batch.from_local): the fields' names, then lengths and
    per-sample fields, go to every rank. Collective."""
    parts = [p for p in parts if p and (IDS not in p or len(p[IDS]))]
    schema, lengths, error = _local_schema(parts)
    own = schema, error
    schemas, errors = zip(*(gather(own, comm, "Batch.from_local") if comm else [own]))
    whole = _agreed(schemas, errors)

    def everyone(values: Tensor) -> list[Tensor]:
        if comm is None:
            return [values]
        raw = comm.all_gather(as_bytes(values), "Batch.from_local")
        return [from_bytes(r, values.dtype, values.shape[1:]) for r in raw]

    def local(name: str) -> Tensor:
        dtype, inner, _ = whole["fields"][name]
        if not parts:
            return torch.empty((0, *inner), dtype=getattr(torch, dtype))
        return torch.cat([p[name] for p in parts])

    per_sample = {k: everyone(local(k)) for k, f in whole["fields"].items() if not f[2]}
    everyones = everyone(lengths)
    rank = comm.rank if comm else 0
    drivers = torch.cat([torch.full((len(x),), r) for r, x in enumerate(everyones)])
    ids = per_sample.get("episode_ids")
    order = torch.arange(len(drivers)) if ids is None else torch.cat(ids).argsort(stable=True)
    mine = order[drivers[order] == rank]
    mine = mine - int((drivers < rank).sum())  # my rows, as I have them, in the batch's order
    tokens = {k: f for k, f in whole["fields"].items() if f[2]}
    return (
        torch.cat(everyones)[order],
        {k: torch.cat(v)[order] for k, v in per_sample.items()},
        {k: _ragged(parts, k, mine, lengths, f) for k, f in tokens.items()},
        Home(tuple(range(len(everyones))), drivers[order]),
    )


def _ragged(
    parts: Sequence[Mapping[str, Tensor]], name: str, order: Tensor, lengths: Tensor, field: Any
) -> Tokens:
    """Returns the rows of several padded dicts, in `order`, as one flat field."""
    dtype, inner, _ = field
    rows = [row for p in parts for row in p[name].unbind()]
    pieces = [rows[i][: int(lengths[i])] for i in order.tolist()]
    empty = torch.empty((0, *inner), dtype=getattr(torch, dtype))
    return Tokens(torch.cat(pieces) if pieces else empty, lengths[order])


def _local_schema(
    parts: Sequence[Mapping[str, Tensor]],
) -> tuple[dict[str, Any], Tensor, str | None]:
    """Returns ({rows, fields: {name: [dtype, inner shape, per token]}}, lengths [b], the
    problem)."""
    lengths = [torch.empty(0, dtype=torch.long)]
    fields: dict[str, Any] | None = None
    for part in parts:
        try:
            _check_rows(part)
            lengths.append(row_lengths(part))
            mine = {k: _schema_of(k, part) for k in sorted(set(part) - {MASK})}
        except ValueError as e:
            return {"rows": 0, "fields": {}}, lengths[0], str(e)
        if fields is not None and mine != fields:
            return {"rows": 0, "fields": {}}, lengths[0], _difference(fields, mine)
        fields = mine
    joined = torch.cat(lengths)
    return {"rows": len(joined), "fields": fields or {}}, joined, None


def _schema_of(name: str, part: Mapping[str, Tensor]) -> list[Any]:
    """Returns [dtype, inner shape, per token]."""
    value = part[name]
    per_token = is_per_token(name, value, part)
    inner = list(value.shape[2:]) if per_token else []
    return [str(value.dtype).removeprefix("torch."), inner, per_token]


def _check_rows(part: Mapping[str, Any]) -> None:
    """Raises ValueError for what is no tensor of as many rows as input_ids has."""
    for name, value in part.items():
        if not isinstance(value, Tensor) or not value.ndim:
            raise ValueError(f"{name!r} is a {type(value).__name__}: use tensors [b, ...]")
        if IDS in part and len(value) != len(part[IDS]):
            raise ValueError(f"{name!r} has {len(value)} rows, input_ids has {len(part[IDS])}")


def _agreed(schemas: Sequence[dict[str, Any]], errors: Sequence[str | None]) -> dict[str, Any]:
    """Returns the schema of the ranks that bring rows. Raises ValueError on every rank."""
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(f"Batch.from_local, rank {rank}: {error}")
    bringing = [(rank, s) for rank, s in enumerate(schemas) if s["rows"]]
    if not bringing:
        raise ValueError("Batch.from_local: no rank brings a row")
    first, whole = bringing[0]
    for rank, schema in bringing:
        if schema["fields"] != whole["fields"]:
            what = _difference(whole["fields"], schema["fields"])
            raise ValueError(f"Batch.from_local, ranks {first} and {rank}: {what}")
    return whole


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    names = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
    first, other = (_described(fields.get(names[0])) for fields in (a, b))
    return (
        f"the rows do not have the same fields: {', '.join(names)} differ in name, dtype or shape "
        f"({names[0]}: {first} and {other})"
    )


def _described(field: Any) -> str:
    if field is None:
        return "none"
    dtype, inner, per_token = field
    return f"{dtype} [{', '.join(['b', *(['S'] if per_token else []), *map(str, inner)])}]"
