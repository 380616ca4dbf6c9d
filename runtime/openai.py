"""What a client may ask through OpenAI's API, and what is refused.

Data only: the answers are in runtime/answers.py, the routes in runtime/http.py.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from forebay.runtime.answers import ApiError, shown
from forebay.transport.messages import Sampling

MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{message}", {"message": message})


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refuse(f"text must be Unicode; character {error.start} is half of a surrogate pair") from error
    return text


def _read_prompt(value: Any) -> str | list[int]:
    expected = "must be a string or a list of token ids"
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            raise _refuse(f"has {len(value)} prompts; send one prompt a request")
        value = value[0]
    if isinstance(value, str):
        prompt: str | list[int] = _unicode(value)
    elif isinstance(value, list):
        try:
            prompt = msgspec.convert(value, list[int])
        except msgspec.ValidationError as error:
            raise _refuse(f"{expected}: {error}") from error
    else:
        raise _refuse(f"{expected}, not {type(value).__name__}")
    if not prompt:
        raise _refuse("must not be empty")
    return prompt


def _read_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _refuse(f"must be a string or a list of up to {MAX_STOPS} strings, got {shown(value)}")
    if len(stops) > MAX_STOPS:
        raise _refuse(f"has {len(stops)} strings; up to {MAX_STOPS} are allowed")
    if "" in stops:
        raise _refuse("has an empty string; stop strings have at least one character")
    return tuple(_unicode(stop) for stop in stops)


def _read_content(value: Any) -> str:
    if isinstance(value, str):
        return _unicode(value)
    if not isinstance(value, list):
        raise _refuse(f"must be a string or a list of text parts, not {type(value).__name__}")
    texts = []
    for part in value:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(_unicode(text))
            case _:
                raise _refuse(f'has a part that is not {{"type": "text", "text": "..."}}: {shown(part)}')
    return "\n".join(texts)


Prompt = Annotated[
    str | list[int],
    PlainValidator(_read_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}),
]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_read_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS},
                {"type": "null"},
            ]
        }
    ),
]
Content = Annotated[
    str,
    PlainValidator(_read_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]
Count = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
}
"""Parameters that this server does not act on, with the values (beside null) that ask for nothing. Any other
value would change the output, so it is refused; parameters not listed anywhere are ignored."""


class _Request(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[StrictFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = ()
    stream: StrictBool | None = None
    stream_options: "StreamOptions | None" = None
    user: StrictStr | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None

    prompt_name: ClassVar[str]
    default_tokens: ClassVar[int | None]

    def token_limit(self) -> tuple[str, int | None]:
        """The parameter that bounds the output, and its value if the client gave one. Two names, one limit."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def refuse_unsupported(self) -> None:
        """Raises ApiError for a parameter that would change the output if it were ignored."""
        extras = self.model_extra or {}
        for name, neutral in _NEUTRAL.items():
            value = extras.get(name)
            # 0 == False in Python, but logprobs: 0 asks for something.
            if value is not None and not any(
                value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral
            ):
                choices = " or ".join(msgspec.json.encode(allowed).decode() for allowed in neutral)
                raise ApiError(
                    400,
                    f"{name}: {shown(value)} is not supported; leave it out or set it to {choices}",
                    param=name,
                )
        for name, choice in (("tools", "tool_choice"), ("functions", "function_call")):
            if extras.get(name) and extras.get(choice) != "none":
                raise ApiError(400, f'{name}: not supported; leave it out or set {choice} to "none"', param=name)
        if None not in (a := self.max_tokens, b := self.max_completion_tokens) and a != b:
            raise ApiError(
                400,
                f"max_completion_tokens: is {b} while max_tokens is {a}; they are two names of one limit, give one",
                param="max_completion_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only allowed with stream set to true", param="stream_options")

    def sampling(self, prompt_tokens: int, max_context: int) -> Sampling:
        """How to sample, with every default filled in.

        `max_context` in tokens, 0 if not known. A limit that the client did not give is cut to what the context
        has room for. Raises ApiError if prompt and output cannot fit, or min_tokens is above the limit."""
        name, limit = self.token_limit()
        room = max_context - prompt_tokens if max_context else None
        if room is not None and room < 1:
            raise ApiError(
                400,
                f"{self.prompt_name}: {prompt_tokens} tokens leave no room for output in the model's context "
                f"of {max_context} tokens; shorten it",
                param=self.prompt_name,
                code="context_length_exceeded",
            )
        if limit is not None and room is not None and limit > room:
            raise ApiError(
                400,
                f"{name}: {prompt_tokens} tokens of prompt and {limit} of output are {prompt_tokens + limit}, "
                f"more than the model's context of {max_context} tokens; ask for at most {room}",
                param=name,
                code="context_length_exceeded",
            )
        if limit is None:
            choices = [choice for choice in (self.default_tokens, room) if choice is not None]
            if not choices:
                raise ApiError(503, f"model {self.model!r} has no worker at the moment; give {name} to wait for one")
            limit = min(choices)
        minimum = self.min_tokens or 0
        if minimum > limit:
            raise ApiError(400, f"min_tokens: {minimum} is more than {name}, which is {limit}", param="min_tokens")
        return Sampling(
            max_tokens=limit,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            # Chosen once, here: a request that is resumed on another worker goes on with the same text.
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**63,
            min_tokens=minimum,
            ignore_eos=bool(self.ignore_eos),
        )


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


