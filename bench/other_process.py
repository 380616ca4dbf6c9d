"""The second process of a measurement: it runs one coroutine, and never outlives the first."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from forebay.runtime.child import end_with_parent
from forebay.runtime.loop import run

Target = Callable[..., Any]


class OtherProcess:
    """The other process of a measurement."""

    def __init__(self, target: Target, *arguments: Any) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=_in_loop, args=(target, *arguments))

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _in_loop(target: Target, *arguments: Any) -> None:
    end_with_spawner()
    run(target(*arguments))


def end_with_spawner() -> None:
    """In a process that multiprocessing has spawned: it ends when the one that spawned it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.sentinel)
