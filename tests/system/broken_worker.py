"""A worker whose device breaks down in mid-work, as one with a sticky CUDA error does: every step from the given one on
raises DeviceError. Run as `python -m tests.system.broken_worker STEP ARGUMENTS...`, arguments as of runtime.worker."""

import sys
from concurrent.futures import Future

from forebay.gpu.errors import DeviceError
from forebay.gpu.runner import ModelRunner
from forebay.runtime import worker
from forebay.transport.messages import StepDone, StepPlan


def main() -> int:
    last = int(sys.argv[1])
    launch = ModelRunner.launch

    def break_down(runner: ModelRunner, plan: StepPlan) -> "Future[StepDone]":
        if plan.step < last:
            return launch(runner, plan)
        future: Future[StepDone] = Future()
        future.set_exception(DeviceError("cuda:0: CUDA_ERROR_ILLEGAL_ADDRESS: the device is unusable"))
        return future

    ModelRunner.launch = break_down  # type: ignore[method-assign]
    return worker.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
