"""The front door process: HTTP on one side, the scheduler and the workers on the other, the desk between them."""

import asyncio
import os
import resource
import secrets
import socket
from pathlib import Path
from typing import Any

import uvicorn

import forebay
from forebay.runtime import logs
from forebay.runtime.bodies import BODY_LIMIT
from forebay.runtime.child import EXIT_UNUSABLE, end_with_parent
from forebay.runtime.desk import Desk
from forebay.runtime.http import ServerInfo, build_app
from forebay.runtime.keyring import DOOR_VARIABLE, Keyring
from forebay.runtime.loop import Failure, on_signals, run
from forebay.runtime.text import Texts
from forebay.transport.addresses import RefusedAddress, check_http_host
from forebay.transport.codec import read_to_front_door
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Catalog,
    Heartbeat,
    Open,
    Opened,
    Refused,
    Rejoin,
    Stop,
    ToFrontDoor,
    ToScheduler,
)
from forebay.transport.session import Session
from forebay.transport.zeromq import ZmqLink, ZmqSink

WAITING_HEARTBEAT_S = 1.0


def open_door(
    scheduler: str,
    sockets: Path,
    host: str,
    port: int,
    grace_s: float,
    config: str | None,
    parent: int | None,
    body_limit: int = BODY_LIMIT,
    trust_user: bool = False,
) -> int:
    """Serves HTTP until the scheduler says otherwise; returns the exit status. `body_limit` in bytes, `trust_user` as
    in ServerInfo."""
    if parent is not None:
        end_with_parent(parent)
    log = logs.set_up("front door")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client is a descriptor; the usual 1,024 are few
    keyring = Keyring.from_environment()
    try:
        listener = listen(host, port, bool(keyring))
    except (OSError, RefusedAddress) as error:
        log.error("HTTP cannot listen", host=host, port=port, error=str(error))
        return EXIT_UNUSABLE
    with listener:
        info = ServerInfo(forebay.__version__, config, body_limit, keyring, trust_user)
        return run(FrontDoorProcess(scheduler, sockets, listener, grace_s, info, log).run())


def listen(host: str, port: int, authenticated: bool = False) -> socket.socket:
    """A listening socket: on loopback, or anywhere if requests are `authenticated`. Raises RefusedAddress, OSError."""
    check_http_host(host, authenticated)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by its connections: a token must not wait for the acknowledgement of the one before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


class FrontDoorProcess:
    def __init__(
        self, scheduler: str, sockets: Path, listener: socket.socket, grace_s: float, info: ServerInfo, log: Any
    ) -> None:
        self._scheduler = scheduler
        self._sockets = sockets
        self._listener = listener
        self._grace_s = grace_s
        self._info = info
        self._log = log
        self._heartbeat_s = WAITING_HEARTBEAT_S
        self._status = 0
        self._session = Session()

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        failure = Failure()
        on_signals(lambda: None)  # the scheduler drains first, and then says Stop
        self._desk = Desk(lambda message: self._link.send(message))
        self._texts = Texts()
        self._warming: set[asyncio.Task[None]] = set()
        app = build_app(self._desk, self._texts, self._info)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=max(1, round(self._grace_s)),
            )
        )
        key = os.environ.get(DOOR_VARIABLE, secrets.token_hex(16))
        name = f"door-{os.getpid()}-{secrets.token_hex(2)}-{key}"
        self._sink: ZmqSink[ToFrontDoor] = ZmqSink(
            f"ipc://{self._sockets}/{os.getpid()}.sock", read_to_front_door(), self._from_worker, self._on_unreadable
        )
        self._link: ZmqLink[ToScheduler, ToFrontDoor] = ZmqLink(
            self._scheduler, name, read_to_front_door(), self._from_scheduler, self._on_unreadable
        )
        try:
            # Our own sockets, loop and signals; of uvicorn only the server.
            serving = asyncio.create_task(self._server._serve([self._listener]))
            self._open()
            self._beat()
            await failure.or_done(serving)
        finally:
            for task in self._warming:
                task.cancel()
            self._link.close()
            self._sink.close()
        return self._status

    def _end(self, status: int, reason: str) -> None:
        self._log.info("closing", reason=reason)
        self._status = self._status or status
        self._server.should_exit = True

    def _open(self) -> None:
        host, port = self._listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._link.send(Open(PROTOCOL_VERSION, self._session.renew(), os.getpid(), self._sink.endpoint, url))

    def _beat(self) -> None:
        self._link.send(Heartbeat())
        self._loop.call_later(self._heartbeat_s, self._beat)

    def _on_unreadable(self, peer: str, error: Exception) -> None:
        self._log.error("an unreadable frame", peer=peer, error=str(error))

    def _from_worker(self, messages: list[ToFrontDoor]) -> None:
        for message in messages:
            try:
                self._desk.receive(message)
            except ValueError as error:  # any process of this user can write to the socket
                self._log.error("a message that makes no sense", peer="a worker", error=str(error))

    def _from_scheduler(self, messages: list[ToFrontDoor]) -> None:
        for message in filter(self._session.admits, messages):
            self._desk.receive(message)
            match message:
                case Opened(heartbeat_s=heartbeat_s):
                    self._heartbeat_s = heartbeat_s
                case Catalog(models):
                    for model in models:
                        self._warm(model.path)
                case Rejoin(reason):
                    self._log.warning("opening anew", reason=reason)
                    self._open()
                case Refused(reason):
                    self._log.error("the scheduler refused this front door", reason=reason)
                    self._end(EXIT_UNUSABLE, reason)
                case Stop(reason):
                    self._end(0, reason)
                case _:
                    pass

    def _warm(self, path: str) -> None:
        """Loads a tokenizer before the first request asks for it; a failure is that request's to report."""

        async def load() -> None:
            try:
                await self._texts.get(path)
            except ValueError as error:
                self._log.error("a tokenizer cannot be read", error=str(error))

        task = asyncio.create_task(load())
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)
