"""The scheduler process: carries messages to the central core and its commands to peers. Events only: no prompt is read
here, no token passes here, no device is touched."""

import asyncio
import contextlib
import os
import resource
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any, assert_never

import msgspec

from forebay.runtime import logs, mps
from forebay.runtime.config import Configuration, ConfigurationError, load, model_spec, parse_bytes
from forebay.runtime.keyring import CREDENTIAL_VARIABLE, DOOR_VARIABLE, Keyring
from forebay.runtime.lending_process import LendingProcess
from forebay.runtime.loop import Failure, on_signals, run
from forebay.runtime.recording import CentralHeader, Header, Recorder
from forebay.runtime.supervisor import Child, Supervisor
from forebay.sched.central import CentralCore
from forebay.sched.central_events import (
    CentralCommand,
    CentralEvent,
    CentralSettings,
    Dismiss,
    Drain,
    Drained,
    PeerGone,
    Placement,
    Received,
    Send,
    Tick,
)
from forebay.transport.addresses import RefusedAddress, check_endpoint, runtime_folder
from forebay.transport.codec import read_to_scheduler
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    FromParty,
    Heartbeat,
    Join,
    Leave,
    LendingWish,
    ModelFailed,
    ModelReady,
    Open,
    Refused,
    Stop,
    ToFrontDoor,
    ToPartyLink,
    ToScheduler,
    ToWorker,
)
from forebay.transport.zeromq import ZmqHub

LONGEST_NAME = "4194304.sock"
"""A front door names its socket by its process id; the longest one must fit, and that is known before it starts."""


def serve(config: Path | None, port: int | None, journal: Path | None, ready_file: Path | None) -> int:
    """Runs the server until SIGTERM or SIGINT; returns the exit status."""
    log = logs.set_up("scheduler")
    process: SchedulerProcess | None = None
    try:
        configuration = Configuration() if config is None else load(config)
        if port is not None:
            configuration = msgspec.structs.replace(
                configuration, http=msgspec.structs.replace(configuration.http, port=port)
            )
        if ready_file is not None:
            _check_ready_file(ready_file)
        # Workers inherit it: each slab of a pool is an open file.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        process = SchedulerProcess(configuration, config, journal, ready_file, log)
        return run(process.run())
    except ConfigurationError as error:
        log.error("the configuration cannot be used", error=str(error))
    except (RefusedAddress, OSError) as error:
        if process is not None and process.started:
            raise
        log.error("cannot start", error=str(error))
    return 1


def _check_ready_file(path: Path) -> None:
    """Raises OSError that names it where it could not be written."""
    folder = path.parent
    if not folder.is_dir():
        raise OSError(f"--ready-file {str(path)!r} cannot be written: there is no folder {str(folder)!r}; make it")
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "it is a folder" if path.is_dir() else f"user {os.getuid()} may not make files in {str(folder)!r}"
        raise OSError(f"--ready-file {str(path)!r} cannot be written: {why}; name another file")


