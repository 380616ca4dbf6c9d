"""A thread with an event loop of its own, for objects that are used from plain threads as well as from asyncio."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

from forebay.runtime.lending_errors import Closed

# An app's own logging decides what becomes of these lines; a library must not configure it.
log = logging.getLogger("forebay.lending")

Result = TypeVar("Result")
Given = ParamSpec("Given")


MOVERS = 3
"""Threads that move memory of different slots at once: while one maps what it has copied, the link is another's."""


class Background:
    """A few threads: the loop (never blocks), one for work on memory (zeroing, mapping, copying), `MOVERS` for moves
    that must be over soon, and one for the callbacks of whoever uses the object, which may take their time and may call
    the object again."""

    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        self._work = ThreadPoolExecutor(1, thread_name_prefix=f"{name} memory")
        self._movers = ThreadPoolExecutor(MOVERS, thread_name_prefix=f"{name} moves")
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix=f"{name} callbacks")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def name(self) -> str:
        return self._thread.name

    @property
    def closed(self) -> bool:
        """Also while it closes."""
        return self._closed

    def start(
        self, coroutine: Coroutine[Any, Any, Result], undo: Callable[[Result], object] | None = None
    ) -> "concurrent.futures.Future[Result]":
        """Runs a coroutine in the loop, from any other thread. A future that is cancelled cancels it; where it had
        ended by then, `undo` is called in the loop with its result. Raises Closed."""
        if self._closed:
            coroutine.close()
            raise Closed(f"{self._thread.name} is closed; make a new one")
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(self._begin, coroutine, future, undo)
        return future

    def _begin(
        self,
        coroutine: Coroutine[Any, Any, Result],
        future: "concurrent.futures.Future[Result]",
        undo: Callable[[Result], object] | None,
    ) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)

        def ended(done: "asyncio.Task[Result]") -> None:
            self._tasks.discard(done)
            if done.cancelled():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                error = done.exception()
                if error is None:
                    future.set_result(done.result())
                else:
                    future.set_exception(error)
            elif done.exception() is None and undo is not None:
                undo(done.result())

        task.add_done_callback(ended)
        future.add_done_callback(lambda given: self.post(task.cancel) if given.cancelled() else None)

    async def wait(
        self, coroutine: Coroutine[Any, Any, Result], undo: Callable[[Result], object] | None = None
    ) -> Result:
        """The same, for another event loop to await."""
        future = self.start(coroutine, undo)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(lambda done: self._undo(done, undo))
            raise

    def _undo(self, done: "concurrent.futures.Future[Result]", undo: Callable[[Result], object]) -> None:
        """The result was there when its waiter was cancelled."""
        if not done.cancelled() and done.exception() is None:
            self.post(undo, done.result())

    def run(self, coroutine: Coroutine[Any, Any, Result], undo: Callable[[Result], object] | None = None) -> Result:
        """The same, and waits for its result. With `undo` it is given up where the wait is interrupted (Ctrl-C). Not
        from the loop itself, which would wait for ever."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "a blocking method was called in the library's own event loop; use its async counterpart"
            )
        future = self.start(coroutine, undo)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Closed(f"{self._thread.name} was closed meanwhile") from None
        except BaseException:
            if undo is not None and not future.cancel():
                self._undo(future, undo)  # a signal's handler raised when the result was there
            raise

    def run_first(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs the coroutine that makes what lives in the loop; where it raises, everything is closed."""
        try:
            return self.run(coroutine)
        except BaseException:
            self.close(_nothing())
            raise

    def post(self, function: Callable[Given, object], *given: Given.args, **named: Given.kwargs) -> None:
        """Calls a function in the loop soon, from any thread; not once it is closed."""
        with contextlib.suppress(RuntimeError):  # of a loop that was closed just now
            if not self._closed:
                self.loop.call_soon_threadsafe(lambda: function(*given, **named))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In the loop: goes on by itself until it ends or the object is closed."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: a task failed", self._thread.name, exc_info=error)

    async def work(self, function: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """Runs a function in the thread for work on memory, one at a time, in order. It is never left half done: a
        caller that is cancelled waits for it."""
        return await self.whole(self._work, function, *given, **named)

    async def move(self, function: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """The same in one of the threads for moves, several at a time."""
        return await self.whole(self._movers, function, *given, **named)

    async def whole(
        self,
        threads: ThreadPoolExecutor,
        function: Callable[Given, Result],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Result:
        """The same in threads of somebody's own."""
        job = self.loop.run_in_executor(threads, lambda: function(*given, **named))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if not job.cancelled():
                await asyncio.wait([job])
            raise

    async def call(self, function: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """Runs somebody's callback in its thread, one at a time, in order."""
        return await self.loop.run_in_executor(self._callbacks, lambda: function(*given, **named))

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Runs the last coroutine, then ends tasks, loop and threads. Closing twice is fine."""
        if self._closed:
            last.close()
            return
        self._closed = True
        ours = threading.current_thread()
        try:
            asyncio.run_coroutine_threadsafe(self._end(last), self.loop).result()
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self._work.shutdown()
            self._movers.shutdown()
            # A callback may close the object that called it; it cannot wait for itself.
            self._callbacks.shutdown(wait=not ours.name.startswith(f"{self._thread.name} callbacks"))
            self.loop.close()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last
        # Here, since the thread that closes may be in the middle of a loop of its own.
        await self.loop.shutdown_asyncgens()
        await asyncio.sleep(0)  # what was sent in this turn goes out


async def _nothing() -> None:
    pass


def close_at_exit(thing: "Closes") -> Callable[[], None]:
    """Closes it when the interpreter ends, unless it is gone by then. Call what is returned once it is closed."""
    reference = weakref.ref(thing)

    def close() -> None:
        if (living := reference()) is not None:
            living.close()

    atexit.register(close)
    return lambda: atexit.unregister(close)


class Closes(Protocol):
    def close(self) -> None: ...


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
