"""All that a worker has once the scheduler has told it what its device is for: opened in one go, closed in one go."""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.gpu.device import Device, open_device
from forebay.gpu.errors import DeviceLost
from forebay.runtime import mps
from forebay.runtime.keyring import CREDENTIAL_VARIABLE
from forebay.runtime.recording import Header, Recorder, make_lane_core
from forebay.runtime.worker_memory import WorkerMemory, lane_settings
from forebay.runtime.worker_models import WorkerModels
from forebay.runtime.worker_weights import WeightMover
from forebay.sched.lane_events import LaneCommand, LaneEvent, ModelOpened
from forebay.transport.messages import PROTOCOL_VERSION, DeviceSettings, ModelFailed, ModelReady


@dataclass(frozen=True, eq=False)
class WorkerDevice:
    """`core` decides for the device. `weights` is there where weights come and go."""

    settings: DeviceSettings
    device: Device
    memory: WorkerMemory
    core: Recorder[LaneEvent, LaneCommand]
    models: WorkerModels
    weights: WeightMover | None

    @property
    def ticks(self) -> bool:
        """Whether the core wants to hear that time passes."""
        return self.memory.ticks or self.weights is not None

    async def close(self) -> None:
        """After what was launched so far."""
        if self.weights is not None:
            await asyncio.to_thread(self.weights.close)
        await asyncio.to_thread(self.memory.close)
        self.device.close()
        if self.weights is not None:
            await asyncio.to_thread(self.weights.give_back)


def open_worker_device(
    gpu: str,
    scheduler: str,
    journal: Path | None,
    settings: DeviceSettings,
    decide: Callable[[LaneEvent], None],
    answer: Callable[[ModelReady | ModelFailed], None],
    lost: Callable[[DeviceLost], None],
    log: Any,
) -> WorkerDevice:
    """In the worker's event loop, in which `decide` takes events for the core, `answer` what models have to say to the
    scheduler, and `lost` that the device is beyond repair. Raises DeviceError, MpsError, OSError, ValueError (settings
    that no core can have)."""
    mps.require()
    credential = os.environ.get(CREDENTIAL_VARIABLE, "")
    with ExitStack() as undo:
        device = open_device(gpu, settings)
        undo.callback(device.close)
        lane = lane_settings(settings, divisible=device.name.kind == "cuda")
        core = make_lane_core(lane)
        memory = WorkerMemory(gpu, scheduler, device, settings, credential, decide, log)
        undo.callback(memory.close)

        def opened(event: ModelOpened) -> None:
            memory.open_model(event.model, event.block_bytes)
            decide(event)

        named = {row.model for row in lane.costs}
        models = WorkerModels(device, settings.weights_memory > 0, named, opened, answer, log)
        weights = None
        if settings.weights_memory:
            weights = WeightMover(device, settings, scheduler, credential, decide, lost, log)
            undo.callback(weights.close)
        recorder = Recorder(core, Header(PROTOCOL_VERSION, f"lane-{gpu}-{os.getpid()}", lane), journal)
        undo.pop_all()
    return WorkerDevice(settings, device, memory, recorder, models, weights)
