"""How each of our processes runs its event loop: uvloop where it is installed, and no error goes unseen."""

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


YOUNG_OBJECTS = 10_000
"""Containers made before the garbage collector looks at them; Python's own choice (700) has it look at every request
while it lives, and again when it is older, for nothing: what we make and drop is freed by its reference count."""


def run(main: Coroutine[Any, Any, Result]) -> Result:
    # What was imported stays: it is not looked through again at every full collection (65 ms of every second, measured
    # in a scheduler under 50,000 events/s).
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def on_signals(callback: Callable[[], None]) -> None:
    """SIGTERM and SIGINT call back in the loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback)


class Failure:
    """The first error that no caller saw: a callback's, or a task's. The process ends with it."""

    def __init__(self) -> None:
        self._raised: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(self._handle)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self.set(error)
        else:
            loop.default_exception_handler(context)

    def set(self, error: BaseException) -> None:
        if not self._raised.done():
            self._raised.set_exception(error)

    async def or_done(self, work: Awaitable[Result]) -> Result:
        """The work's result, or the first unseen error."""
        task: asyncio.Future[Result] = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._raised]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._raised.done():
                self._raised.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif not task.cancelled():
                task.exception()
