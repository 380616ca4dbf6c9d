"""Starts processes, notices how they end, starts them again, and ends them for good. Decides nothing about requests.

Starting has three outcomes: the process becomes ready (its owner says so), it raises (it exits with EXIT_UNUSABLE: what
it was told cannot work), or it dies. Stopping is ask, wait, kill, join.

EXIT_UNUSABLE gives a process up only as long as it has never worked: then what it was told is wrong. What has worked
can work again (a GPU, an MPS daemon, a file, memory that a neighbour took), and the others go on meanwhile: it is tried
again with growing pauses, for as long as it takes.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forebay.runtime.child import EXIT_UNUSABLE
from forebay.sched.backoff import LONGEST_S, LONGEST_UNUSABLE_S, STABLE_S, restart_delay

DEATHS_BEFORE_READY = 4
"""A process that never became ready is given up after so many deaths."""

UNUSABLE = "what has worked cannot work any more; it is tried again until it can, and the others go on"
"""Logged once, until it works again."""


class Child:
    """One process that is to run: the current instance, if any, and its history."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.module = module
        self.arguments = tuple(arguments)
        self.environment = environment
        self.process: asyncio.subprocess.Process | None = None
        self.deaths = 0
        self.was_ready = False
        self.has_worked = False
        self.unusable = False
        """It has worked, and its last instance could not; whoever reads the log was told what to do."""
        self._ready_at: float | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def heard_of(self) -> bool:
        """Whether the current instance is known to work: then it can be asked to end."""
        return self._ready_at is not None

    def tie(self, descriptor: int) -> None:
        """The current instance lives no longer than this descriptor is open."""
        self._lifeline = descriptor

    def cut(self) -> None:
        """Ends the current instance as if this process had died."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def ready(self) -> None:
        """Its owner has heard from the current instance that it works."""
        self.was_ready = True
        self._ready_at = asyncio.get_running_loop().time()

    def works(self) -> None:
        """The current instance has done what it is for: what it was told cannot be all wrong."""
        self.has_worked = True
        self.unusable = False

    def died(self, unusable: bool) -> float | None:
        """Seconds to wait before it is started again, or None if it is given up."""
        now = asyncio.get_running_loop().time()
        if self._ready_at is not None and now - self._ready_at > STABLE_S:
            self.deaths = 0
            self.works()  # a device without models has nothing to say
        self._ready_at = None
        self.deaths += 1
        if not self.has_worked and (unusable or (not self.was_ready and self.deaths >= DEATHS_BEFORE_READY)):
            return None
        return restart_delay(self.deaths, LONGEST_UNUSABLE_S if unusable else LONGEST_S)


class Supervisor:
    """`on_exit(child, pid, reason)` is called for every end of a process; `on_hopeless(reason)` once, when a child
    cannot be started at all."""

    def __init__(
        self, log: Any, on_exit: Callable[[Child, int, str], None], on_hopeless: Callable[[str], None]
    ) -> None:
        self._log = log
        self._on_exit = on_exit
        self._on_hopeless = on_hopeless
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    def add(
        self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Keeps a process running: `python -m MODULE ARGUMENTS... --parent DESCRIPTOR`. `environment`: variables beside
        this process's own; unlike arguments, other users cannot read them."""
        child = self._children[name] = Child(name, module, arguments, environment or {})
        self._tasks[name] = asyncio.create_task(self._keep_running(child), name=f"supervise {name}")

    def by_pid(self, pid: int) -> Child | None:
        return next((child for child in self._children.values() if child.pid == pid), None)

    async def _keep_running(self, child: Child) -> None:
        while not self._stopping:
            pid, status = await self._run(child)
            reason = describe(status)
            self._on_exit(child, pid, reason)
            if self._ending():
                return
            unusable = status == EXIT_UNUSABLE
            delay = child.died(unusable)
            if delay is None:
                why = "it cannot work as configured" if unusable else f"{child.deaths} times in a row"
                self._on_hopeless(f"{child.name} {reason} ({why}); its last log lines above say more")
                return
            if unusable and not child.unusable:
                child.unusable = True
                self._log.error(UNUSABLE, child=child.name, do="remove what its log line above names", how=reason)
            self._log.warning("a process died and will be started again", child=child.name, how=reason, in_s=delay)
            await asyncio.sleep(delay)

    def _ending(self) -> bool:
        return self._stopping

    async def _run(self, child: Child) -> tuple[int, int]:
        """Runs one instance to its end: (process id, exit status, negative for a signal)."""
        read_end, write_end = os.pipe()
        child.tie(write_end)
        try:
            # A session of its own: Ctrl-C is for the scheduler, which then ends its children in good order.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                child.module,
                *child.arguments,
                "--parent",
                str(read_end),
                pass_fds=(read_end,),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **child.environment},
            )
        except BaseException:
            child.cut()
            raise
        finally:
            os.close(read_end)
        child.process = process
        self._log.info("started", child=child.name, pid=process.pid)
        try:
            return process.pid, await process.wait()
        finally:
            child.cut()
            if process.returncode is None:  # we were cancelled: it goes, and is joined by the loop's child watcher
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            child.process = None

    def kill(self, pid: int) -> bool:
        """Ends a process that no longer answers; it is started again as after any death. False if it is not ours."""
        child = self.by_pid(pid)
        if child is None or child.process is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGKILL)
        return True

    async def stop(self, ask: Callable[[], None], grace_s: float) -> None:
        """Asks all processes to end, waits that long, kills what is left, and joins everything."""
        self._stopping = True
        ask()
        for child in self._children.values():
            if not child.heard_of:
                child.cut()  # it could not be asked; it has nothing to lose yet
        running = [task for name, task in self._tasks.items() if self._children[name].process is not None]
        if running:
            await asyncio.wait(running, timeout=grace_s)
        for child in self._children.values():
            if child.pid is not None:
                self._log.warning("killed: it did not end in time", child=child.name, pid=child.pid, allowed_s=grace_s)
                self.kill(child.pid)
        for task in self._tasks.values():
            if not task.done() and task not in running:
                task.cancel()  # it only waits to start something again
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def describe(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"exited with status {status}"
