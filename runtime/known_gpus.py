"""Which GPUs this host has, for the mapping: those of the configuration, and those that NVML lists. It touches none."""

import importlib
import mmap
import os
from collections.abc import Iterable
from typing import Any

from forebay.sched.lending_events import Gpu

CPU_DEVICES = 16
"""Where there is no GPU and no configuration, cpu:0 to cpu:15 are known: whoever tries things out finds enough."""


def known_gpus(devices: Iterable[str]) -> tuple[Gpu, ...]:
    """By physical number; `devices` are the configured ones (`cuda:N`; `cpu:N` counts as N)."""
    known = {gpu.index: gpu for gpu in nvml_gpus()}
    named = list(devices)
    if not named and not known:
        named = [f"cpu:{index}" for index in range(CPU_DEVICES)]
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for device in named:
        index = int(device.partition(":")[2])
        known.setdefault(index, Gpu(index, device, memory if device.startswith("cpu:") else 0))
    return tuple(known[index] for index in sorted(known))


def nvml_gpus() -> list[Gpu]:
    """None where there is no driver, or its Python package (nvidia-ml-py) is not installed."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # whatever keeps it from working: then nobody has told
        return []
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            text = name.decode() if isinstance(name, bytes) else str(name)
            found.append(Gpu(index, text, int(nvml.nvmlDeviceGetMemoryInfo(handle).total)))
        return found
    finally:
        nvml.nvmlShutdown()
