"""What can go wrong on a device, as types. No torch here: anyone may catch these."""


class DeviceError(Exception):
    """A device name, its settings or its memory cannot be used; the message says what is allowed."""


class DeviceLost(DeviceError):
    """The device is lost to this process, whatever is asked of it: only another process may use it again."""


class ModelLoadError(Exception):
    """A model cannot be served: not found, not readable, not supported, or too large for the pool."""

    def __init__(self, name: str, path: str, reason: str) -> None:
        super().__init__(f"model {name!r} at {path}: {reason}")
        self.name = name
        self.path = path
        self.reason = reason


class StepError(Exception):
    """A step plan or sequence message that breaks the contract of forebay.transport.messages.steps."""


def is_lack(error: BaseException) -> bool:
    """Whether a device had no memory left for something: torch, CUDA and cuBLAS say it each in their way. Nothing is
    broken then, and it may work later."""
    return any(words in str(error) for words in ("out of memory", "OUT_OF_MEMORY", "ALLOC_FAILED"))
