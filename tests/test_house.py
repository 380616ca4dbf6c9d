"""The import table, and the names that the packages hand on."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# folder -> what of ours it may import (ARCHITECTURE.md shows the same table).
TABLE: dict[str, set[str]] = {
    "transport": set(),
    "sched": {"transport.messages"},
    "gpu": {"transport.messages"},
    "runtime": {"transport", "sched", "gpu"},
    "apps": {"runtime", "gpu", "sched", "transport.messages"},
    "bench": {"transport", "sched", "gpu", "runtime", "apps"},
}
FORBIDDEN = {
    # Decisions are pure: the same events lead to the same commands, in a process, a simulation and a replay.
    "sched": {"asyncio", "zmq", "torch", "time", "random", "socket", "threading", "os", "datetime", "secrets", "uuid"},
    "transport": {"torch", "numpy"},
}
TORCH_FREE = ["forebay.gpu.memory", "forebay.runtime.scheduler_process", "forebay.runtime.front_door_process"]


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it leads"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("folder", TABLE)
def test_imports_follow_the_table(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            first, *rest = name.split(".")
            assert first not in TABLE, f"{path}: import forebay.{name}, not the flat name"
            if first == "forebay" and rest and rest[0] in TABLE and rest[0] != folder:
                allowed = any(name.removeprefix("forebay.").startswith(f"{entry}.") for entry in TABLE[folder])
                assert allowed, f"{path} imports {name}; {folder}/ may import {TABLE[folder] or 'nothing of ours'}"
            assert first not in FORBIDDEN.get(folder, ()), f"{path} imports {name}, which {folder}/ must not know"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_what_apps_and_light_processes_link_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0


@pytest.mark.parametrize("folder", TABLE)
def test_a_module_that_is_run_holds_no_state_and_no_types(folder: str) -> None:
    # It would be imported a second time, under another name, by whoever else uses it.
    for path in (ROOT / folder).glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body):
            kept = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.Assign | ast.AnnAssign)]
            assert not kept, f"{path} is run with -m and holds state or types of its own"


def test_from_a_checkouts_root_the_standard_sched_is_still_there() -> None:
    code = "import sched; sched.scheduler(); print(sched.Event.__name__, sched.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.stdout.split() == ["Event", str(ROOT / "sched" / "__init__.py")], result.stderr


def test_sched_hands_on_nothing_else() -> None:
    import forebay.sched

    with pytest.raises(AttributeError, match="no attribute 'deque'"):
        _ = forebay.sched.deque
