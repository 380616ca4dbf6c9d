"""The loop in machine code is what its listing says, and copies what memmove copies."""

import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.gpu import native_copy
from forebay.gpu.errors import DeviceError
from forebay.gpu.pieces import Pieces, cut, pieces, plan, shares


def test_the_machine_code_is_the_listing(tmp_path: Path) -> None:
    assembler, extract = shutil.which("as"), shutil.which("objcopy")
    if assembler is None or extract is None:
        pytest.skip("as and objcopy are not installed")
    assert native_copy.__doc__
    listing = native_copy.__doc__[native_copy.__doc__.index("    endbr64") :]
    source, made, plain = tmp_path / "copy.s", tmp_path / "copy.o", tmp_path / "copy.bin"
    source.write_text(".intel_syntax noprefix\n" + re.sub("#.*", "", listing))
    subprocess.run([assembler, "--64", source, "-o", made], check=True, timeout=30)
    subprocess.run([extract, "-O", "binary", "-j", ".text", made, plain], check=True, timeout=30)
    assert plain.read_bytes() == native_copy.MACHINE_CODE


@pytest.mark.parametrize("copy", [native_copy.copy_pieces, native_copy.memmove_pieces])
def test_any_alignment_and_size(copy) -> None:
    room = 1 << 16
    source = np.random.default_rng(0).integers(0, 256, room, np.uint8)
    for seed in range(200):
        random = np.random.default_rng(seed)
        target, expected = np.zeros(room, np.uint8), np.zeros(room, np.uint8)
        begins, froms, sizes, at = [], [], [], 0
        while True:
            at += int(random.integers(0, 20))
            size = int(random.integers(0, 300)) if random.random() < 0.8 else int(random.integers(0, 9000))
            if at + size > room:
                break
            first = int(random.integers(0, room - size))
            begins.append(target.ctypes.data + at)
            froms.append(source.ctypes.data + first)
            sizes.append(size)
            expected[at : at + size] = source[first : first + size]
            at += size
        copy(pieces(begins, froms, sizes))
        assert np.array_equal(target, expected)


def test_planning_joins_neighbours_and_drops_what_is_empty() -> None:
    planned = plan(pieces([100, 200, 50, 300, 500], [1100, 1200, 0, 1300, 2000], [100, 100, 0, 100, 10]))
    assert planned.destinations.tolist() == [100, 500]
    assert planned.sources.tolist() == [1100, 2000]
    assert planned.sizes.tolist() == [300, 10]
    assert len(plan(pieces([], [], []))) == 0


def overlap(wanted: Pieces) -> bool:
    """As the definition has it, piece by piece."""
    spans = list(zip(wanted.destinations.tolist(), wanted.sources.tolist(), wanted.sizes.tolist(), strict=True))
    for number, (target, _, size) in enumerate(spans):
        for other, (target_2, source_2, size_2) in enumerate(spans):
            if size and size_2:
                if number != other and target < target_2 + size_2 and target_2 < target + size:
                    return True
                if target < source_2 + size_2 and source_2 < target + size:
                    return True
    return False


@pytest.mark.parametrize("seed", range(10))
def test_overlaps_are_found_and_nothing_else(seed: int) -> None:
    random = np.random.default_rng(seed)
    found = 0
    for _ in range(300):
        count = int(random.integers(1, 8))
        room, far = int(random.choice([50, 200, 1000])), int(random.choice([0, 0, 300, 5000]))
        sizes: Any = int(random.integers(1, 12)) if random.random() < 0.6 else random.integers(0, 12, count)
        step = sizes if isinstance(sizes, int) and random.random() < 0.7 else 1
        targets, sources = random.integers(0, room, count) * step, far * step + random.integers(0, room, count) * step
        wanted = pieces(targets, sources, sizes)
        found += overlap(wanted)
        if overlap(wanted):
            with pytest.raises(DeviceError, match=r"write the same memory|would write what it reads"):
                plan(wanted)
        else:
            assert plan(wanted).bytes == wanted.bytes
    assert 50 < found < 290


@pytest.mark.parametrize("seed", range(20))
def test_cutting_and_sharing_keep_every_byte(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 50))
    sizes = random.integers(1, 5000, count)
    begins = np.cumsum(sizes + 10) - sizes
    whole = pieces(begins, begins + 10**6, sizes)
    limit = int(random.integers(1, 6000))
    parts = cut(whole, limit)
    assert int(parts.sizes.max()) <= limit
    expected = [(int(begin) + at, min(limit, int(size) - at)) for begin, size in zip(begins, sizes, strict=True)
                for at in range(0, int(size), limit)]  # fmt: skip
    assert list(zip(parts.destinations.tolist(), parts.sizes.tolist(), strict=True)) == expected
    assert (parts.sources - parts.destinations == 10**6).all()
    divided = shares(parts, 3)
    assert 1 <= len(divided) <= 3
    assert np.concatenate([share.destinations for share in divided]).tolist() == parts.destinations.tolist()
    assert sum(share.bytes for share in divided) == whole.bytes
    assert max(share.bytes for share in divided) <= whole.bytes / 3 + 2 * limit


def test_a_copy_leaves_the_interpreter_to_others() -> None:
    size = 192 << 20
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    wanted = pieces([target.ctypes.data], [source.ctypes.data], [size])

    def longest_pause() -> float:
        """Of this thread while another copies, as a share of the copying."""
        span: list[float] = []

        def copy() -> None:
            begun = time.perf_counter()
            native_copy.copy_pieces(wanted)
            span.extend((begun, time.perf_counter()))

        thread = threading.Thread(target=copy)
        thread.start()
        times = []
        while not span:
            times.append(time.perf_counter())
        thread.join()
        begun, ended = span
        during = [begun, *(at for at in times if begun < at < ended), ended]
        return float(np.diff(during).max()) / (ended - begun)

    # A busy machine may keep this thread waiting; a copy that holds the interpreter's lock does so every time.
    assert any(longest_pause() < 0.6 for _ in range(10))
