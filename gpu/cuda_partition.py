"""Parts of a GPU's SMs: green contexts, whose streams run on their part alone.

A green context shares memory, modules and everything else with the device's primary context; torch uses its streams as
`torch.cuda.ExternalStream(partitions.stream(share))`. Each split cuts the whole device in two, and splits overlap: a
step on 48 % and one on 67 % use the same SMs.
"""

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.errors import DeviceError

MOST_SPLITS = 3
"""Each is two contexts, and every one of them takes device memory and time to set up."""

FIRST_DRIVER = 12040
"""CUDA version from which drivers know green contexts."""


class _Part(NamedTuple):
    share: int
    sms: int
    context: Any


class Partitions:
    """Splits of one device by the shares that they give to their first part, in per cent: the rest is a part, too. So
    `Partitions(context, (55, 61, 48))` has streams for 55, 45, 61, 39, 48 and 52. Whole groups of SMs only (8 on an
    H200): `sms(share)` tells what it came to. Raises DeviceError for a share that is none, for more than three splits,
    and where the driver has no green contexts or too little memory; then nothing is left behind."""

    def __init__(self, context: CudaContext, splits: Sequence[int]) -> None:
        self.context = context
        self._parts: dict[int, _Part] = {}
        self._undo = contextlib.ExitStack()
        if len(splits) > MOST_SPLITS or len({*splits, *(100 - share for share in splits)}) < 2 * len(splits):
            raise DeviceError(
                f"{context.device}: the splits are {list(splits)}; at most {MOST_SPLITS} are possible, no two alike or "
                "each other's rest, none in halves"
            )
        for share in splits:
            if not 0 < share < 100:
                raise DeviceError(f"{context.device}: a split of {share} % is none; 1 to 99 are allowed")
        with contextlib.ExitStack() as undo:
            with context.current() as driver:
                if not splits:
                    self.total = context.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
                    return
                version = int(context.call(driver.cuDriverGetVersion()))
                if version < FIRST_DRIVER:
                    raise DeviceError(
                        f"{context.device}: its driver is for CUDA {version // 1000}.{version % 1000 // 10}; SMs can "
                        "be split from 12.4 on. Use partition streams or none"
                    )
                kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
                whole = context.call(driver.cuDeviceGetDevResource(context.handle, kind))
                self.total = int(whole.sm.smCount)
                for share in splits:
                    self._split(driver, whole, share, undo)
            self._undo = undo.pop_all()

    def _split(self, driver: Any, whole: Any, share: int, undo: contextlib.ExitStack) -> None:
        call, device = self.context.call, self.context.device
        unit = max(1, int(whole.sm.smCoscheduledAlignment))
        smallest = max(unit, int(whole.sm.minSmPartitionSize))
        wanted = max(smallest, round(self.total * share / 100 / unit) * unit)
        groups, count, rest = call(driver.cuDevSmResourceSplitByCount(1, whole, 0, wanted))
        if int(count) != 1 or not int(rest.sm.smCount):
            raise DeviceError(
                f"{device}: its {self.total} SMs cannot be split into {wanted} ({share} %) and a rest; parts have "
                f"multiples of {unit}, at least {smallest}"
            )
        for part, resource in ((share, groups[0]), (100 - share, rest)):
            descriptor = call(driver.cuDevResourceGenerateDesc([resource], 1))
            flags = int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
            green = call(driver.cuGreenCtxCreate(descriptor, self.context.handle, flags))
            undo.callback(driver.cuGreenCtxDestroy, green)
            self._parts[part] = _Part(part, int(resource.sm.smCount), green)

    @property
    def shares(self) -> list[int]:
        """For which there are streams besides the whole device."""
        return sorted(self._parts)

    def sms(self, share: int) -> int:
        """How many SMs a share is; 0 and 100: all. Raises DeviceError for a share that was not split off."""
        return self.total if share in (0, 100) else self._part(share).sms

    def stream(self, share: int = 0, *, urgent: bool = False) -> int:
        """A new stream that keeps to a share of the SMs (0 and 100: all), for `torch.cuda.ExternalStream`; `urgent` as
        in CudaContext.stream. It does not wait for the default stream, and lives until these partitions are closed.
        Raises DeviceError for a share that was not split off."""
        if self.context.closed:
            raise DeviceError(f"the partitions of {self.context.device} are closed")
        if share in (0, 100):
            stream = self.context.stream(urgent=urgent)
        else:
            part = self._part(share)
            with self.context.current() as driver:
                least, greatest = self.context.call(driver.cuCtxGetStreamPriorityRange())
                flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
                stream = self.context.call(
                    driver.cuGreenCtxStreamCreate(part.context, flags, int(greatest if urgent else least))
                )
        self._undo.callback(self.context.driver.cuStreamDestroy, stream)
        return int(stream)

    def _part(self, share: int) -> _Part:
        if share not in self._parts:
            raise DeviceError(
                f"{self.context.device} has no part of {share} % of its SMs; it was split into "
                f"{', '.join(map(str, self.shares)) or 'none'} (0: all)"
            )
        return self._parts[share]

    def close(self) -> None:
        """Destroys streams, then contexts; call it when nothing runs in them. Closing twice is fine."""
        if self.context.closed:
            self._undo.pop_all()  # the device took all of it along
            return
        with self.context.current():
            self._undo.close()
        self._parts.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
