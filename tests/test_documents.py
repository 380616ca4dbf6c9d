"""README.md, CONTRIBUTING.md and docs/: what they point at is there, and what their commands write git ignores."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
