"""One suite for the lent memory of every kind of device: memfds always, CUDA where there is one, its neighbour too.

On a GPU host: python -m pytest tests/gpu -k contract
"""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from forebay.gpu.backend import memory_backend
from forebay.gpu.errors import DeviceError
from tests.gpu.lending_devices import PAIRS, WANTED, Child, Lending, adopted, lending, noise, why_not
from tests.gpu.test_memory import descriptors

__all__ = ["lending"]

CYCLES = 1000


@pytest.mark.parametrize("pair", WANTED[1:], ids="-".join)
def test_the_contract_ran_on(pair: tuple[str, str]) -> None:
    if pair not in PAIRS:
        pytest.skip(" ".join(filter(None, map(why_not, pair))))


def test_a_slab_is_zero_at_first_and_after_zeroing(lending: Lending) -> None:
    size = lending.slab_bytes
    for seed in range(3):
        with lending.arena(1) as arena, lending.slab() as slab, adopted(lending, slab) as ours:
            arena.map(0, ours)
            assert lending.borrower.read(arena.base, size) == bytes(size)
            lending.borrower.write(arena.base, noise(size, seed))
            assert lending.borrower.read(arena.base, size) == noise(size, seed)
            lending.lender.zero(slab)
            assert lending.borrower.read(arena.base, size) == bytes(size)
            lending.borrower.write(arena.base, noise(size, seed))


def test_slots_lie_side_by_side(lending: Lending) -> None:
    size = lending.slab_bytes
    with lending.arena(3) as arena, lending.slab() as first, lending.slab() as second:
        with adopted(lending, first) as one, adopted(lending, second) as two:
            arena.map(1, one)
            arena.map(2, two)
        data = noise(2 * size, 1)
        lending.borrower.write(arena.base + size, data)
        assert lending.borrower.read(arena.base + size, 2 * size) == data
        assert arena.mapped == {1, 2}
        with lending.lender.arena(size, 1) as theirs:
            theirs.map(0, second)
            assert lending.lender.read(theirs.base, size) == data[size:]


def test_a_mapping_outlives_every_handle(lending: Lending) -> None:
    with lending.arena(1) as arena:
        with lending.slab() as slab, adopted(lending, slab) as ours:
            arena.map(0, ours)
        assert slab.closed
        assert ours.closed
        lending.borrower.write(arena.base, b"alive")
        assert lending.borrower.read(arena.base, 5) == b"alive"


def test_what_is_written_here_is_read_in_another_process(lending: Lending) -> None:
    size = lending.slab_bytes
    with lending.lender.arena(size, 1) as arena, lending.slab() as slab, Child(str(lending.borrower.device)) as child:
        arena.map(0, slab)
        lending.lender.write(arena.base + 7, b"from here")
        child.ask("borrow", size, descriptor=slab.fileno())
        assert bytes.fromhex(child.ask("read", 7, 9)) == b"from here"
        child.ask("write", size - 10, b"from there".hex())
        assert lending.lender.read(arena.base + size - 10, 10) == b"from there"


@pytest.mark.parametrize("still_open", [False, True], ids=["mapped", "mapped-and-held"])
def test_data_outlives_a_lender_that_is_killed(lending: Lending, still_open: bool) -> None:
    size = lending.slab_bytes
    data = noise(size, 3)
    with Child(str(lending.lender.device)) as child, lending.arena(1) as arena:
        slab = lending.borrower.adopt(child.ask("lend", size), size)
        arena.map(0, slab)
        child.ask("write", 0, data[: 64 << 10].hex())
        lending.borrower.write(arena.base + (64 << 10), data[64 << 10 :])
        if not still_open:
            slab.close()
        child.kill()
        assert lending.borrower.read(arena.base, size) == data
        lending.borrower.write(arena.base, b"and on")
        assert lending.borrower.read(arena.base, 6) == b"and on"
        slab.close()


def test_memory_of_a_killed_borrower_is_the_lenders_alone(lending: Lending) -> None:
    size = lending.slab_bytes
    with lending.lender.arena(size, 1) as arena, lending.slab() as slab, Child(str(lending.borrower.device)) as child:
        arena.map(0, slab)
        child.ask("borrow", size, descriptor=slab.fileno())
        child.ask("write", 0, b"left behind".hex())
        child.kill()
        assert lending.lender.read(arena.base, 11) == b"left behind"
        lending.lender.zero(slab)
        assert lending.lender.read(arena.base, size) == bytes(size)


