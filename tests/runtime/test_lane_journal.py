"""A journal of a lane core that spills, borrows, lends and shares fairly leads to the same commands again."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.runtime.recording import Header, JournalError, LaneSettings, Recorder, make_lane_core, replay
from forebay.sched.cost_table import CostRow
from forebay.sched.lane_events import ModelOpened, SpillRevoked, Tick
from forebay.transport.messages import PROTOCOL_VERSION, Cancel, Targets
from tests.sched.world import World, start

SETTINGS = LaneSettings(3, 1200, "adbs", True, "cfs", 6, 2, True)


def recorded(folder: Path, settings: LaneSettings) -> tuple[World, Recorder[Any, Any]]:
    """A world whose core writes down what enters it."""
    world = World(make_lane_core(settings))
    core: Any = SimpleNamespace(handle=world.core.handle)
    recorder: Recorder[Any, Any] = Recorder(core, Header(PROTOCOL_VERSION, "lane", settings), folder)
    world.core.handle = recorder.handle  # type: ignore[method-assign,assignment]
    return world, recorder


COSTS = (CostRow("m", 1, 100, 1, 16, 1.0, 1.0), CostRow("m", 1, 100, 4, 64, 9.0, 2.0))
IN_LANES = {
    "streams": LaneSettings(3, 1200, "adbs", True, "fcfs", 6, 2, True, partition="streams"),
    "auto": LaneSettings(
        3, 1200, "adbs", True, "cfs", 6, 2, True, partition="auto", targets={"a": Targets(0.1, 0.002)}, costs=COSTS
    ),
}


@pytest.mark.parametrize("kind", ["fcfs", "cfs", "vtc", *IN_LANES])
def test_it_replays(tmp_path: Path, kind: str) -> None:
    random = Random(kind)
    settings = IN_LANES.get(kind) or LaneSettings(3, 1200, "adbs", True, kind, 6, 2, True)
    world, recorder = recorded(tmp_path, settings)
    world.check_every = 20
    world.send(ModelOpened("a", 100, 4, 32, cost_name="m"))
    world.send(ModelOpened("b", 260, 4, 32))
    world.now += 11
    world.send(Tick())
    world.lend_spill((2, 3))
    for request in range(1, 40):
        text = [7] * 20 if request % 3 else None
        model = random.choice("aab")
        prompt, output = random.randint(10, 50), random.randint(1, 40)
        world.send(start(request, model, prompt, output, text=text, tenant=f"t{request % 4}"))
        for _ in range(random.randint(0, 12)):
            if world.copies and random.random() < 0.7:
                world.land_copy(random.randrange(len(world.copies)), random.random() < 0.1)
            elif world.flying:
                world.land(plan=random.choice(world.heads()))
        if world.to_come:
            world.give_back(tuple(world.contents.absent))
        if request == 20:
            world.send(SpillRevoked((3,), 0.5))
        if request % 9 == 0:
            world.send(Cancel(request - 1, 0))
    world.run_dry()
    assert world.copied["out"] > 0
    recorder.close()
    assert recorder.path is not None
    assert replay(recorder.path).note == ""


def test_a_journal_of_another_fairness_is_noticed(tmp_path: Path) -> None:
    world, recorder = recorded(tmp_path, LaneSettings(1, 600, "adbs", False, "fcfs", 6, 2))
    assert recorder.path is not None
    recorder.close()
    header = Header(PROTOCOL_VERSION, "lane", LaneSettings(1, 600, "adbs", False, "lottery", 6, 2))
    wrong: Recorder[Any, Any] = Recorder(world.core, header, tmp_path)
    wrong.handle(0.0, Tick())
    wrong.close()
    assert wrong.path is not None
    with pytest.raises(JournalError, match="its core cannot be made: fairness 'lottery' is unknown"):
        replay(wrong.path)
