"""What a process can have, with control groups that were made up."""

from pathlib import Path

import pytest

from forebay.gpu import memory
from forebay.gpu.backend import MemoryInfo
from forebay.gpu.device_name import DeviceName
from forebay.gpu.errors import DeviceError
from forebay.gpu.machine_memory import available, machine_memory
from forebay.gpu.memfd_backend import MemfdBackend

MIB = 1 << 20


def bound(group: Path, most: str, used: int, files: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {files}\n")


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Names the group of this process, as on a machine that has version 1 beside version 2."""
    path = tmp_path / "own"
    path.write_text("4:memory:/elsewhere\n0::/pods/one\n")
    return path


def test_without_groups_it_is_the_machines(groups: Path, own: Path) -> None:
    whole = machine_memory(groups, own)
    assert 0 < whole.free <= whole.total
    assert machine_memory(groups, own.with_name("none")).total == whole.total


def test_the_tightest_of_all_groups_around_counts(groups: Path, own: Path) -> None:
    bound(groups / "pods" / "one", str(20 * MIB), 16 * MIB, files=MIB)
    assert machine_memory(groups, own) == MemoryInfo(5 * MIB, 20 * MIB)
    bound(groups / "pods", str(30 * MIB), 28 * MIB)
    assert machine_memory(groups, own) == MemoryInfo(2 * MIB, 20 * MIB)
    bound(groups / "pods" / "two", str(MIB), MIB)  # another's
    assert available(groups, own) == 2 * MIB
    bound(groups / "pods", "max", 28 * MIB)
    assert available(groups, own) == 5 * MIB
    bound(groups / "pods" / "one", str(20 * MIB), 21 * MIB)
    assert available(groups, own) == 0


def test_a_container_sees_its_own_group_as_the_root(groups: Path, own: Path) -> None:
    own.write_text("0::/\n")
    bound(groups, str(20 * MIB), 16 * MIB)
    assert machine_memory(groups, own) == MemoryInfo(4 * MIB, 20 * MIB)


def test_a_cpu_device_refuses_what_its_container_has_not_got(groups: Path) -> None:
    bound(groups, str(20 * MIB), 16 * MIB)  # the root: everybody is in it
    with MemfdBackend(DeviceName("cpu", 0), groups) as backend:
        assert backend.memory() == MemoryInfo(4 * MIB, 20 * MIB)
        with pytest.raises(DeviceError, match=f"has {4 * MIB} bytes of memory left, not {5 * MIB}"):
            backend.pinned(5 * MIB)
        backend.pinned(4 * MIB).close()


def test_a_slab_is_not_filled_with_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: MIB - 1)
    with memory.Slab(MIB) as slab:
        with pytest.raises(DeviceError, match="the machine, or the container, has 1048575 left"):
            slab.populate()
        assert slab.resident == 0
        monkeypatch.setattr(memory, "available", lambda: MIB)
        slab.populate()
        assert slab.resident == MIB
