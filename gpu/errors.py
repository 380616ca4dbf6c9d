"""What can go wrong on a device, as types. No torch here: anyone may catch these."""


class DeviceError(Exception):
    """A device name, its settings or its memory cannot be used; the message says what is allowed."""


class ModelLoadError(Exception):
    """A model cannot be served: not found, not readable, not supported, or too large for the pool."""

    def __init__(self, name: str, path: str, reason: str) -> None:
        super().__init__(f"model {name!r} at {path}: {reason}")
        self.name = name
        self.path = path
        self.reason = reason


class StepError(Exception):
    """A step plan or sequence message that breaks the contract of forebay.transport.messages.steps."""
