"""A worker one of whose steps makes a real error that CUDA cannot recover from: before it a kernel writes to an address
that nobody has. Run as `python -m tests.cuda.sticky_worker STEP ARGUMENTS...`, arguments as of runtime.worker."""

import sys
from concurrent.futures import Future

from forebay.gpu.cuda_runner import CudaRunner
from forebay.runtime import worker
from forebay.transport.messages import StepDone, StepPlan


def write_nowhere() -> None:
    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void nowhere(long long* at) { *at = 1; }', "nowhere")
    kernel((1,), (1,), (cupy.int64(0x10),))


def main() -> int:
    at = int(sys.argv[1])
    launch = CudaRunner.launch
    spoiled = False

    def spoil(runner: CudaRunner, plan: StepPlan) -> "Future[StepDone]":
        nonlocal spoiled
        if plan.step >= at and not spoiled:
            spoiled = True
            write_nowhere()
        return launch(runner, plan)

    CudaRunner.launch = spoil  # type: ignore[method-assign]
    return worker.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
