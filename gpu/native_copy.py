"""One call that copies many pieces of host memory without the interpreter's lock.

Nothing in libc, numpy or torch copies a list of pieces from anywhere to anywhere in one call (process_vm_readv does, at
half the speed of memcpy), and a call from Python for each piece costs as much as 4 KiB and takes the lock back each
time. So on x86-64 Linux a small loop stands here as machine code. It writes past the caches, as memcpy does for large
areas: a piece of a spill is not read again soon, and a line that is written whole need not be read first. Elsewhere,
and where the system allows no such memory, memmove is called for each piece.

    endbr64                     # rdi, rsi, rdx: arrays of destinations, sources, sizes; rcx: their length
    mov r8, rdi
    mov r9, rsi
    mov r10, rcx
  next:
    sub r10, 1
    jc done
    mov rdi, [r8]
    mov rsi, [r9]
    mov rcx, [rdx]
    add r8, 8
    add r9, 8
    add rdx, 8
    test dil, 15                # movntdq needs a destination at a multiple of 16
    jnz rest
    sub rcx, 64
    jc less
  lines:
    prefetchnta [rsi + 512]     # never faults, also beyond the end
    movdqu xmm0, [rsi]
    movdqu xmm1, [rsi + 16]
    movdqu xmm2, [rsi + 32]
    movdqu xmm3, [rsi + 48]
    movntdq [rdi], xmm0
    movntdq [rdi + 16], xmm1
    movntdq [rdi + 32], xmm2
    movntdq [rdi + 48], xmm3
    add rsi, 64
    add rdi, 64
    sub rcx, 64
    jnc lines
  less:
    add rcx, 64
  rest:
    rep movsb
    jmp next
  done:
    sfence
    ret
"""

import ctypes
import functools
import mmap
import platform
import sys
from collections.abc import Callable

import numpy as np

from forebay.gpu.pieces import Pieces

MACHINE_CODE = bytes.fromhex(
    "f30f1efa4989f84989f14989ca4983ea017264498b38498b31488b0a4983c0084983c1084883c20840f6c70f75454883e940"
    "723b0f188600020000f30f6f06f30f6f4e10f30f6f5620f30f6f5e30660fe707660fe74f10660fe75720660fe75f304883c6"
    "404883c7404883e94073c54883c140f3a4eb960faef8c3"
)
"""What `as` makes of the listing above (a test assembles it where there is an assembler)."""

SINGLE_BYTES = 128 << 10
"""Below this one memmove is quicker than the loop, which takes 7 microseconds to call and to fill no cache."""

_COPY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)


def copy_pieces(pieces: Pieces) -> None:
    """Copies every piece; they must not overlap."""
    native = _native()
    if native is None or (len(pieces) == 1 and int(pieces.sizes[0]) < SINGLE_BYTES):
        memmove_pieces(pieces)
    elif len(pieces):
        native(pieces)


def memmove_pieces(pieces: Pieces) -> None:
    """The same with one call of memmove for each piece."""
    for target, source, size in zip(
        pieces.destinations.tolist(), pieces.sources.tolist(), pieces.sizes.tolist(), strict=True
    ):
        _libc.memmove(target, source, size)


_libc = ctypes.CDLL(None)
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = ctypes.c_void_p


@functools.cache
def _native() -> Callable[[Pieces], None] | None:
    """None where the machine code does not run."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
        memory.write(MACHINE_CODE)
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view)
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
            return None
    except OSError:
        return None
    function = _COPY(address)

    def copy(pieces: Pieces, _memory: ctypes.c_char = view) -> None:
        arrays = [np.ascontiguousarray(array) for array in (pieces.destinations, pieces.sources, pieces.sizes)]
        # Half of what `array.ctypes.data` takes.
        function(*(array.__array_interface__["data"][0] for array in arrays), len(pieces))

    return copy
