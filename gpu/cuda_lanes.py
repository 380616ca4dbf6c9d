"""The lanes of one CUDA device, and the streams that they and captured graphs run on."""

import threading
from collections.abc import Callable

import torch

from forebay.gpu.cuda_driver import CudaContext
from forebay.gpu.cuda_lane import CudaLane
from forebay.gpu.cuda_partition import Partitions
from forebay.transport.messages.steps import LaneKind


class CudaLanes:
    """Decodes have a lane for each model; prefills, and steps that are mixed, one for all. All of it from any thread.
    Raises DeviceError."""

    def __init__(self, device: torch.device, context: CudaContext) -> None:
        self._device = device
        self._context = context
        self._making = threading.Lock()
        self._lanes: dict[str, CudaLane] = {}
        self._spare: dict[bool, list[torch.cuda.Stream]] = {False: [], True: []}
        self._whole = Partitions(context, ())
        self._parts = [self._whole]

    def lane(self, kind: LaneKind, model: str) -> CudaLane:
        key = _key(kind, model)
        with self._making:
            if key not in self._lanes:
                self._lanes[key] = CudaLane(f"{self._context.device} {key}", self._device, self._streams_of(kind))
            return self._lanes[key]

    def _streams_of(self, kind: LaneKind) -> Callable[[int], torch.cuda.Stream]:
        return lambda share: self.stream(kind, share)

    def stream(self, kind: LaneKind, share: int = 0) -> torch.cuda.Stream:
        """A stream of its own, not one of torch's, which it hands out again and again: a graph is captured on a stream
        that is nobody else's. For a share of the SMs, in per cent, which is split off when it is first asked for; 0:
        all. Streams of decodes, and graphs captured on them, are urgent: beside a prefill, whose launches fill all SMs
        for long, a decode step of many small ones would come through once in many times its own length (measured: 86 ms
        a step of 8)."""
        urgent = kind == "decode"
        with self._making:
            partitions = self._whole
            if share in (0, 100):
                if self._spare[urgent]:  # cuBLAS keeps 32 MiB for every stream that it ever worked on
                    return self._spare[urgent].pop()
            else:
                found = next((parts for parts in self._parts if share in parts.shares), None)
                if found is None:
                    found = Partitions(self._context, (share,))
                    self._parts.append(found)
                partitions = found
            return torch.cuda.ExternalStream(partitions.stream(share, urgent=urgent), device=self._device)

    def give_back(self, kind: LaneKind, stream: torch.cuda.Stream) -> None:
        """A stream for all SMs on which nothing runs any more."""
        with self._making:
            self._spare[kind == "decode"].append(stream)

    def wait(self, model: str) -> None:
        """Until the steps of a model that were launched so far have landed."""
        with self._making:
            keys = (_key("mixed", model), _key("prefill", model), _key("decode", model))
            lanes = [self._lanes[key] for key in keys if key in self._lanes]
        for lane in lanes:
            lane.call(lambda: None)

    def end_model(self, model: str) -> None:
        """Closes what it has to itself, after its steps so far."""
        with self._making:
            lane = self._lanes.pop(_key("decode", model), None)
        if lane is not None:
            lane.close()
            if (stream := lane.whole_stream) is not None:
                self.give_back("decode", stream)

    def end_lanes(self) -> None:
        """Closes all lanes, after their steps so far; graphs may go then, and after them `close`."""
        with self._making:
            lanes = list(self._lanes.values())
            self._lanes.clear()
        for lane in lanes:
            lane.close()

    def close(self) -> None:
        """Destroys the streams."""
        self.end_lanes()
        while self._parts:
            self._parts.pop().close()


def _key(kind: LaneKind, model: str) -> str:
    return f"decode {model}" if kind == "decode" else kind
