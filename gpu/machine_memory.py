"""How much memory this process can have: of the machine, and of the control groups (version 2) around it.

A container that goes beyond its bound is not refused memory: its processes are killed. Whoever takes much looks first.
"""

from pathlib import Path

from forebay.gpu.backend import MemoryInfo

GROUPS = Path("/sys/fs/cgroup")
"""Where the control groups are mounted."""

OWN_GROUP = Path("/proc/self/cgroup")


def available(groups: Path = GROUPS, own: Path = OWN_GROUP) -> int:
    """Bytes that this process can still get without swapping."""
    return machine_memory(groups, own).free


def machine_memory(groups: Path = GROUPS, own: Path = OWN_GROUP) -> MemoryInfo:
    """What the machine has (MemAvailable and MemTotal of /proc/meminfo), or a control group of this process, where that
    has less. `groups` is where they are mounted, `own` the file that names the one of this process."""
    values = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            key, value = line.split(":")
            values[key] = int(value.split()[0]) * 1024
    if "MemAvailable" not in values:
        raise OSError("/proc/meminfo has no MemAvailable; Linux 3.14 or newer is needed")
    bounds = [*_bounds(groups, own), MemoryInfo(values["MemAvailable"], values["MemTotal"])]
    return MemoryInfo(min(bound.free for bound in bounds), min(bound.total for bound in bounds))


def _bounds(groups: Path, own: Path) -> list[MemoryInfo]:
    """Of the group that this process belongs to and of those around it, as far as they can be seen; a group without a
    bound is not listed. Pages of files that were read count as free: they go when memory is short."""
    group = next((line[3:].strip() for line in _lines(own) if line.startswith("0::")), "/")
    folder = groups / group.lstrip("/")
    bounds = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to(groups):
            break
        bound, used = _lines(place / "memory.max"), _lines(place / "memory.current")
        if bound and used and bound[0].strip().isdigit():
            files = next(
                (int(line.split()[1]) for line in _lines(place / "memory.stat") if line.startswith("inactive_file ")), 0
            )
            bounds.append(MemoryInfo(max(0, int(bound[0]) - int(used[0]) + files), int(bound[0])))
    return bounds


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
