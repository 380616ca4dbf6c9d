"""README.md, CONTRIBUTING.md and docs/: what they point at is there, and what their commands write git ignores."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.sched.states import TABLES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), f"{document.name} links to {link}"
        if heading:
            headings = re.findall(r"(?m)^#+ (.+)$", target.read_text(encoding="utf-8"))
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings}, link


@pytest.mark.parametrize("name", ["README.md", "docs/workloads.md"])
def test_modules_that_commands_name_are_there(name: str) -> None:
    found = re.findall(r"python -m ((?:forebay\.)?(?:bench|gpu|runtime)\.\w+)", (ROOT / name).read_text("utf-8"))
    assert found
    for module in found:
        assert (ROOT / f"{module.removeprefix('forebay.').replace('.', '/')}.py").is_file(), module


def test_the_picture_is_what_its_program_draws() -> None:
    # The picture is made by `python docs/picture.py > docs/forebay.svg`.
    drawn = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "picture.py")], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert (ROOT / "docs" / "forebay.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("name", ["request", "lease", "slab"])
def test_the_states_are_those_of_the_code(name: str) -> None:
    rows = []
    for state, moves in TABLES[name].items():
        events: dict[str, list[str]] = {}
        for event, target in moves.items():
            events.setdefault(target, []).append(event)
        if events:
            rows.append((state, {target: set(found) for target, found in events.items()}))
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = re.search(rf"\| a {name} \| may become \|\n\|---\|---\|\n((?:\|.*\n)+)", text)
    assert table is not None
    drawn = []
    for row in table[1].splitlines():
        _, state, moves_drawn, _ = (cell.strip() for cell in row.split("|"))
        targets = re.findall(r"(\w+) \(([^)]*)\)", moves_drawn)
        # An event may be explained: "end: its worker has ended it", "conclude: …; abort".
        drawn.append(
            (state, {to: {part.partition(":")[0].strip() for part in re.split("[,;]", how)} for to, how in targets})
        )
    assert drawn == rows


def test_git_ignores_what_the_documented_commands_write() -> None:
    """A report names its commit, and "-dirty" where files differ from it."""
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse"], capture_output=True, check=False).returncode != 0:
        pytest.skip("not in a checkout")
    written = ["demo/report.json", "workload.json", "report.json", "report-llm-0.json", "report-llm-0.log"]
    written += ["plots/index.html", "policies/policies.png", "goodput/setup.json", "models/mine/config.json"]
    kept = ["my.yaml", "docs/plots/ttft.png", "examples/workload.json"]
    told = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", "--no-index", *written, *kept],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.stdout.split() == written
