"""The kill table (tests/system/kill_table.py) on GPUs: on the first two, or twice on the only one.

    python -m pytest -q tests/cuda/test_kill_table.py

takes about five minutes; a cell that fails shows the state, who was harmed how, and both parties' logs.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forebay.gpu.backend import memory_backend
from forebay.gpu.errors import DeviceError
from tests.system import kill_table
from tests.system.kill_table import CONFIGURATION, FAULTS, STATES, VICTIMS, Scene
from tests.system.server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def granularity_of(device: str) -> int:
    """0 where the device is not there."""
    try:
        with memory_backend(device) as memory:
            return memory.granularity
    except DeviceError:
        return 0


@pytest.fixture(scope="module")
def devices() -> tuple[tuple[str, str], int]:
    """Lender's and borrower's, and a size of slabs that both can have."""
    first, second = granularity_of("cuda:0"), granularity_of("cuda:1")
    if not first:
        pytest.skip("there is no CUDA device here")
    return ("cuda:0", "cuda:1" if second else "cuda:0"), max(first, second)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory, devices: object) -> Iterator[Server]:
    """For all faults that are not its own."""
    with Server(CONFIGURATION, tmp_path_factory.mktemp("standing")) as scheduler:
        yield scheduler


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, victim: str, tmp_path: Path, devices: tuple[tuple[str, str], int]
) -> Iterator[Scene]:
    with ExitStack() as undo:
        if victim == "scheduler":
            scheduler = undo.enter_context(Server(CONFIGURATION, tmp_path))
        else:
            scheduler = request.getfixturevalue("standing")
        yield Scene(scheduler, tmp_path, undo, *devices)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("state", STATES)
def test_a_death_or_a_long_pause_in_every_state_of_a_lease(scene: Scene, state: str, victim: str, fault: str) -> None:
    try:
        kill_table.run(scene, state, victim, fault)
    except BaseException as error:
        for party in (scene.lender, scene.borrower):
            error.add_note(f"--- {party.role}, exit status {party.process.poll()}:\n{''.join(party.log)}")
        error.add_note(f"--- leases: {scene.leases()}")
        raise
