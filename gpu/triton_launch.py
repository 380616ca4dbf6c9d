"""Launches Triton kernels again and again at little cost to the host.

A step launch by launch calls over a hundred of them, and Triton looks at every argument of every call: what kind it
is, whether 16 divides it, where the pointer belongs, which asks the driver. Here that is done once for each
combination; later calls hand addresses to the compiled kernel as they are.
"""

from functools import cache
from typing import Any

import torch

KNOWN_TRITON = ("3.6.",)
"""Versions whose compiled kernels are called as here. With any other every launch is Triton's own."""

_ALIGNMENT = 16
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
    pdl: bool,
) -> None:
    """Launches `kernel` in the current stream of the tensors' device, which must be the current one. Its parameters are
    `tensors`, then `numbers`, then `constants` in the order of its signature. Nothing that depends on the step may be
    among `numbers` and `constants`: what was compiled for each combination is kept."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    device = tensors[0].get_device()
    kinds = tuple([tensor.dtype for tensor in tensors])
    key = (id(kernel), device, num_warps, pdl, numbers, tuple(constants.values()), kinds)
    compiled = _compiled.get(key)
    bits = 0
    for address in addresses:
        bits |= address
    if compiled is None or bits % _ALIGNMENT:
        options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        made = kernel[grid](*tensors, *numbers, **constants, num_warps=num_warps, **options)
        if made is not None and not bits % _ALIGNMENT and _known():
            _compiled[key] = made
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        grid[0], grid[1], 1, stream, compiled.function, compiled.packed_metadata,
        None, None, None, *addresses, *numbers, *constants.values(),
    )  # fmt: skip


@cache
def _known() -> bool:
    import triton

    return bool(triton.__version__.startswith(KNOWN_TRITON))