class CompletionRequest(_Request):
    """Body of POST /v1/completions. `prompt` is one text, or the token ids of one."""

    prompt: Prompt

    prompt_name: ClassVar[str] = "prompt"
    default_tokens: ClassVar[int | None] = DEFAULT_COMPLETION_TOKENS


def _read_role(role: str) -> str:
    # The newer name; the templates of open models know the older one.
    return "system" if role == "developer" else role


class ChatMessage(TypedDict):
    role: Annotated[Literal["system", "developer", "user", "assistant"], AfterValidator(_read_role)]
    content: Content


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions. Without a limit the answer may fill the rest of the context."""

    # One wrong message is enough: a body holds a million, and each error would be an object.
    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]

    prompt_name: ClassVar[str] = "messages"
    default_tokens: ClassVar[int | None] = None


AnyRequest = TypeVar("AnyRequest", bound=_Request)

_OTHERS = {*_NEUTRAL, "tools", "tool_choice", "functions", "function_call"}
_DEPTH = {"messages": 3, "stream_options": 2}
"""How deep the path to an error goes in names that a client knows; below are the branches of a union. Else 1."""


def read_request(kind: type[AnyRequest], body: bytes, content_type: str) -> AnyRequest:
    """The request that a body is. Takes tenths of a second for megabytes. Raises ApiError for what is not one."""
    media_type = content_type.partition(";")[0].strip().lower()
    if not (media_type == "application/json" or media_type.endswith("+json")):
        raise ApiError(
            400, f"the body must be JSON, sent with Content-Type: application/json, not {shown(content_type)}"
        )
    try:
        value = json.loads(body) if body else None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.msg} at position {error.pos}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, or nested too deep
        raise ApiError(400, f"the body cannot be read as JSON: {error}; it must be one object, in UTF-8") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    known = {name: value[name] for name in (*kind.model_fields, *_OTHERS) if name in value}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> ApiError:
    """What is wrong first, with the parameter as the client would write it."""
    first = error.errors(include_url=False)[0]
    location = first["loc"][: _DEPTH.get(str(first["loc"][0]), 1)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)[1:]
    if first["type"] == "missing":
        return ApiError(400, f"{param}: missing; it is required", param=param)
    got = "" if first["type"] == "value" else f", got {shown(first['input'])}"
    return ApiError(400, f"{param}: {first['msg']}{got}", param=param)
