"""What a process of ours that another one started does: it ends with its parent, and says why it could not start."""

import os
import threading
import time

EXIT_UNUSABLE = 78
"""Exit status (EX_CONFIG) of a process that cannot work as it was told to: starting it again does not help before
something outside it changes."""

EXIT_BROKEN = 70
"""Exit status (EX_SOFTWARE) of a worker whose device broke down under it: started again, it may work."""

EXIT_ORPHANED = 79
"""Exit status of a process whose parent is gone."""


def end_with_parent(descriptor: int) -> None:
    """Ends this process at once when the other end of the pipe `descriptor` closes, which it does however the parent
    dies. A thread of its own waits there: the event loop may be busy."""

    def wait() -> None:
        while True:
            try:
                if not os.read(descriptor, 1):
                    os._exit(EXIT_ORPHANED)
            except InterruptedError:
                continue

    threading.Thread(target=wait, name="parent", daemon=True).start()


def exit_soon(status: int, grace_s: float = 3.0) -> None:
    """Ends this process with that status after so many seconds, whatever its threads are stuck in."""

    def end() -> None:
        time.sleep(grace_s)
        os._exit(status)

    threading.Thread(target=end, name="exit soon", daemon=True).start()
