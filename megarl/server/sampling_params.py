"""Sampling parameters of one request, as SGLang 0.5.23 names, defaults and bounds them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
_MAX_SEED = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Holds how tokens are drawn and when they end. `max_new_tokens` None is 128, cut to the room
    in the context. Raises ServerError, naming the parameter that is out of its bounds."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        most, least = self.max_new_tokens, self.min_new_tokens
        for name, ok, wanted in (
            ("temperature", self.temperature >= 0.0, "non-negative"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (disable) or at least 1"),
            ("min_new_tokens", least >= 0, "non-negative"),
            ("max_new_tokens", most is None or most >= least, f"at least min_new_tokens={least}"),
        ):
            if not ok:
                raise ServerError(f"{name} must be {wanted}, got {getattr(self, name)}")
        if len(self.stop) > MAX_STOPS:
            raise ServerError(f"stop: {len(self.stop)} strings, at most {MAX_STOPS}")
        if any(len(s) > MAX_STOP_LENGTH for s in self.stop):
            raise ServerError(f"stop: a string of more than {MAX_STOP_LENGTH} characters")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise ServerError(
                f"stop_token_ids: {len(self.stop_token_ids)} ids, at most {MAX_STOPS}"
            )

    @property
    def greedy(self) -> bool:
        """Tells whether the likeliest token is written: SGLang takes a temperature below 1e-6 as 0,
        and reports logprobs at temperature 1 there."""
        return self.temperature < 1e-6


def parse_sampling_params(given: Any) -> SamplingParams:
    """Reads a request's `sampling_params`. Raises ServerError, naming what is wrong."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, dict):
        raise ServerError(f"sampling_params must be an object, got {type(given).__name__}")
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in _READERS:
            if value is not None:
                values[key] = _READERS[key](key, value)
        elif key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise ServerError(
                    f"sampling_params.{key}={value!r} is not supported by the embedded server"
                )
        else:
            known = ", ".join(f"`{name}`" for name in (*_READERS, *_NEUTRAL))
            raise ServerError(f"unknown field `{key}`, expected one of {known}")
    return SamplingParams(**values)


def _wrong(key: str, value: Any, wanted: str) -> ServerError:
    return ServerError(f"sampling_params.{key} must be {wanted}, got {value!r}")


def _int(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_MAX_SEED <= value < _MAX_SEED:
        raise _wrong(key, value, "an integer of 64 bits")
    return value


def _float(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise _wrong(key, value, "a finite number")
    return float(value)


def _bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _strings(key: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise _wrong(key, value, "a string or a list of strings")
    return tuple(v for v in values if v)


def _ints(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(key, value, "a list of integers")
    return tuple(_int(key, v) for v in value)


_READERS: dict[str, Any] = {
    "max_new_tokens": _int,
    "min_new_tokens": _int,
    "top_k": _int,
    "sampling_seed": _int,
    "temperature": _float,
    "top_p": _float,
    "stop": _strings,
    "stop_token_ids": _ints,
    "ignore_eos": _bool,
}
