"""A small OpenAI-compatible server, run as a process of its own. How it behaves is the model's name:

- `steady`: as asked, one token a chunk; `other`: the same; `cached`: half of each prompt is from a prefix cache;
- `together`: answers nobody before TOGETHER requests are waiting (and so never, if they come one by one);
- `stuck`: sends the first token and then nothing;
- `error500`: refuses; `error_event`: tells of a failure in the stream; `truncated`: breaks off in mid-stream;
- `short`: one token too few; `uncounted`: no usage; `garbage`: not JSON; `silent`: a whole stream without a token;
- `fatal`: ends the whole process, in mid-stream.

The first line on standard output is the base URL, of any free port unless `--port N` is given. `GET /received` lists
the bodies of all requests so far.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

MODELS = (
    "steady", "other", "together", "stuck", "error500", "error_event", "truncated", "short", "uncounted", "garbage",
    "silent", "fatal", "cached",
)  # fmt: skip
TOGETHER = 5


def build_app() -> FastAPI:
    app = FastAPI()
    received: list[dict[str, Any]] = []
    waiting = 0
    everybody_here = asyncio.Event()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]}

    @app.get("/received")
    def list_received() -> list[dict[str, Any]]:
        return received

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        nonlocal waiting
        body = await request.json()
        received.append(body)
        if body["model"] == "error500":
            return JSONResponse({"error": {"message": "out of order", "type": "server_error"}}, status_code=500)
        if body["model"] == "together":
            waiting += 1
            if waiting >= TOGETHER:
                everybody_here.set()
            await everybody_here.wait()
        return StreamingResponse(stream(body), media_type="text/event-stream")

    return app


async def stream(body: dict[str, Any]) -> AsyncIterator[bytes]:
    model, count = body["model"], body["max_tokens"]
    if model == "short":
        count -= 1
    if model == "silent":
        yield event({"choices": [], "usage": {"completion_tokens": count}})
        yield b"data: [DONE]\n\n"
        return
    for index in range(count):
        finish = "length" if index == count - 1 else None
        yield event({"choices": [{"index": 0, "text": " word", "finish_reason": finish}], "usage": None})
        match model:
            case "stuck":
                await asyncio.Event().wait()
            case "error_event":
                yield event({"error": {"message": "the worker was lost", "type": "server_error"}})
                return
            case "truncated":
                return
            case "garbage":
                yield b"data: {nonsense\n\n"
            case "fatal":
                os._exit(1)
    if model != "uncounted":
        prompt_tokens = len(body["prompt"])
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
        }
        if model == "cached":
            usage["prompt_tokens_details"] = {"cached_tokens": prompt_tokens // 2}
        yield event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1]) if "--port" in sys.argv else 0
    listener = socket.create_server(("127.0.0.1", port))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(build_app(), log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
