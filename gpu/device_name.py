"""Devices by name. No torch here."""

import re
from dataclasses import dataclass

from forebay.gpu.errors import DeviceError


@dataclass(frozen=True)
class DeviceName:
    """`kind` is "cpu" or "cuda"; several CPU devices may share one machine, as if each were its own."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_device(name: str) -> DeviceName:
    """`"cpu:0"` -> DeviceName("cpu", 0). Raises DeviceError."""
    match = re.fullmatch(r"(cpu|cuda):(0|[1-9][0-9]{0,3})", name)
    if match is None:
        raise DeviceError(f"{name!r} is not a device; write cpu:N or cuda:N with a number N from 0, such as cpu:0")
    return DeviceName(match[1], int(match[2]))
