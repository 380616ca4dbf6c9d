"""Fixtures that tests of all parts share."""

import gc
import os
from pathlib import Path

import pytest

# Workers of pytest-xdist, and the processes that tests start, share the cores: threads of torch that wait for each
# other in a busy loop only take them from one another. Devices set their own number of threads. Torch reads it when
# it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

DEFAULT_MODEL = Path(__file__).parent.parent / "models" / "smollm2-135m-instruct"


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage need go through it again, half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted SmolLM2-135M-Instruct: $FOREBAY_MODEL, or where the set-up puts it."""
    folder = Path(os.environ.get("FOREBAY_MODEL") or DEFAULT_MODEL)
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"no model at {folder}; make it with: python -m forebay.gpu.convert {folder}")
    return folder


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder with the public traces."""
    folder = os.environ.get("FOREBAY_TRACES")
    if not folder:
        pytest.skip("FOREBAY_TRACES does not name the folder of the trace files")
    return Path(folder)
