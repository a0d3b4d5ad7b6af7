"""Sampling parameters of one request, as SGLang 0.5.23 names, defaults and bounds them."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from megarl.server.errors import ServerError
from megarl.server.limits import MAX_STOP_LENGTH, MAX_STOPS

# parameters that only SGLang has: values that ask for nothing new pass
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "min_p": (None, 0, 0.0),
    "skip_special_tokens": (None, True),
    "no_stop_trim": (None, False),
    "stop_regex": (None, [], ""),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None, False),
    "choice": (None, []),
}
DEFAULT_MAX_NEW_TOKENS = 128
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]


class SamplingParams(BaseModel, strict=True, frozen=True, allow_inf_nan=False):
    """Holds how tokens are drawn and when they end. `max_new_tokens` None is 128, cut to the room
    in the context. Raises pydantic's ValidationError for a value out of its bounds."""

    max_new_tokens: Int64 | None = None
    min_new_tokens: Int64 = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Int64 = -1
    stop: tuple[Stop, ...] = Field(default=(), max_length=MAX_STOPS, strict=False)
    stop_token_ids: tuple[Int64, ...] = Field(default=(), max_length=MAX_STOPS, strict=False)
    ignore_eos: bool = False
    sampling_seed: Int64 | None = None

    @property
    def greedy(self) -> bool:
        """Tells whether the likeliest token is written: SGLang takes a temperature below 1e-6 as 0,
        and reports logprobs at temperature 1 there."""
        return self.temperature < 1e-6

    @model_validator(mode="after")
    def _check(self) -> Self:
        most, least = self.max_new_tokens, self.min_new_tokens
        if most is not None and most < least:
            raise ValueError(f"max_new_tokens={most} must be at least min_new_tokens={least}")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k={self.top_k} must be -1 (disable) or at least 1")
        return self


def parse_sampling_params(given: Any) -> SamplingParams:
    """Reads a request's `sampling_params`. Raises ServerError, naming what is wrong."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, dict):
        raise ServerError(f"sampling_params must be an object, got {type(given).__name__}")
    own = SamplingParams.model_fields
    for key, value in given.items():
        if key not in own and key not in _NEUTRAL:
            known = ", ".join(f"`{name}`" for name in (*own, *_NEUTRAL))
            raise ServerError(f"unknown field `{key}`, expected one of {known}")
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            raise ServerError(
                f"sampling_params.{key}={value!r} is not supported by the embedded server"
            )
    values = {k: v for k, v in given.items() if k in own and v is not None}
    stops = [values["stop"]] if isinstance(values.get("stop"), str) else values.get("stop")
    if isinstance(stops, list):
        values["stop"] = [stop for stop in stops if stop != ""]
    try:
        return SamplingParams.model_validate(values)
    except ValidationError as e:
        error = e.errors()[0]
        where = ".".join(map(str, ("sampling_params", *error["loc"])))
        raise ServerError(f"{where}: {error['msg']}, got {error['input']!r}") from None
