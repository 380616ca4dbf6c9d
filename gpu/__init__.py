"""The only place that knows torch and CUDA: devices, memory, block pools, model runners."""