class SchedulerProcess:
    def __init__(
        self, configuration: Configuration, config: Path | None, journal: Path | None, ready_file: Path | None, log: Any
    ) -> None:
        self._configuration = configuration
        self._config = config
        self._journal = journal
        self._ready_file = ready_file
        self._log = log
        self.started = False
        self._settings = CentralSettings(
            tuple(Placement(model_spec(model), model.placement) for model in configuration.models),
            configuration.device_settings(os.cpu_count() or 1),
            configuration.queue_bound,
            configuration.timeouts.heartbeat,
            configuration.timeouts.silence,
        )
        self._peers: dict[int, str] = {}  # by process id, of this host's peers
        self._pids: dict[str, int] = {}
        self._failures: dict[tuple[str, str], str] = {}  # why a worker could not load a model, as it was logged
        self._problem: str | None = None
        self._door_key = secrets.token_hex(16)
        self._credential = secrets.token_hex(32)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        failure = Failure()
        self._ended = asyncio.Event()
        self._drained = asyncio.Event()
        self._hurry = asyncio.Event()
        on_signals(self._on_signal)
        with contextlib.ExitStack() as undo:
            self._open(undo)
            self.started = True
            self._log.info("the scheduler listens", endpoint=self._hub.endpoint, config=str(self._config or "none"))
            try:
                self._start_children()
                self._tick(loop)
                self._lending.start()
                await failure.or_done(self._ended.wait())
                await failure.or_done(self._drain())
            finally:
                self._lending.stop("it was told to")
                await self._supervisor.stop(self._ask_to_stop, self._configuration.timeouts.stop)
        self._log.info("the scheduler ended", problem=self._problem or "none")
        return 0 if self._problem is None else 1

    def _open(self, undo: contextlib.ExitStack) -> None:
        """All that may fail before anything is started. Raises RefusedAddress, ConfigurationError, OSError."""
        for index, device in enumerate(self._configuration.devices):
            if device.mps and device.spawn and mps.running(Path(device.mps)) is None:
                raise ConfigurationError(
                    f"{self._config}: devices[{index}].mps: no MPS daemon runs in {device.mps!r}; start one with: "
                    f"forebay mps start {device.mps}"
                )
        if self._configuration.trace:
            Path(self._configuration.trace).mkdir(parents=True, exist_ok=True)
        self._sockets = tempfile.mkdtemp(prefix="run-", dir=runtime_folder())
        undo.callback(shutil.rmtree, self._sockets, ignore_errors=True)
        check_endpoint(f"ipc://{self._sockets}/{LONGEST_NAME}")
        self._hub: ZmqHub[ToWorker | ToFrontDoor | ToPartyLink, ToScheduler] = ZmqHub(
            self._configuration.control_endpoint(),
            read_to_scheduler(),
            self._on_messages,
            self._on_unreadable,
            self._configuration.lending.uids,
        )
        undo.callback(self._hub.close)
        # Only now: a second scheduler at this address must leave no trace among the journals of the first.
        header = Header(PROTOCOL_VERSION, "central", CentralHeader(self._settings))
        core = CentralCore(self._settings)
        self._core: Recorder[CentralEvent, CentralCommand] = Recorder(core, header, self._journal)
        undo.callback(self._core.close)
        self._lending = LendingProcess(
            self._configuration,
            self._hub.endpoint,
            self._journal,
            self._hub.send,
            self._log,
            Keyring.of_parties(self._configuration, self._credential),
            self._door_key,
        )
        undo.callback(self._lending.close)
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)  # of an earlier run
        self._supervisor = Supervisor(self._log, self._on_exit, self._on_hopeless)

    def _start_children(self) -> None:
        http = self._configuration.http
        self._supervisor.add(
            "front door",
            "forebay.runtime.front_door",
            [
                *("--scheduler", self._hub.endpoint, "--sockets", self._sockets),
                *("--host", http.host, "--port", str(http.port)),
                *("--grace", str(self._configuration.timeouts.stop * 0.6)),
                *("--body-limit", str(parse_bytes(http.body_limit))),
                *(["--trust-user"] if http.trust_user else []),
                *(("--config", str(self._config)) if self._config else ()),
            ],
            {**Keyring.of_http(self._configuration).variable, DOOR_VARIABLE: self._door_key},
        )
        journal = ("--journal", str(self._journal.resolve())) if self._journal else ()
        trace = ("--trace", self._configuration.trace) if self._configuration.trace else ()
        for device in self._configuration.devices:
            if device.spawn:
                self._supervisor.add(
                    f"worker {device.device}",
                    "forebay.runtime.worker",
                    ["--gpu", device.device, "--scheduler", self._hub.endpoint, *journal, *trace],
                    {
                        **({CREDENTIAL_VARIABLE: self._credential} if self._configuration.lending.tokens else {}),
                        **(
                            {**mps.environment(Path(device.mps), device.mps_percentage), mps.REQUIRED: "1"}
                            if device.mps
                            else {}
                        ),
                    },
                )

    # What comes in -------------------------------------------------------------------------------------------------

    def _on_messages(self, peer: str, messages: list[ToScheduler]) -> None:
        if self._hub.foreign:
            # Another user's processes may lend and borrow; what is served is no business of theirs.
            messages = [message for message in messages if isinstance(message, FromParty | Heartbeat)]
        for message in messages:
            if isinstance(message, LendingWish):
                self._lending.wish(peer, message)
                continue
            if isinstance(message, FromParty) or (isinstance(message, Heartbeat) and self._lending.knows(peer)):
                self._lending.hear(peer, message)
                continue
            match message:
                case Join(pid=pid) | Open(pid=pid):
                    self._peers[pid], self._pids[peer] = peer, pid
                    if (child := self._supervisor.by_pid(pid)) is not None:
                        child.ready()
                    if isinstance(message, Open):
                        self._on_open(message, child)
                        self._works(peer)
                case Leave():
                    leaver = self._pids.get(peer)
                    if leaver is not None and self._supervisor.by_pid(leaver) is None:
                        self._forget(leaver)
                case ModelReady(model):
                    self._works(peer)
                    self._failures.pop((peer, model), None)
                    self._log.info("a model is ready", model=model, worker=peer, max_context=message.max_context)
                case ModelFailed(model, reason):
                    self._works(peer)  # its device was opened
                    told = self._failures.get((peer, model)) == reason
                    self._failures[peer, model] = reason
                    say = self._log.debug if told else self._log.error
                    say("a model could not be loaded", model=model, worker=peer, reason=reason)
                case _:
                    pass
            self._decide(Received(peer, message))

    def _works(self, peer: str) -> None:
        pid = self._pids.get(peer)
        if pid is not None and (child := self._supervisor.by_pid(pid)) is not None:
            child.works()

    def _on_unreadable(self, peer: str, error: Exception) -> None:
        self._log.error("an unreadable frame", peer=peer, error=str(error))
        self._hub.send(peer, Refused(str(error)))

    def _on_open(self, message: Open, door: Child | None) -> None:
        if door is not None:  # should it have to come back, it comes back where its clients know it
            door.arguments = (*door.arguments, "--port", message.url.rpartition(":")[2])
        self._log.info("requests can be sent", url=message.url)
        if self._ready_file is not None:
            partial = self._ready_file.with_name(f".{self._ready_file.name}.{os.getpid()}")
            partial.write_bytes(msgspec.json.encode({"url": message.url, "endpoint": self._hub.endpoint}))
            partial.replace(self._ready_file)

    def _on_exit(self, child: Child, pid: int, reason: str) -> None:
        peer = self._forget(pid)
        if peer is not None:
            self._decide(PeerGone(peer, f"its process {reason}"))
        self._lending.on_exit(pid, reason)

    def _forget(self, pid: int) -> str | None:
        peer = self._peers.pop(pid, None)
        if peer is not None:
            self._pids.pop(peer, None)
            for key in [key for key in self._failures if key[0] == peer]:
                del self._failures[key]
        return peer

    def _on_hopeless(self, reason: str) -> None:
        self._log.error("cannot go on", reason=reason)
        self._problem = reason
        self._hurry.set()
        self._ended.set()

    def _on_signal(self) -> None:
        if self._ended.is_set():
            self._log.warning("a second signal: not waiting for running requests")
            self._hurry.set()
        self._ended.set()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._decide(Tick())
        self._core.flush()
        loop.call_later(self._configuration.timeouts.heartbeat / 2, self._tick, loop)

    # What goes out -------------------------------------------------------------------------------------------------

    def _decide(self, event: CentralEvent) -> None:
        for command in self._core.handle(asyncio.get_running_loop().time(), event):
            match command:
                case Send(peer, message):
                    self._hub.send(peer, message)
                case Dismiss(peer, reason):
                    self._log.error("a peer was dismissed", peer=peer, reason=reason)
                    if (pid := self._pids.get(peer)) is not None and not self._supervisor.kill(pid):
                        self._forget(pid)  # not ours to end; it is a stranger now
                case Drained():
                    self._drained.set()
                case _:
                    assert_never(command)

    async def _drain(self) -> None:
        """Waits for running requests, no longer than the configuration allows and not after a second signal."""
        if self._problem is not None:
            return
        bound = self._configuration.timeouts.drain
        self._log.info("draining: no new requests are taken", allowed_s=bound)
        self._decide(Drain())
        waits = [asyncio.create_task(event.wait()) for event in (self._drained, self._hurry)]
        done, pending = await asyncio.wait(waits, timeout=bound, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        if not done:
            self._log.warning("requests were still running and are cut off", allowed_s=bound)

    def _ask_to_stop(self) -> None:
        for peer, pid in self._pids.items():
            if self._supervisor.by_pid(pid) is not None:
                self._hub.send(peer, Stop("the scheduler ends"))