def test_a_slab_takes_the_place_of_another(lending: Lending) -> None:
    size = lending.slab_bytes
    with lending.arena(2, full=True) as arena, lending.borrower.host_slab(size) as host:
        lending.borrower.write(arena.base, noise(2 * size, 5))
        with lending.borrower.arena(size, 1) as beside:
            beside.map(0, host)
            lending.borrower.move(beside.base, arena.base + size, size)
        arena.replace(1, host)
        assert lending.borrower.read(arena.base, 2 * size) == noise(2 * size, 5)
        arena.unmap(1)
        with pytest.raises(DeviceError, match="slot 1 holds no slab"):
            arena.replace(1, host)


def test_a_slab_is_filled_before_anybody_sees_it(lending: Lending) -> None:
    size = lending.slab_bytes
    with lending.arena(2, full=True) as arena, lending.borrower.host_slab(size) as host, lending.slab() as lent:
        lending.borrower.write(arena.base, noise(2 * size, 6))
        with adopted(lending, lent) as ours:
            for slab in (host, ours):
                lending.borrower.fill(slab, arena.base + size)
                arena.replace(1, slab)
                assert lending.borrower.read(arena.base, 2 * size) == noise(2 * size, 6)


def test_slabs_that_were_prepared_are_filled_by_several_threads_at_once_and_leave_nothing(lending: Lending) -> None:
    size, count = lending.slab_bytes, 6
    with lending.arena(count, full=True) as arena:
        lending.borrower.write(arena.base, noise(count * size, 7))
        before = lending.holdings()
        made = [lending.borrower.host_slab(size, zero=False) for _ in range(count)]
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lending.borrower.prepare, made))
            for slab in made:
                lending.borrower.prepare(slab)  # again
            list(threads.map(lambda at: lending.borrower.fill(made[at], arena.base + at * size), range(count)))
        for slot, slab in enumerate(made):
            arena.replace(slot, slab)
            slab.close()
        assert lending.borrower.read(arena.base, count * size) == noise(count * size, 7)
        assert lending.holdings()[0] == before[0], "descriptors"
        with pytest.raises(DeviceError):
            lending.borrower.prepare(made[0])


def test_wrong_use_is_refused_and_changes_nothing(lending: Lending) -> None:
    size = lending.slab_bytes
    with lending.arena(2) as arena, lending.slab() as slab, lending.lender.slab(2 * size) as large:
        with adopted(lending, slab) as ours, adopted(lending, large) as wide:
            arena.map(0, ours)
            for call, problem in (
                (lambda: arena.map(0, ours), "slot 0 already holds a slab"),
                (lambda: arena.map(2, ours), r"slot 2 is outside 0\.\.1"),
                (lambda: arena.map(-1, ours), r"slot -1 is outside 0\.\.1"),
                (lambda: arena.map(1, wide), f"{2 * size} bytes does not fit slots of {size}"),
                (lambda: arena.replace(0, wide), f"{2 * size} bytes does not fit slots of {size}"),
                (lambda: arena.unmap(1), "slot 1 holds no slab"),
                (lambda: lending.lender.slab(1000), "slab_bytes is 1000; it must be a positive multiple of"),
                (lambda: lending.lender.slab(0), "slab_bytes is 0; it must be a positive multiple of"),
                (lambda: lending.borrower.arena(size, 0), "at least one slot"),
                (lambda: lending.borrower.arena(size, 1 << 40), "cannot map"),
            ):
                before = lending.holdings()
                with pytest.raises(DeviceError, match=problem):
                    call()
                assert lending.holdings() == before
            assert arena.mapped == {0}
            lending.borrower.write(arena.base, b"fine")


def test_a_full_arena_takes_no_more(lending: Lending) -> None:
    with lending.arena(2, full=True) as arena, lending.slab() as slab, adopted(lending, slab) as ours:
        for slot in (0, 1):
            with pytest.raises(DeviceError, match="already holds a slab"):
                arena.map(slot, ours)
        arena.unmap(1)
        arena.map(1, ours)


@pytest.mark.parametrize("lie", [-1, 1])
def test_a_lie_about_the_size_is_found_out_before_use(lending: Lending, lie: int) -> None:
    size = lending.slab_bytes
    with lending.lender.slab(3 * size) as slab:
        number = os.dup(slab.fileno())
        before = descriptors()
        with pytest.raises(DeviceError, match=r"bytes.* announced"):
            lending.borrower.adopt(number, (3 + lie) * size)
        assert descriptors() == before - 1


def test_what_is_no_slab_is_refused_and_closed(lending: Lending, tmp_path) -> None:
    before = descriptors()
    for name in ("file", "null", "memory that can shrink"):
        if name == "null":
            number = os.open("/dev/null", os.O_RDWR)
        elif name == "file":
            number = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        else:
            number = os.memfd_create(name, os.MFD_ALLOW_SEALING)
        if name != "null":
            os.ftruncate(number, lending.slab_bytes)
        with pytest.raises(DeviceError, match=r"this descriptor is no slab|slab_bytes is"):
            lending.borrower.adopt(number, lending.slab_bytes)
        assert descriptors() == before


