"""An MPS daemon for the time of a measurement (runtime/mps.py), in a folder of its own."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from forebay.bench.errors import BenchError
from forebay.runtime import mps


@asynccontextmanager
async def mps_daemon(device: str) -> AsyncIterator[dict[str, str]]:
    """The environment of its clients. Raises BenchError if it cannot be started, and where it does not end."""
    if not device.startswith("cuda"):
        raise BenchError(f"skipped: MPS is a service for CUDA devices, this is {device}")
    with tempfile.TemporaryDirectory(prefix="fb-mps-") as name:
        folder = Path(name)
        try:
            await asyncio.to_thread(mps.start, folder)
            try:
                yield mps.environment(folder)
            finally:
                await asyncio.to_thread(mps.stop, folder)
        except mps.MpsError as error:
            raise BenchError(str(error)) from error
