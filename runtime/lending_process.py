"""The lending core's place in the scheduler process: carries messages to it and its commands out, and keeps on disk
what must outlive the process, before anybody is told of it. Decides nothing.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, assert_never

import msgspec

from forebay.runtime.config import Configuration
from forebay.runtime.keyring import Keyring, digest
from forebay.runtime.known_gpus import known_gpus
from forebay.runtime.ledger_file import LedgerFile
from forebay.runtime.process_watch import ProcessWatch, pid_namespace
from forebay.runtime.recording import Header, LendingHeader, Recorder
from forebay.sched.lending import LendingCore
from forebay.sched.lending_events import (
    Forget,
    FromPartyLink,
    Keep,
    LendingCommand,
    LendingEvent,
    LendingSettings,
    LendingTick,
    PartyGone,
    Remark,
    Restored,
    Tell,
    Wish,
)
from forebay.transport.addresses import runtime_folder
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Answered,
    Attach,
    FromParty,
    Heartbeat,
    LendingWish,
    Stop,
)

SLOWEST_TICK_S = 0.25
"""How late a deadline may be noticed."""


class LendingProcess:
    """`send(peer, message)` is the hub's. Raises OSError where the ledger cannot be kept. `endpoint` is the one at
    which the hub listens; `keyring` is the parties'. `door_key`: a front door's name ends with it, where there are
    tenants: any process that may connect could call itself a front door."""

    def __init__(
        self,
        configuration: Configuration,
        endpoint: str,
        journal: Path | None,
        send: Callable[[str, Any], None],
        log: Any,
        keyring: Keyring,
        door_key: str,
    ) -> None:
        self._send = send
        self._log = log
        self._door_key = door_key
        section, timeouts = configuration.lending, configuration.timeouts
        self._tick_s = min(SLOWEST_TICK_S, section.ttl / 8)
        self._pids: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unwritten = False
        self._ended = False
        self._namespace = pid_namespace()
        with ExitStack() as undo:
            self._watch = ProcessWatch(self._on_end)
            undo.callback(self._watch.close)
            self._file = LedgerFile(ledger_path(section.ledger, endpoint, bool(section.uids)), int(time.time()))
            undo.callback(self._file.close)
            if self._file.damage:
                log.error("the ledger was lost; parties that come back are asked what they hold", why=self._file.damage)
            settings = LendingSettings(
                known_gpus(device.device for device in configuration.devices),
                section.ttl,
                min(timeouts.heartbeat, section.ttl / 5),
                keyring.digests,
                secrets.token_hex(32),
                self._file.epoch,
            )
            self._core = LendingCore(settings)
            header = Header(PROTOCOL_VERSION, "lending", LendingHeader(settings))
            self._recorder: Recorder[LendingEvent, LendingCommand] = Recorder(self._core, header, journal)
            undo.callback(self._recorder.close)
            if self._file.restored:
                self._decide(Restored(self._file.restored))
            self._undo = undo.pop_all()

    def stop(self, reason: str) -> None:
        """Tells every party that this scheduler ends: they go on without it at once, rather than when they next want
        something. From now on nothing is heard or decided; the ledger is on disk."""
        self._ended = True
        for peer in self._core.peers:
            self._send(peer, Stop(reason))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._undo.close()

    def start(self) -> None:
        """Begins to look at the clock."""
        loop = asyncio.get_running_loop()
        if self._ended:
            return
        self._decide(LendingTick())
        self._watch.keep_only(self._core.knows)
        self._recorder.flush()
        self._timer = loop.call_later(self._tick_s, self.start)

    def knows(self, peer: str) -> bool:
        return self._core.knows(peer)

    def hear(self, peer: str, message: FromParty | Heartbeat) -> None:
        if self._ended:
            return
        local = isinstance(message, Attach) and message.pids == self._namespace != ""
        if isinstance(message, Attach):
            # No secret of a tenant gets into the core, and so none into its journal.
            message = msgspec.structs.replace(message, credential=digest(message.credential))
            self._pids[peer] = message.pid
        self._decide(FromPartyLink(peer, message))
        if not self._core.knows(peer):
            self._pids.pop(peer, None)
            self._watch.forget(peer)
        elif local:
            # Its own word, but it could gain nothing by another number: it would only be given up with that process.
            self._watch.watch(peer, self._pids[peer])

    def wish(self, peer: str, wish: LendingWish) -> None:
        if self._ended:
            return self._send(peer, Answered(wish.query, "refused", "the scheduler ends"))
        if self._core.settings.tenants and not peer.endswith(self._door_key):
            reason = "only the scheduler's own front door may speak for tenants"
            return self._send(peer, Answered(wish.query, "forbidden", reason))
        self._decide(Wish(peer, wish))

    def _on_end(self, peer: str) -> None:
        self._pids.pop(peer, None)
        if not self._ended:
            self._decide(PartyGone(peer, "its process has ended"))

    def on_exit(self, pid: int, reason: str) -> None:
        """A process that the scheduler had started has ended."""
        if self._ended:
            return
        for peer in [peer for peer, of in self._pids.items() if of == pid]:
            del self._pids[peer]
            self._decide(PartyGone(peer, f"its process {reason}"))

    def _decide(self, event: LendingEvent) -> None:
        commands = self._recorder.handle(asyncio.get_running_loop().time(), event)
        if changes := [command for command in commands if isinstance(command, Keep | Forget)]:
            self._keep(changes)
        for command in commands:
            match command:
                case Tell(peer, message):
                    self._send(peer, message)
                case Remark(text):
                    self._log.warning("lending", remark=text)
                case Keep() | Forget():
                    pass
                case _:
                    assert_never(command)

    def _keep(self, changes: list[Keep | Forget]) -> None:
        """A ledger that cannot be written is no reason to stop serving: after a restart the parties tell what they
        hold. As soon as it can be written again it is written whole."""
        try:
            if self._unwritten:
                self._file.rewrite(self._core.records)
                self._log.info("the ledger is written again")
            else:
                self._file.write(changes)
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self._log.error("a restart of the scheduler would rely on what parties hold", error=str(error))
            self._unwritten = True


def ledger_path(configured: str, endpoint: str, shared: bool) -> Path:
    """Where the ledger of the scheduler at that endpoint is kept unless the configuration says it: beside its socket,
    or, where that is `shared` with other users, in a folder of our own."""
    if configured:
        return Path(configured)
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and not shared:
        return Path(f"{rest.removesuffix('.sock')}.ledger")
    name = re.sub("[^A-Za-z0-9.]+", "-", rest.removesuffix(".sock"))[-80:]
    return runtime_folder() / f"{scheme}-{name.lstrip('-')}.ledger"
