"""Every decision, pure: no asyncio, no sockets, no torch, no clock, no randomness.

`handle(now, event) -> commands` is the whole interface of a core. Three cores live here: the central one (admission,
routing) and the lending one (who has whose memory), in the scheduler process, and the lane one, in each worker
(batching between steps).

Seen from a checkout's root this folder shadows the standard library's module `sched`, so its two names are handed
on, on demand.
"""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("scheduler", "Event"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    spec = importlib.util.spec_from_file_location("_standard_sched", Path(sysconfig.get_path("stdlib"), "sched.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
