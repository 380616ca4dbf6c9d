"""The coordinator's REST API over real sockets, in front of a real lending core."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from forebay.runtime import lending_api
from forebay.runtime.keyring import OPERATOR, Keyring, digest
from forebay.sched.lending import LendingCore
from forebay.sched.lending_events import FromPartyLink
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    Borrow,
    Granted,
    Mapped,
    Release,
    Revoke,
)
from tests.runtime.front import PATIENCE_S, Front, Peer, front_door

SLAB = 1 << 20


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    async with front_door(Peer([])) as front:
        yield front


async def call(front: Front, method: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with front.client.request(method, front.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


def attach(front: Front, name: str, gpu: int, slabs: int, credential: str = "") -> None:
    endpoint, size = (f"/{name}", SLAB) if slabs else ("", 0)
    message = Attach(
        PROTOCOL_VERSION, 1, name, gpu, 1, 0, "here", credential, endpoint, size, tuple(range(slabs)), (), ()
    )
    front.peer.lend(FromPartyLink(name, message))


def lend(front: Front, slabs: int = 4, borrowed: int = 3) -> Granted:
    """A party on GPU 0 lends to one on GPU 2."""
    attach(front, "lender", 0, slabs)
    attach(front, "borrower", 2, 0)
    front.peer.lend(FromPartyLink("borrower", Borrow(1, borrowed * SLAB)))
    granted = front.peer.to_parties[-1][1]
    assert isinstance(granted, Granted)
    front.peer.lend(FromPartyLink("borrower", Mapped(1, 1)))
    return granted


async def test_a_mapping_is_made_told_and_deleted(front: Front) -> None:
    pair = {"producer": 0, "consumer": 2}
    assert await call(front, "GET", "/mapping") == (200, {"mapping": []})
    assert await call(front, "POST", "/mapping", pair) == (200, {"mapping": [pair]})
    other = {"producer": 1, "consumer": 2}
    assert (await call(front, "POST", "/mapping", other))[1] == {"mapping": [pair, other]}
    assert await call(front, "DELETE", "/mapping", pair) == (200, {"mapping": [other]})
    assert await call(front, "GET", "/mapping") == (200, {"mapping": [other]})


IMPOSSIBLE: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/mapping", {"producer": 0, "consumer": 9}, 404, "there is no GPU 9 here (there is: 0, 1, 2, 3)"),
    ("POST", "/mapping", {"producer": 8, "consumer": 9}, 404, "no GPU 8 and no GPU 9"),
    ("POST", "/mapping", {"producer": 0, "consumer": 1}, 409, "GPU 0 lends to GPU 1 already"),
    ("POST", "/mapping", {"producer": 2, "consumer": 2}, 422, "GPU 2 cannot be its own producer"),
    (
        "POST",
        "/mapping",
        {"producer": "0", "consumer": 2},
        422,
        "producer: Input should be a valid integer, got '0'",
    ),
    ("POST", "/mapping", {"producer": 1.5, "consumer": 2}, 422, "producer"),
    ("POST", "/mapping", {"producer": True, "consumer": 2}, 422, "producer"),
    ("POST", "/mapping", {"producer": -1, "consumer": 2}, 422, "greater than or equal to 0"),
    ("POST", "/mapping", {"producer": 1}, 422, "consumer: Field required"),
    ("POST", "/mapping", {"producer": 0, "consumer": 2, "x": 1}, 422, "x: Extra inputs are not permitted"),
    ("POST", "/mapping", [1], 422, "body"),
    ("DELETE", "/mapping", {"producer": 2, "consumer": 1}, 404, "GPU 2 does not lend to GPU 1"),
    ("DELETE", "/mapping", {"producer": 2, "consumer": 77}, 404, "no GPU 77"),
    ("POST", "/leases/4/revoke", None, 404, "there is no lease 4"),
    ("POST", "/leases/x/revoke", None, 422, "id: String should match pattern"),
    ("POST", "/leases/1_0/revoke", None, 422, "id: String should match pattern"),
    ("POST", "/leases/06/revoke", None, 422, "id: String should match pattern"),
    ("POST", "/leases/1/revoke", {"deadline_s": -1}, 422, "deadline_s"),
    ("POST", "/reclaim", {"gpu": 9, "bytes": 1, "deadline_s": 1}, 404, "no GPU 9"),
    ("POST", "/reclaim", {"gpu": 0, "bytes": 0, "deadline_s": 1}, 422, "bytes: Input should be greater than 0"),
    ("POST", "/reclaim", {"gpu": 0, "bytes": 1, "deadline_s": "soon"}, 422, "deadline_s"),
]


async def test_what_cannot_be_done_says_why(front: Front) -> None:
    await call(front, "POST", "/mapping", {"producer": 0, "consumer": 1})
    for method, path, body, status, words in IMPOSSIBLE:
        found, answer = await call(front, method, path, body)
        assert found == status, (method, path, body, answer)
        assert words in answer["error"]["message"], (method, path, body)
        assert answer["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_no_json_says_so(front: Front) -> None:
    status, answer, _ = await front.post("/mapping", b"{", headers={"Content-Type": "application/json"})
    assert (status, answer["error"]["message"][:30]) == (400, "the body is not valid JSON: Ex")


async def test_gpus_and_leases_tell_whose_memory_is_where(front: Front) -> None:
    lend(front)
    status, gpus = await call(front, "GET", "/gpus")
    assert status == 200
    assert gpus[0] == {
        "index": 0, "name": "cpu:0", "total": 0, "free": SLAB, "lent": 3 * SLAB, "borrowed": 0, "note": "",
    }  # fmt: skip
    assert gpus[2]["borrowed"] == 3 * SLAB
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2, 3]
    status, leases = await call(front, "GET", "/leases")
    assert leases == [
        {
            "id": 1, "epoch": 1, "lender": "lender", "lender_gpu": 0, "borrower": "borrower", "borrower_gpu": 2,
            "bytes": 3 * SLAB, "state": "active", "deadline_s": None,
        }
    ]  # fmt: skip


async def test_a_lease_is_asked_back(front: Front) -> None:
    lend(front)
    assert await call(front, "POST", "/leases/1/revoke", {"deadline_s": 7}) == (
        200, {"lease": 1, "deadline_s": 7.0, "note": ""},
    )  # fmt: skip
    peer, message = front.peer.to_parties[-1]
    assert (peer, message) == ("borrower", Revoke(1, 1, (0, 1, 2), 7.0, "an operator asks it back"))
    _, (lease,) = await call(front, "GET", "/leases")
    assert lease["state"] == "revoking"
    assert 6 < lease["deadline_s"] <= 7
    status, again = await call(front, "POST", "/leases/1/revoke")
    assert status == 200
    assert 6 < again["deadline_s"] <= 7, "the deadline in force, not the later one that was asked for"
    assert "revoking already" in again["note"]


async def test_a_second_reclaim_says_who_holds_what_the_first_waits_for_and_may_shorten_its_deadline(
    front: Front,
) -> None:
    lend(front)
    front.peer.told_party.clear()
    first = asyncio.create_task(call(front, "POST", "/reclaim", {"gpu": 0, "bytes": 99 * SLAB, "deadline_s": 60}))
    await asyncio.wait_for(front.peer.told_party.wait(), PATIENCE_S)
    _, second = await call(front, "POST", "/reclaim", {"gpu": 0, "bytes": SLAB, "deadline_s": 5})
    assert f"{3 * SLAB} bytes more are asked back already, of borrower" in second["note"]
    _, (lease,) = await call(front, "GET", "/leases")
    assert lease["deadline_s"] <= 5
    front.peer.lend(FromPartyLink("borrower", Release(1, 1, (0, 1, 2))))
    assert (await first)[1]["yielded"] >= 3 * SLAB


async def test_a_reclaim_answers_when_all_has_come(front: Front) -> None:
    lend(front)
    front.peer.told_party.clear()
    asked = asyncio.create_task(call(front, "POST", "/reclaim", {"gpu": 0, "bytes": 2 * SLAB - 5, "deadline_s": 30}))
    await asyncio.wait_for(front.peer.told_party.wait(), PATIENCE_S)
    front.peer.lend(FromPartyLink("borrower", Release(1, 1, (2,))))
    assert await asked == (
        200, {"gpu": 0, "yielded": 2 * SLAB, "missing": 0, "holders": [], "note": ""},
    )  # fmt: skip
    late = await call(front, "POST", "/reclaim", {"gpu": 0, "bytes": 99 * SLAB, "deadline_s": 0})
    assert late[1]["missing"] == 2 * SLAB
    assert late[1]["holders"] == ["borrower"]
    assert "all that can be taken back" in late[1]["note"]


async def test_a_silent_scheduler_is_told(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_api, "ANSWER_TIMEOUT_S", 0.05)
    front.peer.answers_queries = False
    for method, path, body in (
        ("GET", "/leases", None),
        ("POST", "/mapping", {"producer": 0, "consumer": 1}),
        ("POST", "/reclaim", {"gpu": 0, "bytes": 1, "deadline_s": 0.01}),
    ):
        status, answer = await call(front, method, path, body)
        assert status == 503
        assert "has not answered" in answer["error"]["message"]


async def test_the_page_and_the_metrics_show_what_is_lent(front: Front) -> None:
    lend(front)
    await call(front, "POST", "/mapping", {"producer": 0, "consumer": 2})
    async with front.client.get(front.url + "/") as response:
        page = await response.text()
    assert "lender (GPU 0)" in page
    assert "3 MiB" in page
    async with front.client.get(front.url + "/metrics") as response:
        metrics = await response.text()
    assert 'forebay_lending_lent_bytes{gpu="0"} 3.145728e+06' in metrics
    assert "forebay_lending_grants_total 1.0" in metrics


async def test_the_documentation_has_every_route_with_an_example(front: Front) -> None:
    _, schema = await front.get("/openapi.json")
    for path, methods in {
        "/mapping": ["post", "delete", "get"], "/gpus": ["get"], "/leases": ["get"],
        "/leases/{id}/revoke": ["post"], "/reclaim": ["post"],
    }.items():  # fmt: skip
        for method in methods:
            route = schema["paths"][path][method]
            assert route["responses"]["200"]["content"]["application/json"]["example"], (path, method)
    assert schema["components"]["schemas"]["Pair"]["examples"] == [{"producer": 0, "consumer": 2}]


KEYRING = Keyring({OPERATOR: digest("operators-own"), "red": digest("red-token"), "blue": digest("blue-token")})


async def test_every_request_but_healthz_needs_a_token() -> None:
    async with front_door(Peer([]), keyring=KEYRING) as front:
        assert (await call(front, "GET", "/healthz"))[0] == 200
        for path in ("/", "/docs", "/metrics", "/gpus", "/leases", "/v1/models", "/openapi.json", "/nothing"):
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic operators-own"}):
                async with front.client.get(front.url + path, headers=header) as response:
                    assert response.status == 401, path
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert "Authorization: Bearer TOKEN" in (await response.json())["error"]["message"]
            assert "wrong" not in await response.text()
        for token in ("operators-own", "red-token"):
            assert (await call(front, "GET", "/v1/models", token=token))[0] == 200
        async with front.client.get(front.url + "/gpus", headers={"authorization": "bearer  red-token "}) as response:
            assert response.status == 200


async def test_a_tenant_neither_sees_nor_revokes_anothers_lease() -> None:
    async with front_door(Peer([]), keyring=KEYRING) as front:
        settings = msgspec.structs.replace(front.peer.lending.settings, tenants=KEYRING.digests)
        front.peer.lending = LendingCore(settings)
        attach(front, "lender", 0, 4, digest("blue-token"))
        attach(front, "borrower", 2, 0, digest("red-token"))
        front.peer.lend(FromPartyLink("borrower", Borrow(1, SLAB)))
        seen = {
            token: len((await call(front, "GET", "/leases", token=token))[1])
            for token in ("red-token", "blue-token", "operators-own")
        }
        assert seen == {"red-token": 1, "blue-token": 0, "operators-own": 1}
        status, answer = await call(front, "POST", "/leases/1/revoke", token="blue-token")
        assert (status, answer["error"]["message"]) == (403, "lease 1 is another tenant's")
        pair = {"producer": 0, "consumer": 2}
        assert (await call(front, "POST", "/mapping", pair, "red-token"))[0] == 403
        assert (await call(front, "POST", "/mapping", pair, "operators-own"))[0] == 200
        reclaim = {"gpu": 0, "bytes": SLAB, "deadline_s": 1}
        assert (await call(front, "POST", "/reclaim", reclaim, "red-token"))[0] == 403
        assert (await call(front, "POST", "/reclaim", reclaim, "blue-token"))[1]["yielded"] == SLAB
        assert (await call(front, "POST", "/leases/1/revoke", token="red-token"))[0] == 200
