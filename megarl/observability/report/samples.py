"""The samples of the report: completions of the same prompts before and after, turn by turn."""

from __future__ import annotations

from html import escape
from typing import Any

from megarl.observability.report.formats import plain
from megarl.observability.report.runs import pair_samples


def samples_section(samples: list[dict[str, Any]], limit: int) -> str:
    pairs = pair_samples(samples)[:limit]
    if not pairs:
        return ""
    shown = [w for w in ("before", "after") if any(p[w] for p in pairs)]
    head = "".join(f"<th>{w.capitalize()}</th>" for w in shown)
    rows = "".join(
        f"<tr><td><pre>{escape(p['prompt'])}</pre>"
        f'<div class="answer">answer: {escape(str(p["answer"]))}</div></td>'
        + "".join(f"<td>{_completion(p[w])}</td>" for w in shown)
        + "</tr>"
        for p in pairs
    )
    return (
        '<h2>Samples</h2><div class="panel"><table class="samples"><thead><tr><th>Prompt</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _completion(sample: dict[str, Any] | None) -> str:
    if sample is None:
        return "–"
    return _chip(sample.get("reward")) + _text(sample)


def _chip(reward: float | None) -> str:
    if reward is None:
        return ""
    css, mark = ("right", "✓") if reward >= 1 else ("part", "◐") if reward > 0 else ("wrong", "✗")
    return f'<span class="chip {css}">{mark} reward {plain(float(reward))}</span>'


def _text(sample: dict[str, Any]) -> str:
    """The completion, or turn by turn what the model wrote and what it was told in between."""
    turns = sample.get("turns")
    if not turns:
        return f"<pre>{escape(str(sample.get('completion', '')))}</pre>"
    return "".join(
        f'<div class="turn {"" if turn["who"] == "model" else "told"}">'
        f"<b>{escape(turn['who'])}</b><pre>{escape(turn['text'].strip())}</pre></div>"
        for turn in turns
    )
