"""The scheduler as lending's coordinator, over real HTTP; its parties speak the raw protocol over real ZeroMQ."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from forebay.transport.codec import read_to_party
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Borrow,
    Granted,
    Heartbeat,
    Holding,
    Lend,
    Mapped,
    Message,
    Refused,
    Rejoin,
    Release,
    Returned,
    Revoke,
    ToPartyLink,
    ToScheduler,
    Yielded,
)
from forebay.transport.zeromq import ZmqLink
from tests.system.server import ROOT, Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

SLAB = 1 << 20
PATIENCE_S = 20.0
QUICK = {"lending": {"ttl": 2.0}, "timeouts": {"heartbeat": 0.4, "silence": 5.0}}

Expected = TypeVar("Expected", bound=Message)


class Party:
    """One that is written down here, message by message."""

    def __init__(self, endpoint: str, name: str, gpu: int, slabs: int = 0, credential: str = "") -> None:
        self.name, self.gpu, self.slabs, self.credential = name, gpu, slabs, credential
        self.session = 0
        self._heard: asyncio.Queue[ToPartyLink] = asyncio.Queue()
        self.link: ZmqLink[ToScheduler, ToPartyLink] = ZmqLink(
            endpoint, f"link-{name}", read_to_party(), self._hear, self._unreadable
        )

    def _hear(self, messages: list[ToPartyLink]) -> None:
        for message in messages:
            self._heard.put_nowait(message)

    def _unreadable(self, peer: str, error: Exception) -> None:
        raise AssertionError(f"{peer}: {error}")

    def say(self, message: ToScheduler) -> None:
        self.link.send(message)

    def attach(self, lent: tuple[Holding, ...] = (), borrowed: tuple[Holding, ...] = ()) -> None:
        self.session += 1
        busy = {slab for holding in lent for slab in holding.slabs}
        free = tuple(slab for slab in range(self.slabs) if slab not in busy)
        endpoint, size = (f"/tmp/{self.name}", SLAB) if self.slabs else ("", 0)
        self.say(
            Attach(
                PROTOCOL_VERSION, self.session, self.name, self.gpu, os.getpid(), os.getuid(), "here",
                self.credential, endpoint, size, free, lent, borrowed,
            )
        )  # fmt: skip

    async def hear(self, kind: type[Expected]) -> Expected:
        """The next message of that kind; what comes before it is passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._heard.get()
                if isinstance(message, kind):
                    return message


@asynccontextmanager
async def parties(endpoint: str, *credentials: str) -> AsyncIterator[tuple[Party, Party]]:
    """A lender of four slabs on GPU 0 and a borrower on GPU 2, both attached."""
    first, second = (*credentials, "", "")[:2]
    lender, borrower = Party(endpoint, "lender", 0, 4, first), Party(endpoint, "borrower", 2, 0, second)
    try:
        for party in (lender, borrower):
            party.attach()
            await party.hear(Attached)
        yield lender, borrower
    finally:
        lender.link.close()
        borrower.link.close()


async def lend(lender: Party, borrower: Party, slabs: int = 3) -> tuple[Holding, Holding]:
    """One lease, mapped; as both parties hold it."""
    borrower.say(Borrow(1, slabs * SLAB))
    (grant,) = (await borrower.hear(Granted)).grants
    admitted = await lender.hear(Lend)
    assert (admitted.lease, admitted.token, admitted.slabs) == (grant.lease, grant.token, grant.slabs)
    borrower.say(Mapped(grant.lease, grant.epoch))
    common = (grant.lease, grant.epoch, grant.slabs, SLAB)
    return (
        Holding(*common, "borrower", grant.endpoint, grant.token),
        Holding(*common, "lender", grant.endpoint, grant.token),
    )


async def get(server: Server, path: str, **how: Any) -> Any:
    return await call(server, "GET", path, **how)


async def call(server: Server, method: str, path: str, status: int = 200, **how: Any) -> Any:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        response = await client.request(method, server.url + path, **how)
    assert response.status_code == status, response.text
    return response.json()


async def until(server: Server, state: str) -> None:
    """The only lease comes to that state."""
    async with asyncio.timeout(PATIENCE_S):
        while (await get(server, "/leases"))[0]["state"] != state:
            pass


def started(folder: Path, configuration: dict[str, Any] | None, *arguments: str, **how: Any) -> tuple[Server, str]:
    server = Server(configuration, folder, *arguments, ready=False, **how)
    try:
        endpoint = server.until("the scheduler listens")["endpoint"]
        server.start(configuration or {})
    except BaseException:
        server.__exit__()
        raise
    return server, endpoint


