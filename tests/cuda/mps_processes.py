"""Ending MPS daemons that tests started."""

import contextlib
import os
import signal
from pathlib import Path

from forebay.runtime import mps
from forebay.runtime.mps import MpsError


def end_all(folder: Path) -> None:
    """Ends the folder's daemon and its servers, in good order or not."""
    try:
        mps.stop(folder)
    except MpsError as error:
        print(f"ending what is left in {folder}: {error}")
    left = [pid for pid in (mps.running(folder), *mps.servers(folder)) if pid is not None]
    for pid in left:
        print(f"killed: MPS process {pid}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
