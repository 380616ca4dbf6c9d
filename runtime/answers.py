"""What a client gets through OpenAI's API: the bytes of every answer, whole or streamed, and every refusal.

Data only: the requests are in runtime/openai.py, the routes in runtime/http.py.
"""

import reprlib
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from forebay.runtime.desk import RequestFailed
from forebay.transport.messages import ModelStatus

RETRY_AFTER_S = 1
SHOWN_CHARACTERS = 200

_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxstring = _short.maxother = _short.maxlong = SHOWN_CHARACTERS


def shown(value: Any) -> str:
    """What an error repeats of a value that a client sent: as Python writes it, cut to SHOWN_CHARACTERS."""
    return cut(_short.repr(value))


def cut(text: str) -> str:
    """`text` up to SHOWN_CHARACTERS."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


class ApiError(Exception):
    """A refusal in OpenAI's shape. `param` names the parameter at fault, `code` is for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else {}

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def of(cls, failure: RequestFailed) -> "ApiError":
        match failure.kind:
            case "unknown_model":
                return cls(404, failure.reason, param="model", code="model_not_found")
            case "context_too_long":
                return cls(400, failure.reason, param="max_tokens", code="context_length_exceeded")
            case "not_ready" | "queue_full" | "draining":
                return cls(503, failure.reason, code=failure.kind)
            case "failed":
                return cls(500, failure.reason, code="failed")


def find_model(models: Mapping[str, ModelStatus], name: str) -> ModelStatus:
    """Raises ApiError 404, naming what exists."""
    if name in models:
        return models[name]
    exists = ", ".join(sorted(models)) or "none: this server has no models configured"
    raise ApiError(404, f"model: {shown(name)} does not exist; models: {exists}", param="model", code="model_not_found")


def model_object(model: ModelStatus, created: int) -> dict[str, Any]:
    """One entry of /v1/models; `max_model_len` (tokens) as vLLM has it, null before the model was ready."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "forebay",
        "max_model_len": model.max_context or None,
    }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Answer:
    """The bytes of one answer, whole or as server-sent events.

    What its events share is encoded once, so that a token costs no more than quoting its text."""

    def __init__(self, *, chat: bool, model: str, created: int, usage_in_stream: bool) -> None:
        self._chat = chat
        self._usage_in_stream = usage_in_stream
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(16)}",
            "object": kind,
            "created": created,
            "model": model,
        }
        self._event_head = {**self._head, "object": f"{kind}.chunk"} if chat else self._head
        mark = "\x00"
        self._before, self._after = self._event(self._piece(mark)).split(msgspec.json.encode(mark))

    def whole(self, text: str, finish_reason: str, used: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return msgspec.json.encode({**self._head, "choices": [choice], "usage": used})

    def opening(self, text: str) -> bytes:
        """What a stream begins with, with the text of the first tokens. An event even where they make no text yet:
        a client may time it."""
        if not self._chat:
            return self.piece(text)
        role = self._event(self._piece("") | {"delta": {"role": "assistant", "content": ""}})
        return role + self.piece(text) if text else role

    def piece(self, text: str) -> bytes:
        return self._before + msgspec.json.encode(text) + self._after

    def closing(self, text: str, finish_reason: str, used: dict[str, Any]) -> bytes:
        """The last text, why it ends, the usage if it was asked for, and the end mark."""
        choice = self._piece(text) | {"finish_reason": finish_reason}
        if self._chat and not text:
            choice["delta"] = {}
        end = self._event(choice)
        if self._usage_in_stream:
            end += _event({**self._event_head, "choices": [], "usage": used})
        return end + b"data: [DONE]\n\n"

    def _piece(self, text: str) -> dict[str, Any]:
        shown: dict[str, Any] = {"delta": {"content": text}} if self._chat else {"text": text}
        return {"index": 0, **shown, "logprobs": None, "finish_reason": None}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _event(
            {
                **self._event_head,
                "choices": [choice],
                **({"usage": None} if self._usage_in_stream else {}),
            }
        )


def error_event(error: ApiError) -> bytes:
    """What a stream that broke off ends with, in place of the end mark."""
    return _event(error.body())


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
