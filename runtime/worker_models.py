"""The models of a worker: loads what the scheduler asks for, one after the other, in a thread of their own while steps
of other models go on, and answers each request to load once.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.gpu.device import Device
from forebay.gpu.errors import ModelLoadError
from forebay.gpu.movable import MovableRunner
from forebay.gpu.runner import Runner
from forebay.sched.lane_events import ModelOpened
from forebay.transport.messages import ModelFailed, ModelReady, ModelSpec


class WorkerModels:
    """Made in the event loop, once the device is open. `opened` hears of each model before it may get requests,
    `answer` takes what is for the scheduler; both are called in the loop. Where weights come and go (`movable`) those
    of a model come later, when the lane core says so. `cost_models` are those whose names the cost file has."""

    def __init__(
        self,
        device: Device,
        movable: bool,
        cost_models: set[str],
        opened: Callable[[ModelOpened], None],
        answer: Callable[[ModelReady | ModelFailed], None],
        log: Any,
    ) -> None:
        self._device = device
        self._movable = movable
        self._cost_models = cost_models
        self._opened = opened
        self._answer = answer
        self._log = log
        self.runners: dict[str, Runner] = {}
        self._wanted: set[str] = set()  # models that the present session asked for and has not been answered about
        self._failures: dict[str, str] = {}
        self._to_load: asyncio.Queue[ModelSpec] = asyncio.Queue()
        self._busy = False

    @property
    def loading(self) -> bool:
        """Whether any model is on its way."""
        return self._busy or not self._to_load.empty()

    def want(self, spec: ModelSpec) -> None:
        """The scheduler asks for it: `ModelReady` or `ModelFailed` answers."""
        runner = self.runners.get(spec.name)
        if runner is not None and runner.spec != spec:
            reason = f"this worker holds {runner.spec}, not {spec}; start it again"
            self._answer(ModelFailed(spec.name, reason))
            return
        self._wanted.add(spec.name)
        if runner is None:
            self._to_load.put_nowait(spec)
        else:
            self._ready(runner)

    def forget_wishes(self) -> None:
        """A new session begins, which asks for itself."""
        self._wanted.clear()

    async def run(self) -> None:
        """Loads until it is cancelled. Raises what is not the model's fault: DeviceLost."""
        while True:
            spec = await self._to_load.get()
            if spec.name not in self.runners and spec.name in self._wanted:
                self._busy = True
                await self._load(spec)
                self._busy = False
            if (loaded := self.runners.get(spec.name)) is not None:
                self._ready(loaded)

    async def _load(self, spec: ModelSpec) -> None:
        self._log.info("loading", model=spec.name, path=spec.path, dtype=spec.dtype)
        load = self._device.introduce if self._movable else self._device.load
        try:
            runner: Runner = await asyncio.to_thread(load, spec)
        except ModelLoadError as error:
            self._failed(spec.name, str(error))
            return
        self._failures.pop(spec.name, None)
        self.runners[spec.name] = runner
        self._opened(
            ModelOpened(
                spec.name,
                runner.block_bytes,
                spec.max_sequences,
                spec.step_tokens,
                spec.popularity,
                cost_name="" if spec.name in self._cost_models else Path(spec.path).name,
                weight_bytes=runner.weight_bytes if isinstance(runner, MovableRunner) else 0,
            )
        )

    def _failed(self, model: str, reason: str) -> None:
        # The scheduler may ask again and again, until the cause is gone: people are told once.
        say = self._log.debug if self._failures.get(model) == reason else self._log.error
        self._failures[model] = reason
        say("a model could not be loaded", model=model, error=reason)
        if model in self._wanted:
            self._wanted.remove(model)
            self._answer(ModelFailed(model, reason))

    def _ready(self, runner: Runner) -> None:
        """Says that a model is ready, once, and only to the session that asked for it."""
        name = runner.spec.name
        if name in self._wanted:
            self._wanted.remove(name)
            self._answer(ModelReady(name, runner.max_context, runner.blocks, runner.block_bytes))
