"""The coordinator's REST API: which GPU lends to which, what is lent to whom, and how it is asked back.

GPU numbers are physical. Whoever has a token (lending.tokens) sees and revokes the leases of its tenant only; the
operator's token, or none at all, goes for every tenant.
"""

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt
from starlette.responses import JSONResponse, Response

from forebay.runtime.answers import ApiError
from forebay.runtime.authorization import tenant_of
from forebay.runtime.desk import Desk
from forebay.runtime.keyring import OPERATOR
from forebay.transport.messages import Answered, LendingStatus, Map, Outcome, ReclaimGpu, RevokeLease, Unmap

ANSWER_TIMEOUT_S = 5.0
"""How long a request waits for the scheduler, beyond what the request itself allows."""

STATUSES: dict[Outcome, int] = {
    "done": 200,
    "unknown": 404,
    "absent": 404,
    "duplicate": 409,
    "refused": 422,
    "forbidden": 403,
}

Gpu = Annotated[StrictInt, Field(ge=0, lt=1 << 16, description="a GPU's physical number")]
Deadline = Annotated[
    StrictFloat | StrictInt, Field(ge=0, le=86400, description="seconds that borrowers have to move what is there")
]
DEADLINE_S = 10.0
LEASE_NUMBER = "^[1-9][0-9]{0,14}$"
"""As `/leases` writes it, and no other way."""

Result = TypeVar("Result")


class Pair(BaseModel):
    """Which GPU lends to which."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"producer": 0, "consumer": 2}]})

    producer: Gpu
    consumer: Gpu


class Revocation(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"deadline_s": 5}]})

    deadline_s: Deadline = DEADLINE_S


class Reclaim(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"gpu": 0, "bytes": 1 << 30, "deadline_s": 5}]}
    )

    gpu: Gpu
    bytes: Annotated[StrictInt, Field(gt=0, le=1 << 46, description="rounded up to slabs")]
    deadline_s: Deadline = DEADLINE_S


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the documentation: what else may be answered."""
    reasons = {
        403: "Another tenant's, or the operator's to do",
        404: "There is no such GPU, pair or lease",
        409: "The pair is there already",
        422: "A value that cannot be, for example a GPU paired with itself",
        503: "The scheduler does not answer",
    }
    example = {"error": {"message": "…", "type": "invalid_request_error", "param": None, "code": None}}
    return {
        status: {"description": reasons[status], "content": {"application/json": {"example": example}}}
        for status in (*statuses, 503)
    }


def _shows(example: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {"application/json": {"example": example}}}}


