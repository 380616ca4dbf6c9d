"""One suite for every kind of device memory: slabs, their ranges, and their journey to another process.

A CUDA memory joins by being added to `KINDS`, with its own ways to write and read bytes.
"""

import ctypes
import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.gpu.errors import DeviceError
from forebay.gpu.memory import PAGE_BYTES, Slab, SlabRange

SLAB = 4 * PAGE_BYTES


class MemfdKind:
    slab = Slab
    range = SlabRange

    @staticmethod
    def write(address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    @staticmethod
    def read(address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)


KINDS = [MemfdKind]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest):
    return request.param


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Addresses in use by slabs, in bytes."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "forebay-slab" in line:
            first, last = line.split()[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES


def test_slabs_lie_side_by_side_and_keep_their_bytes(kind) -> None:
    with kind.range(SLAB, 3) as places, kind.slab(SLAB) as first, kind.slab(SLAB) as second:
        places.map(1, first)
        places.map(2, second)
        middle = places.base + 2 * SLAB
        assert kind.read(places.base + SLAB, 2 * SLAB) == bytes(2 * SLAB)
        kind.write(middle - 3, b"across")
        assert kind.read(middle - 3, 6) == b"across"
        places.unmap(1)
        places.map(0, first)
        assert kind.read(places.base + SLAB - 3, 3) == b"acr"
        assert places.mapped == {0, 2}


def test_one_slab_in_two_places_is_the_same_memory(kind) -> None:
    with kind.range(SLAB, 2) as here, kind.range(SLAB, 1) as there, kind.slab(SLAB) as slab:
        here.map(1, slab)
        there.map(0, slab)
        kind.write(here.base + SLAB + 10, b"shared")
        assert kind.read(there.base + 10, 6) == b"shared"


def test_a_mapping_outlives_the_slab_handle(kind) -> None:
    with kind.range(SLAB, 1) as places:
        slab = kind.slab(SLAB)
        places.map(0, slab)
        slab.close()
        slab.close()
        assert slab.closed
        kind.write(places.base, b"alive")
        assert kind.read(places.base, 5) == b"alive"
        with pytest.raises(DeviceError, match="closed"):
            slab.fileno()


def test_a_buffer_outlives_the_range(kind) -> None:
    places = kind.range(SLAB, 1)
    with kind.slab(SLAB) as slab:
        places.map(0, slab)
    before = mappings()
    buffer = places.buffer()
    places.close()
    places.close()
    buffer[0:4] = b"kept"
    assert bytes(buffer[0:4]) == b"kept"
    assert mappings() == before
    del buffer
    assert mappings() == before - SLAB
    with pytest.raises(DeviceError, match="closed"):
        places.buffer()


def test_nothing_is_left_after_many_cycles(kind) -> None:
    def cycle() -> None:
        with kind.range(SLAB, 8) as places:
            slabs = [kind.slab(SLAB) for _ in range(8)]
            for slot, slab in enumerate(slabs):
                places.map(slot, slab)
            places.unmap(3)
            for slab in slabs:
                slab.close()

    cycle()
    gc.collect()
    before = descriptors(), mappings(), address_space()
    for _ in range(200):
        cycle()
    assert (descriptors(), mappings()) == before[:2]
    assert address_space() - before[2] < 20 * 8 * SLAB


def test_the_leak_gate_sees_a_planted_leak(kind) -> None:
    before = descriptors(), mappings()
    places, slab = kind.range(SLAB, 1), kind.slab(SLAB)
    places.map(0, slab)
    assert (descriptors(), mappings()) == (before[0] + 1, before[1] + SLAB)
    slab.close()
    places.close()
    assert (descriptors(), mappings()) == before


def test_forgotten_handles_give_their_memory_back(kind) -> None:
    before = descriptors(), mappings()
    places, slab = kind.range(SLAB, 1), kind.slab(SLAB)
    places.map(0, slab)
    del places, slab
    gc.collect()
    assert (descriptors(), mappings()) == before


def test_wrong_use_is_refused_and_changes_nothing(kind) -> None:
    with kind.range(SLAB, 2) as places, kind.slab(SLAB) as slab, kind.slab(2 * SLAB) as large:
        places.map(0, slab)
        for call, problem in (
            (lambda: places.map(0, slab), "slot 0 already holds a slab"),
            (lambda: places.map(2, slab), r"slot 2 is outside 0\.\.1"),
            (lambda: places.map(1, large), f"{2 * SLAB} bytes does not fit slots of {SLAB}"),
            (lambda: places.unmap(1), "slot 1 holds no slab"),
            (lambda: kind.slab(1000), f"slab_bytes is 1000; it must be a positive multiple of {PAGE_BYTES}"),
            (lambda: kind.range(SLAB, 0), "at least one slot"),
        ):
            before = descriptors()
            with pytest.raises(DeviceError, match=problem):
                call()
            assert descriptors() == before
        assert places.mapped == {0}


def test_mapping_that_the_system_refuses_leaves_nothing_behind(kind) -> None:
    before = descriptors(), mappings()
    with pytest.raises(DeviceError, match="cannot map"):
        kind.range(1 << 46, 1 << 10)
    assert (descriptors(), mappings()) == before


def test_children_inherit_no_slab(kind) -> None:
    with kind.slab(SLAB) as slab:
        code = f"import os; os.fstat({slab.fileno()})"
        child = subprocess.run(
            [sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, timeout=30, check=False
        )
        assert "Bad file descriptor" in child.stderr


def test_the_size_of_a_slab_is_sealed(kind) -> None:
    with kind.slab(SLAB) as slab:
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fileno(), 0)


BORROWER = """
import array, ctypes, socket, sys
from forebay.gpu.memory import Slab, SlabRange
assert "torch" not in sys.modules
peer = socket.socket(fileno=int(sys.argv[1]))
data, ancillary, _, _ = peer.recvmsg(1, socket.CMSG_SPACE(4))
numbers = array.array("i")
numbers.frombytes(ancillary[0][2][:4])
with Slab.adopt(numbers[0]) as slab, SlabRange(slab.size, 1) as places:
    places.map(0, slab)
    peer.sendall(ctypes.string_at(places.base, 5))
    peer.recv(1)
    ctypes.memmove(places.base + slab.size - 4, b"back", 4)
    peer.sendall(b".")
"""


def test_another_process_maps_the_slab_it_is_sent(kind) -> None:
    ours, theirs = socket.socketpair()
    with ours, kind.range(SLAB, 1) as places, kind.slab(SLAB) as slab:
        ours.settimeout(30)
        places.map(0, slab)
        kind.write(places.base, b"hello")
        with theirs:
            child = subprocess.Popen([sys.executable, "-c", BORROWER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        try:
            socket.send_fds(ours, [b"."], [slab.fileno()])
            assert ours.recv(5, socket.MSG_WAITALL) == b"hello"
            ours.sendall(b".")
            assert ours.recv(1) == b"."
            assert kind.read(places.base + SLAB - 4, 4) == b"back"
            assert child.wait(timeout=30) == 0
        finally:
            child.kill()
            child.wait()


def test_adopting_something_that_is_no_slab_closes_it(tmp_path) -> None:
    before = descriptors()
    number = os.open(tmp_path / "odd", os.O_RDWR | os.O_CREAT)
    os.ftruncate(number, 17)
    with pytest.raises(DeviceError, match="slab_bytes is 17"):
        Slab.adopt(number)
    assert descriptors() == before
