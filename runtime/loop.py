"""How each of our processes runs its event loop: uvloop where it is installed, and no error goes unseen."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
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
