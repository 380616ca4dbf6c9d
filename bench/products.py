"""Matrix products that keep a device busy while something else is measured: bf16 on a GPU, float32 on the CPU."""

import threading
import time
from types import TracebackType

import torch

GPU_SIDE = 8192
CPU_SIDE = 1024
WARM_UP = 3


class Products:
    """Runs products on `device` from entry to exit of its `with` block; `rate` is then their number a second."""

    def __init__(self, device: str) -> None:
        kind, index = device.split(":")
        self._place = torch.device("cuda", int(index)) if kind == "cuda" else torch.device("cpu")
        side, dtype = (GPU_SIDE, torch.bfloat16) if kind == "cuda" else (CPU_SIDE, torch.float32)
        # Random ones: a GPU multiplies zeros faster.
        self._left = torch.randn(side, side, dtype=dtype, device=self._place)
        self._right = torch.randn(side, side, dtype=dtype, device=self._place)
        self._out = torch.empty_like(self._left)
        self._stop = threading.Event()
        self._warm = threading.Event()
        self._thread: threading.Thread | None = None
        self.rate = 0.0
        """A second."""

    def __enter__(self) -> "Products":
        self._stop.clear()
        self._warm.clear()
        self._thread = threading.Thread(target=self._run, name="products")
        self._thread.start()
        if not self._warm.wait(60):
            raise RuntimeError("the first products took more than 60 s")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        if self._place.type == "cuda":
            self._run_on_gpu()
            return
        for _ in range(WARM_UP):
            torch.mm(self._left, self._right, out=self._out)
        self._warm.set()
        begin, count = time.perf_counter(), 0
        while not self._stop.is_set() or not count:
            torch.mm(self._left, self._right, out=self._out)
            count += 1
        self.rate = count / (time.perf_counter() - begin)

    def _run_on_gpu(self) -> None:
        """Always a few products ahead of the GPU, timed by its own clock."""
        with torch.cuda.device(self._place):
            torch.cuda.current_stream().synchronize()  # this thread's first call: it takes up the context
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    torch.mm(self._left, self._right, out=self._out)
                stream.synchronize()
                events = [self._product()]
                self._warm.set()
                while not self._stop.is_set() or len(events) < WARM_UP:
                    events.append(self._product())
                    if len(events) > 8:
                        events[-8].synchronize()
                stream.synchronize()
                milliseconds = events[0].elapsed_time(events[-1])
        self.rate = 1000 * (len(events) - 1) / milliseconds

    def _product(self) -> torch.cuda.Event:
        torch.mm(self._left, self._right, out=self._out)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
