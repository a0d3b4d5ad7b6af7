"""What comes in and what goes out: bodies of requests as pydantic models, refusals with the status
and the body that SGLang's clients expect, JSON by orjson.

A bound is far above what a trainer needs; each keeps a single request from holding up the event
loop, the scheduler or the machine's memory.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Self, TypeVar

import orjson
from pydantic import BaseModel, FailFast, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
MAX_BODY = 256 << 20  # bytes
MAX_SEQUENCES = 8192  # of one /generate call
MAX_STOPS = 1024  # stop strings, and stop token ids, of one sequence
MAX_STOP_LENGTH = 4096  # characters of one stop string
MAX_JOINS = 64  # groups for weight updates whose other members are waited for
MAX_GROUP_SIZE = 65536  # ranks
MAX_VERSION_LENGTH = 256  # characters of a weight version
MAX_MESSAGE = 2000  # characters of an error; it may quote what was sent


def described(e: BaseException) -> str:
    """Returns the error's type and message in one line."""
    return f"{type(e).__name__}: {e}"


class ServerError(Exception):
    """Refuses a request with `status` and SGLang's {"error": {"message": ...}}."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} ..."
        super().__init__(message)
        self.status = status

    def body(self) -> dict[str, Any]:
        """Returns the JSON to answer with."""
        return {"error": {"message": str(self)}}


class ControlError(ServerError):
    """Tells that a control call failed: {"success": false, "message": ...}."""

    def __init__(self, message: str, *, status: int = 400, **extra: Any) -> None:
        super().__init__(message, status=status)
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """Returns the JSON to answer with."""
        return {"success": False, "message": str(self), **self.extra}


# ---- what asks for tokens

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
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]


class SamplingParams(BaseModel, strict=True, frozen=True, allow_inf_nan=False):
    """Holds how tokens are drawn and when they end, under SGLang 0.5.23's names, with its defaults
    and bounds. `max_new_tokens` None is 128, cut to the room in the context. Raises ServerError for
    what this server does not have."""

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

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        """Leaves out what asks for nothing."""
        if not isinstance(given, dict):
            return given
        own = cls.model_fields
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
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        most, least = self.max_new_tokens, self.min_new_tokens
        if most is not None and most < least:
            raise ServerError(f"max_new_tokens={most} must be at least min_new_tokens={least}")
        if self.top_k < 1 and self.top_k != -1:
            raise ServerError(f"top_k={self.top_k} must be -1 (disable) or at least 1")
        return self


# fields of SGLang's request that change the answer and that this server does not have
_UNSUPPORTED = (
    "text",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_id",
    "session_params",
    "stream",
    "return_hidden_states",
    "custom_logit_processor",
    "token_ids_logprob",
    "return_prompt_token_ids",
    "return_text_in_logprobs",
    "bootstrap_host",
    "bootstrap_room",
)
# of which a request for several prompts may have a list
_PER_PROMPT = ("sampling_params", "return_logprob", "rid", "extra_key", "lora_path", "written")


class GenerateBody(BaseModel, strict=True, frozen=True):
    """Asks /generate to continue one prompt; other fields of SGLang's are ignored.

    written: how many of the last `input_ids` the weights of now have written to an answer that was
    cut short, which a deterministic server reads as it wrote them; SGLang has no such field."""

    input_ids: Annotated[list[int], FailFast()] = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    rid: str = Field(default_factory=lambda: uuid.uuid4().hex)
    extra_key: str | None = None
    lora_path: str | None = None
    written: int = Field(default=0, ge=0)
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1, le=0)
    top_logprobs_num: int = Field(default=0, ge=0)
    return_routed_experts: bool = False
    routed_experts_start_len: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.written >= (most := len(self.input_ids)):
            raise ServerError(f"written={self.written} of {most} input_ids: use less than {most}")
        alone = self.logprob_start_len == 0 and self.sampling_params.max_new_tokens == 0
        if self.top_logprobs_num and not alone:
            raise ServerError(
                "top_logprobs_num: the embedded server names likely tokens beside those of a "
                "prompt alone; send logprob_start_len=0 and max_new_tokens=0"
            )
        if self.return_routed_experts and self.routed_experts_start_len > len(self.input_ids):
            raise ServerError(
                f"routed_experts_start_len={self.routed_experts_start_len}: use a position of the "
                f"prompt, 0 to {len(self.input_ids)}"
            )
        return self


M = TypeVar("M", bound=BaseModel)


def read(model: type[M], given: Any, *where: str) -> M:
    """Returns what was sent as `model`. Raises ServerError naming the first value that does not
    fit, below `where`."""
    try:
        return model.model_validate(given)
    except ValidationError as e:
        error = e.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, (*where, *error["loc"])))
        raise ServerError(f"{name}: {error['msg']}, got {error['input']!r}") from None


def read_prompts(body: dict[str, Any]) -> tuple[list[GenerateBody], bool]:
    """Returns what a body of /generate asks for each prompt, and whether its answer is a list.
    Raises ServerError naming what is wrong, or what this server does not have."""
    for key in _UNSUPPORTED:
        if body.get(key):
            hint = "; send input_ids" if key == "text" else ""
            raise ServerError(f"{key} is not supported by the embedded server{hint}")
    fields = {k: v for k, v in body.items() if k in GenerateBody.model_fields and v is not None}
    ids = fields.pop("input_ids", None)
    batched = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    each: dict[str, list[Any]] = {"input_ids": ids if batched else [ids]}
    count = len(each["input_ids"])
    if count > MAX_SEQUENCES:
        raise ServerError(
            f"{count} prompts; one request may have {MAX_SEQUENCES}, send several requests"
        )
    if "sampling_params" in fields and not isinstance(fields["sampling_params"], list):
        fields["sampling_params"] = read(
            SamplingParams, fields["sampling_params"], "sampling_params"
        )
    if batched and isinstance(rid := fields.get("rid"), str):
        fields["rid"] = [f"{rid}_{i}" for i in range(count)]
    for key in _PER_PROMPT:
        if isinstance(value := fields.get(key), list):
            if not batched or len(value) != count:
                raise ServerError(f"{key} has {len(value)} entries for {count} prompt(s)")
            each[key] = fields.pop(key)
    rows = (dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True))
    given = [{k: v for k, v in row.items() if v is not None} for row in rows]
    return [read(GenerateBody, fields | own) for own in given], batched


# of a chat, by their names of /generate's sampling_params
_CHAT_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop": "stop",
    "seed": "sampling_seed",
}
# what else a client may send, with values that ask for nothing
_NOTHING: tuple[Any, ...] = (None, False, 0, 1, [], {})


def read_chat(body: dict[str, Any]) -> tuple[list[Any], SamplingParams]:
    """Returns the messages of a chat and how its answer is drawn. Raises ServerError naming what is
    wrong, or what this server does not have."""
    for key, value in body.items():
        known = key in _CHAT_PARAMS or key in ("messages", "model", "user")
        if not known and (value is True or value not in _NOTHING):
            raise ServerError(f"{key}={value!r} is not supported by the embedded server")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ServerError("messages must be a list of messages, one at least")
    params = {_CHAT_PARAMS[k]: v for k, v in body.items() if k in _CHAT_PARAMS and v is not None}
    return messages, read(SamplingParams, params)


# ---- bodies and answers


def answer(content: Any, status: int = 200) -> Response:
    """Returns `content` as a JSON response."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


