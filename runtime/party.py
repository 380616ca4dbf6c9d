"""A party's side of belonging to a scheduler: its link, its sessions, its heartbeats, and finding the scheduler again.

Lives in an event loop. Knows nothing of slabs: what the party holds comes from `describe`, what the scheduler says goes
to `on_message`.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from forebay.runtime.background import log
from forebay.runtime.process_watch import pid_namespace
from forebay.sched.backoff import restart_delay
from forebay.transport.codec import read_to_party
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Detach,
    FromParty,
    Heartbeat,
    Holding,
    Refused,
    Rejoin,
    Stop,
    ToParty,
    ToPartyLink,
)
from forebay.transport.session import Session
from forebay.transport.zeromq import ZmqLink

PartyState = Literal["connecting", "attached", "away", "refused", "closed"]
"""connecting: it has asked to attach, and an answer may come any moment; away: it does not answer; refused: it will not
have this party, and trying again would not help."""

Holdings = tuple[tuple[int, ...], tuple[Holding, ...], tuple[Holding, ...]]
"""What a party holds: free slabs, leases lent, leases borrowed."""

WAITING_HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class Identity:
    """What of an `Attach` never changes."""

    party: str
    gpu: int
    credential: str
    endpoint: str
    slab_bytes: int


def party_name(role: str, gpu: int) -> str:
    """Unique among all processes of a host, and telling to people."""
    return f"{role}-gpu{gpu}-{os.getpid()}-{secrets.token_hex(3)}"


class Party:
    """`on_attached` is called at every answer to an `Attach`: what was asked before may be unknown there and is to be
    asked again. Neither callback may raise."""

    def __init__(
        self,
        scheduler: str,
        identity: Identity,
        describe: Callable[[], Holdings],
        on_message: Callable[[ToParty], None],
        on_attached: Callable[[], None],
    ) -> None:
        self.identity = identity
        self.state: PartyState = "connecting"
        self.reason = f"no scheduler at {scheduler} has answered yet"
        self._loop = asyncio.get_running_loop()
        self._describe = describe
        self._on_message = on_message
        self._on_attached = on_attached
        self._session = Session()
        self._heartbeat_s = WAITING_HEARTBEAT_S
        self._ttl_s = float("inf")
        self._heard = self._loop.time()
        self._attempts = 0
        self._pending = False  # an Attach that may still be answered
        self._changed = asyncio.Event()
        self._link: ZmqLink[FromParty | Heartbeat, ToPartyLink] = ZmqLink(
            scheduler, identity.party, read_to_party(), self._on_messages, self._on_unreadable
        )
        self._attach()
        self._timer = self._loop.call_later(WAITING_HEARTBEAT_S, self._beat)

    @property
    def attached(self) -> bool:
        return self.state == "attached"

    async def wait_attached(self, timeout_s: float) -> bool:
        """False if the scheduler refuses, or has not answered within that time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state in ("connecting", "away"):
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.attached

    def send(self, message: FromParty) -> None:
        """In order after the latest `Attach`. What a scheduler that does not know this party gets is lost on it: the
        next `Attach` says how things stand."""
        if self.state not in ("closed", "refused"):
            self._link.send(message)

    def unanswered(self, what: str) -> None:
        """The scheduler owed an answer and did not give it: it counts as away until it is heard again."""
        if self.attached:
            self._become("away", f"the scheduler has not answered: {what}")
        elif self.state == "connecting":
            self._become("away", self.reason)

    def close(self, reason: str, *, says_so: bool = True) -> None:
        """Says goodbye: that it has unmapped what it borrowed. Closing twice is fine."""
        if self.state == "closed":
            return
        self._timer.cancel()
        if says_so and self.state != "refused":
            self._link.send(Detach(reason))
        self._become("closed", reason)
        self._link.close()

    def _become(self, state: PartyState, reason: str) -> None:
        self.state, self.reason = state, reason
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _attach(self) -> None:
        free, lent, borrowed = self._describe()
        identity = self.identity
        self._pending = True
        self._link.send(
            Attach(
                PROTOCOL_VERSION,
                self._session.renew(),
                identity.party,
                identity.gpu,
                os.getpid(),
                os.getuid(),
                socket.gethostname(),
                identity.credential,
                identity.endpoint,
                identity.slab_bytes,
                free,
                lent,
                borrowed,
                pid_namespace(),
            )
        )

    def _beat(self) -> None:
        """A scheduler that came up meanwhile answers a heartbeat with Rejoin, and that with an Attach."""
        if self.state in ("closed", "refused"):
            return
        if self.attached and self._loop.time() - self._heard > self._ttl_s:
            self._become("away", f"the scheduler has been silent for more than {self._ttl_s:g} s")
            log.warning("%s: %s; everything held stays usable", self.identity.party, self.reason)
        delay = self._heartbeat_s
        if not self.attached:
            self._attempts += 1
            delay = max(delay, restart_delay(self._attempts))
            self._pending = False
        self._link.send(Heartbeat())
        self._timer = self._loop.call_later(delay, self._beat)

    def _on_unreadable(self, peer: str, error: Exception) -> None:
        self._refused(str(error))

    def _refused(self, reason: str) -> None:
        self._become("refused", reason)
        log.error("%s: the scheduler refused this process: %s", self.identity.party, reason)

    def _on_messages(self, messages: list[ToPartyLink]) -> None:
        for message in messages:
            if self.state in ("closed", "refused"):
                return
            if self._session.admits(message):
                self._heed(message)

    def _heed(self, message: ToPartyLink) -> None:
        self._heard = self._loop.time()
        match message:
            case Attached(heartbeat_s=heartbeat_s, ttl_s=ttl_s):
                self._welcome(heartbeat_s, ttl_s)
                return
            case Rejoin(reason):
                self._rejoin(reason)
                return
            case Refused(reason):
                self._refused(reason)
                return
            case Stop(reason):
                self._become("away", f"the scheduler has ended: {reason}")
                log.warning("%s: %s; everything held stays usable", self.identity.party, self.reason)
                return
            case _:
                pass
        if self.state == "away":
            self._become("attached", "")
        if not isinstance(message, Heartbeat):
            self._on_message(message)

    def _welcome(self, heartbeat_s: float, ttl_s: float) -> None:
        self._heartbeat_s, self._ttl_s = heartbeat_s, ttl_s
        self._attempts, self._pending = 0, False
        if self.state != "attached":
            self._become("attached", "")
        self._timer.cancel()
        self._timer = self._loop.call_later(heartbeat_s, self._beat)
        self._on_attached()

    def _rejoin(self, reason: str) -> None:
        # Heartbeats that piled up while it was away are answered one by one; one Attach is enough for all of them.
        if self._pending:
            return
        log.info("%s attaches anew: %s", self.identity.party, reason)
        self._become("connecting", f"attaching anew: {reason}")
        self._attach()