def test_closing_twice_is_fine_and_closed_things_say_so(lending: Lending) -> None:
    backend = lending.borrower
    slab, arena, host = backend.slab(lending.slab_bytes), backend.arena(lending.slab_bytes, 1), backend.pinned(4096)
    number = slab.fileno()
    assert slab.fileno() == number
    for thing in (slab, arena, host):
        assert not thing.closed
        thing.close()
        thing.close()
        assert thing.closed
    for call in (slab.fileno, lambda: arena.base, arena.buffer, lambda: arena.map(0, slab), lambda: host.base):
        with pytest.raises(DeviceError, match="closed"):
            call()
    again = memory_backend(str(backend.device))
    again.close()
    again.close()
    assert again.closed
    with pytest.raises(DeviceError, match="closed"):
        again.slab(lending.slab_bytes)


def test_forgotten_things_give_their_memory_back(lending: Lending) -> None:
    lending.arena(1, full=True)
    before = lending.holdings()
    arena, host = lending.arena(2, full=True), lending.borrower.pinned(1 << 20)
    slab = lending.slab()
    slab.fileno()
    assert lending.holdings() != before
    del arena, host, slab
    assert lending.holdings() == before


def test_nothing_is_left_after_many_cycles(lending: Lending) -> None:
    def cycle() -> None:
        with lending.slab() as slab, adopted(lending, slab) as ours, lending.arena(2) as arena:
            arena.map(1, ours)
            lending.borrower.write(arena.base + lending.slab_bytes, b"used")
            arena.unmap(1)
            arena.map(0, ours)

    for _ in range(3):
        cycle()
    before = lending.holdings()
    for _ in range(CYCLES):
        cycle()
    assert lending.holdings() == before


def test_the_leak_gate_sees_a_planted_leak(lending: Lending) -> None:
    with lending.arena(1, full=True):
        pass
    before = lending.holdings()
    leak = lending.lender.slab(16 * lending.slab_bytes)
    leak.fileno()
    after = lending.holdings()
    assert after[0] > before[0]
    assert not lending.cuda or after[2] > before[2]
    leak.close()
    assert lending.holdings() == before


def test_children_inherit_no_slab(lending: Lending) -> None:
    with lending.slab() as slab, adopted(lending, slab) as ours:
        for held in (slab, ours):
            code = f"import os; os.fstat({held.fileno()})"
            child = subprocess.run(
                [sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, timeout=30, check=False
            )
            assert "Bad file descriptor" in child.stderr


def test_others_look_at_an_arena_without_a_copy(lending: Lending) -> None:
    arena = lending.arena(1, full=True)
    if lending.cuda:
        cupy = pytest.importorskip("cupy")
        with cupy.cuda.Device(lending.borrower.device.index):
            view = cupy.asarray(arena.buffer())
            view[:5] = cupy.frombuffer(b"shown", cupy.uint8)
            cupy.cuda.runtime.deviceSynchronize()
    else:
        view = np.frombuffer(arena.buffer(), np.uint8)
        view[:5] = np.frombuffer(b"shown", np.uint8)
    assert view.size == lending.slab_bytes
    base = arena.base
    assert lending.borrower.read(base, 5) == b"shown"
    arena.close()
    assert lending.borrower.read(base, 5) == b"shown"


def test_pinned_memory_is_there_and_the_hosts_too(lending: Lending) -> None:
    size = 3 * 4096
    with lending.borrower.pinned(size) as host:
        lending.borrower.write(host.base, noise(size, 8))
        assert ctypes.string_at(host.base, size) == noise(size, 8)
        view = host.buffer()
    assert bytes(view[:10]) == noise(size, 8)[:10]
    with pytest.raises(DeviceError, match=r"the host has .*ask for less|the host has not|at least one byte"):
        lending.borrower.pinned(0 if lending.cuda else 1 << 50)


def test_memory_is_told(lending: Lending) -> None:
    info = lending.lender.memory()
    assert 0 < info.free <= info.total
    assert info.total > 1 << 28
    assert lending.lender.describe()


def test_a_device_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"cuda:99 .*(forebay\[cuda13\]|driver|is not there)"):
        memory_backend("cuda:99")
    with pytest.raises(DeviceError, match="is not a device"):
        memory_backend("gpu:0")


def test_the_memfd_backend_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from forebay.gpu.backend import memory_backend; memory_backend('cpu:0').slab(4096); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