async def test_a_loan_from_mapping_to_reclaim_and_its_journal_replays(tmp_path: Path) -> None:
    server, endpoint = started(tmp_path, None, "--journal", str(tmp_path / "journal"))
    with server:
        pair = {"producer": 0, "consumer": 2}
        assert await call(server, "POST", "/mapping", json=pair) == {"mapping": [pair]}
        await call(server, "POST", "/mapping", 409, json=pair)
        await call(server, "POST", "/mapping", 404, json={"producer": 0, "consumer": 9999})
        async with parties(endpoint) as (lender, borrower):
            await lend(lender, borrower)
            (lease,) = await get(server, "/leases")
            assert (lease["state"], lease["bytes"], lease["lender"]) == ("active", 3 * SLAB, "lender")
            gpus = {gpu["index"]: gpu for gpu in await get(server, "/gpus")}
            assert (gpus[0]["free"], gpus[0]["lent"], gpus[2]["borrowed"]) == (SLAB, 3 * SLAB, 3 * SLAB)
            reclaim = asyncio.create_task(
                call(server, "POST", "/reclaim", json={"gpu": 0, "bytes": 2 * SLAB, "deadline_s": 10})
            )
            revoke = await borrower.hear(Revoke)
            assert len(revoke.slabs) == 1, "one is free"
            borrower.say(Release(revoke.lease, revoke.epoch, revoke.slabs))
            answer = await reclaim
            assert (answer["yielded"], answer["missing"]) == (2 * SLAB, 0)
            assert (await lender.hear(Yielded)).request == 0
            await call(server, "POST", f"/leases/{lease['id']}/revoke", json={"deadline_s": 0.3})
            assert (await borrower.hear(Revoke)).deadline_s == 0.3
            await until(server, "overdue")
            late = await call(server, "POST", "/reclaim", json={"gpu": 0, "bytes": SLAB, "deadline_s": 0})
            assert (late["missing"], late["holders"]) == (SLAB, ["borrower"])
        assert server.stop() == 0
        server.assert_nothing_left()
    check_journals(tmp_path / "journal")


def check_journals(folder: Path) -> None:
    files = list(folder.iterdir())
    replayed = subprocess.run(
        [sys.executable, "-m", "runtime.journal", *map(str, files)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert replayed.returncode == 0, replayed.stderr
    assert "lending, " in replayed.stdout
    assert replayed.stdout.count("the same commands") == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


async def test_leases_and_mapping_survive_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    patient = {"lending": {"ttl": 60.0}}
    server, endpoint = started(tmp_path, patient)
    pair = {"producer": 0, "consumer": 2}
    async with parties(endpoint) as (lender, borrower):
        with server:
            await call(server, "POST", "/mapping", json=pair)
            lent, borrowed = await lend(lender, borrower)
            await until(server, "active")
            server.children()
            server.process.kill()
            server.assert_nothing_left()
            again, _ = started(tmp_path, patient, runtime=server.runtime)
            with again:
                assert await get(again, "/mapping") == {"mapping": [pair]}
                (lease,) = await get(again, "/leases")
                assert (lease["id"], lease["state"]) == (lent.lease, "active")
                for party in (lender, borrower):
                    party.say(Release(99, 0, (1,)))
                    await party.hear(Rejoin)
                lender.attach(lent=(lent,))
                borrower.attach(borrowed=(borrowed,))
                await borrower.hear(Attached)
                borrower.say(Release(lent.lease, lent.epoch, lent.slabs))
                returned = await lender.hear(Returned)
                assert (returned.slabs, returned.released) == (lent.slabs, True)
                assert await get(again, "/leases") == []
                assert again.stop() == 0


async def test_a_silent_borrower_loses_its_lease_and_a_forged_claim_is_none(tmp_path: Path) -> None:
    server, endpoint = started(tmp_path, QUICK)
    with server:
        async with parties(endpoint) as (lender, borrower):
            lent, borrowed = await lend(lender, borrower)
            lender_lives = asyncio.create_task(beat(lender))
            returned = await lender.hear(Returned)
            assert (returned.slabs, returned.released) == (lent.slabs, False)
            forged = Holding(borrowed.lease, borrowed.epoch, borrowed.slabs, SLAB, "lender", "/l", "f" * 64)
            borrower.attach(borrowed=(forged,))
            await borrower.hear(Attached)
            assert await get(server, "/leases") == []
            lender_lives.cancel()
            await asyncio.gather(lender_lives, return_exceptions=True)
        assert server.stop() == 0


def check_hidden(server: Server, token: bytes) -> None:
    for name in ("environ", "cmdline"):
        for pid in [server.process.pid, *server.children()]:
            assert token not in Path(f"/proc/{pid}/{name}").read_bytes()


async def beat(party: Party) -> None:
    while True:
        party.say(Heartbeat())
        await asyncio.sleep(0.2)


async def test_tenants_need_their_tokens_everywhere(tmp_path: Path) -> None:
    configuration = {
        "http": {"token": "operators-own"},
        "lending": {"tokens": {"red": "red-token", "blue": "blue-token"}},
    }
    server, endpoint = started(tmp_path, configuration)
    with server:
        await get(server, "/healthz")
        await call(server, "GET", "/leases", 401)
        stranger = Party(endpoint, "stranger", 1, 1, "nobodys-token")
        stranger.attach()
        assert "no tenant's" in (await stranger.hear(Refused)).reason
        stranger.link.close()
        async with parties(endpoint, "red-token", "blue-token") as (lender, borrower):
            await lend(lender, borrower)
            for token, count in (("red-token", 0), ("blue-token", 1), ("operators-own", 1)):
                headers = {"Authorization": f"Bearer {token}"}
                assert len(await get(server, "/leases", headers=headers)) == count
            red = {"Authorization": "Bearer red-token"}
            await call(server, "POST", "/leases/1/revoke", 403, headers=red)
        check_hidden(server, b"red-token")
        assert "red-token" not in server.log
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
