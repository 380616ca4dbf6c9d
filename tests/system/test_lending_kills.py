"""The kill table (kill_table.py) on the CPU backend."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system import kill_table
from tests.system.kill_table import CONFIGURATION, FAULTS, STATES, VICTIMS, Scene
from tests.system.server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For all faults that are not its own."""
    with Server(CONFIGURATION, tmp_path_factory.mktemp("standing")) as scheduler:
        yield scheduler


@pytest.fixture
def scene(request: pytest.FixtureRequest, victim: str, tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as undo:
        if victim == "scheduler":
            scheduler = undo.enter_context(Server(CONFIGURATION, tmp_path))
        else:
            scheduler = request.getfixturevalue("standing")
        yield Scene(scheduler, tmp_path, undo)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("state", STATES)
def test_a_death_or_a_long_pause_in_every_state_of_a_lease(scene: Scene, state: str, victim: str, fault: str) -> None:
    kill_table.run(scene, state, victim, fault)
