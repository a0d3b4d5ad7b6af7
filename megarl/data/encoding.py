"""Makes rows of tokens of a source's rows, for each purpose; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megarl.config.dataset import SourceConfig
from megarl.data.problem import Row
from megarl.data.template import Template


def encode_rows(
    sources: Sequence[Row], cfg: SourceConfig, tokenizer: Any, purpose: str
) -> Iterator[Row]:
    """Yields the rows of one source with their tokens, as `build_dataset` has them. Raises
    ValueError for a tokenizer, an option or a row that is wrong."""
    template = Template(tokenizer, cfg.options)
    encode = {
        "rl": _rl_row,
        "prompts": _rl_row,
        "sft": _sft_row,
        "pairs": _pair_row,
        "unpaired": _single_row,
    }[purpose]
    for i, row in enumerate(sources):
        yield encode(i, row, template)


def _rl_row(index: int, source: Row, template: Template) -> Row:
    messages = template.told(source["messages"])
    prompt = template.render(messages, tools=source.get("tools"))
    return source | {"messages": messages, "prompt": prompt, "prompt_ids": template.encode(prompt)}


def _sft_row(index: int, source: Row, template: Template) -> Row:
    messages, tools = template.told(source["messages"]), source.get("tools")
    response = source.get("response")
    if response is None:
        try:
            ids, mask = template.conversation(messages, tools=tools)
        except ValueError as e:
            raise ValueError(f"row {index}: {e}") from e
        return {"input_ids": ids, "loss_mask": mask}
    prompt_ids = template.encode(template.render(messages, tools=tools))
    response_ids = template.encode(response) + [template.eos_token_id]
    return {
        "input_ids": prompt_ids + response_ids,
        "loss_mask": [False] * len(prompt_ids) + [True] * len(response_ids),
    }


def _pair_row(index: int, source: Row, template: Template) -> Row:
    row: Row = {"margin": source["margin"]} if "margin" in source else {}
    for side in ("chosen", "rejected"):
        ids, mask = _answer(index, source, side, template)
        row |= {f"{side}_ids": ids, f"{side}_mask": mask}
    return row


def _single_row(index: int, source: Row, template: Template) -> Row:
    ids, mask = _answer(index, source, "answered", template)
    return {"input_ids": ids, "loss_mask": mask, "label": source["label"]}


def _answer(index: int, source: Row, side: str, template: Template) -> tuple[list[int], list[bool]]:
    """Returns the tokens of the prompt and the answer source[side], and the answer's mask."""
    messages, tools = template.told(source["messages"]), source.get("tools")
    try:
        return template.conversation([*messages, *source[side]], tools=tools, start=len(messages))
    except ValueError as e:
        raise ValueError(f"row {index}: {side}: {e}") from e