async def ask(answer: Awaitable[Result], allowed_s: float = 0.0) -> Result:
    """Raises ApiError 503 where the scheduler does not answer."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S + allowed_s):
            return await answer
    except TimeoutError as error:
        raise ApiError(
            503,
            f"the scheduler has not answered within {ANSWER_TIMEOUT_S + allowed_s:g} s; try again",
            code="no_scheduler",
        ) from error


def _done(answer: Answered) -> Answered:
    """Raises ApiError for every other outcome."""
    if answer.outcome != "done":
        raise ApiError(STATUSES[answer.outcome], answer.reason, code=answer.outcome)
    return answer


def lending_router(desk: Desk, operator_token: bool) -> APIRouter:
    """`operator_token`: there is one, and the mapping is changed with it alone."""
    router = APIRouter(tags=["Lending"])

    def check_operator(request: Request) -> None:
        if operator_token and tenant_of(request) != OPERATOR:
            raise ApiError(403, "the mapping concerns all tenants: only the operator's token (http.token) changes it")

    async def pairs(reason: str = "") -> Response:
        status = await ask(desk.lending(OPERATOR))
        body: dict[str, Any] = {"mapping": mapping_of(status)}
        return JSONResponse(body | ({"note": reason} if reason else {}))

    @router.post("/mapping", responses=_shows(_MAPPING) | _errors(403, 404, 409, 422))
    async def map_gpus(pair: Pair, request: Request) -> Response:
        """From now on the producer lends to the consumer. A consumer with a mapping uses its producers only; the others
        may borrow from every GPU."""
        check_operator(request)
        return await pairs(_done(await ask(desk.wish(lambda q: Map(q, pair.producer, pair.consumer)))).reason)

    @router.delete("/mapping", responses=_shows(_MAPPING) | _errors(403, 404, 422))
    async def unmap_gpus(pair: Pair, request: Request) -> Response:
        """Ends a mapping. What is lent over it stays lent; nothing new is."""
        check_operator(request)
        return await pairs(_done(await ask(desk.wish(lambda q: Unmap(q, pair.producer, pair.consumer)))).reason)

    @router.get("/mapping", responses=_shows(_MAPPING) | _errors())
    async def mapping() -> Response:
        """All pairs, in the order in which they were made."""
        return await pairs()

    @router.get("/gpus", responses=_shows([_GPU]) | _errors())
    async def gpus() -> Response:
        """Every known GPU, whether it takes part or not; in bytes. `free` is offered and nobody has it."""
        status = await ask(desk.lending(OPERATOR))
        return JSONResponse([msgspec.structs.asdict(gpu) for gpu in status.gpus])

    @router.get("/leases", responses=_shows([_LEASE]) | _errors())
    async def leases(request: Request) -> Response:
        """All leases of the tenant that are not over. `deadline_s`: seconds until the deadline of a revocation
        (negative: overdue)."""
        status = await ask(desk.lending(tenant_of(request)))
        return JSONResponse([msgspec.structs.asdict(lease) for lease in status.leases])

    @router.post("/leases/{id}/revoke", responses=_shows(_REVOKED) | _errors(403, 404, 422))
    async def revoke(
        id: Annotated[str, Path(pattern=LEASE_NUMBER)], request: Request, body: Revocation | None = None
    ) -> Response:
        """Asks one lease back; answers at once, with the deadline that holds (asked again, a sooner one). Until then
        the borrower has time to move what is in it."""
        deadline_s = float((body or Revocation()).deadline_s)
        tenant = tenant_of(request)
        answer = _done(await ask(desk.wish(lambda q: RevokeLease(q, int(id), tenant, deadline_s))))
        return JSONResponse({"lease": int(id), "deadline_s": answer.deadline_s, "note": answer.reason})

    @router.post("/reclaim", responses=_shows(_RECLAIMED) | _errors(403, 404, 422))
    async def reclaim(body: Reclaim, request: Request) -> Response:
        """Takes memory that a GPU lends back for it; answers when all has come, or at the deadline with who holds the
        rest."""
        deadline_s, tenant = float(body.deadline_s), tenant_of(request)
        wish = desk.wish(lambda q: ReclaimGpu(q, body.gpu, tenant, body.bytes, deadline_s))
        answer = _done(await ask(wish, deadline_s))
        return JSONResponse(
            {
                "gpu": body.gpu,
                "yielded": answer.yielded,
                "missing": answer.missing,
                "holders": list(answer.holders),
                "note": answer.reason,
            }
        )

    return router


def mapping_of(status: LendingStatus) -> list[dict[str, int]]:
    return [{"producer": producer, "consumer": consumer} for producer, consumer in status.mapping]


_MAPPING = {"mapping": [{"producer": 0, "consumer": 2}]}
_GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "total": 150754820096,
    "free": 8589934592,
    "lent": 2147483648,
    "borrowed": 0,
    "note": "",
}
_LEASE = {
    "id": 7,
    "epoch": 1790000000,
    "lender": "lender-4711",
    "lender_gpu": 0,
    "borrower": "borrower-4712",
    "borrower_gpu": 2,
    "bytes": 2147483648,
    "state": "active",
    "deadline_s": None,
}
_REVOKED = {"lease": 7, "deadline_s": 5.0, "note": ""}
_RECLAIMED = {"gpu": 0, "yielded": 1073741824, "missing": 0, "holders": [], "note": ""}