async def read_json(request: Request, *, required: bool = True) -> dict[str, Any]:
    """Returns the body; {} for none where it is not `required`. Raises ServerError for anything but
    a JSON object of at most MAX_BODY bytes."""
    raw = await _body(request)
    if not raw and not required:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise ServerError(f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise ServerError("the body must be a JSON object")
    return body


async def _body(request: Request) -> bytearray:
    length, raw = request.headers.get("content-length", ""), bytearray()
    if not (length.isdigit() and int(length) > MAX_BODY):
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY:
                break
        else:
            return raw
    raise ServerError(f"the body has more than {MAX_BODY >> 20} MiB; send less at once", status=413)


async def is_waited_for(request: Request, result: asyncio.Future[Any]) -> bool:
    """Returns True once there is a result, False where the client, whose body is read, closes its
    connection before."""
    gone = asyncio.ensure_future(_disconnected(request))
    await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    return result.done()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def guarded(handler: Handler, check: Callable[[Request], None]) -> Handler:
    """Makes a handler that calls `check` first. It answers refusals with their status and body, and
    every other error with 500, so that a failure ends only its own request.
    """

    @functools.wraps(handler)
    async def run(request: Request) -> Response:
        try:
            check(request)
            return await handler(request)
        except ServerError as e:
            return answer(e.body(), e.status)
        except ClientDisconnect:
            return Response(status_code=499)  # the client is gone
        except asyncio.CancelledError:  # by uvicorn's end, for a call that hangs
            return answer(ServerError("the server is stopping", status=503).body(), 503)
        except Exception as e:
            logger.exception("%s failed", request.url.path)
            return answer(ServerError(described(e), status=500).body(), 500)

    return run
