"""The shape of a figures file, as scripts read it."""

import json
from pathlib import Path

from forebay.bench.figures import Figure, write_figures


def test_figures_file_has_the_shape_that_scripts_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    write_figures(
        path,
        "events",
        ["python", "-m", "bench.events", "--json", "a b.json"],
        {"events_per_s": Figure(2e5, "1/s", 1.5e5), "round_trip_p50_s": Figure(None, "s")},
    )
    content = json.loads(path.read_text())
    assert list(content) == ["benchmark", "command", "commit", "machine", "figures"]
    assert content["benchmark"] == "events"
    assert content["command"] == "python -m bench.events --json 'a b.json'"
    assert content["machine"]["cpus"] >= 1
    assert content["figures"] == {
        "events_per_s": {"value": 2e5, "unit": "1/s", "baseline": 1.5e5},
        "round_trip_p50_s": {"value": None, "unit": "s", "baseline": None},
    }
    assert [file.name for file in path.parent.iterdir()] == ["figures.json"]
