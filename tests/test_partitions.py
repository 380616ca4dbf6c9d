"""The lane core and a real runner together, under each partition: whatever runs in which lane, the text is the same. A
CPU device runs lanes one after the other, in the order of launch; what is checked is who is launched when."""

import queue
from array import array
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from forebay.gpu.device import open_device
from forebay.sched.blocks import BlockPool
from forebay.sched.lane import LaneCore
from forebay.sched.lane_events import Deliver, LaneEvent, ModelOpened
from forebay.sched.partition import PARTITIONS, make_partition
from forebay.sched.policy import AdaptiveBatching
from forebay.transport.messages import (
    CloseSequence,
    DeviceSettings,
    ModelSpec,
    OpenSequence,
    Sampling,
    Start,
    StepDone,
    StepPlan,
    Tokens,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]

PROMPTS = [list(range(1000 + 50 * number, 1000 + 50 * number + length)) for number, length in enumerate((5, 33, 90))]
SLAB = 4 << 20


def run(folder: Path, partition: str, slabs: int) -> tuple[dict[int, list[int]], Counter[str]]:
    """The tokens of each request, and how many steps each kind of lane had."""
    texts: dict[int, list[int]] = {}
    lanes: Counter[str] = Counter()
    landed: queue.SimpleQueue[Future[StepDone]] = queue.SimpleQueue()
    device = open_device("cpu:0", DeviceSettings(slabs * SLAB, SLAB, threads=1))
    try:
        runners = {}
        core = LaneCore(BlockPool(slabs, SLAB), AdaptiveBatching(), partition=make_partition(partition))
        now = 0.0
        flying = 0

        def handle(event: LaneEvent) -> None:
            nonlocal flying, now
            now += 0.001
            for command in core.handle(now, event):
                match command:
                    case OpenSequence():
                        runners[command.model].open(command)
                    case CloseSequence():
                        runners[command.model].close(command)
                    case StepPlan():
                        flying += 1
                        lanes[command.lane] += 1
                        runners[command.model].launch(command).add_done_callback(landed.put)
                    case Deliver(_, messages):
                        for message in messages:
                            if isinstance(message, Tokens):
                                columns = (array("Q", message.requests), array("I", message.tokens))
                                for request, token in zip(*columns, strict=True):
                                    texts.setdefault(request, []).append(token)
            core.check()

        for name in ("a", "b"):
            spec = ModelSpec(name, str(folder), max_sequences=8, step_tokens=32)
            runners[name] = device.load(spec)
            handle(ModelOpened(name, runners[name].block_bytes, 8, 32))
        for number, prompt in enumerate(PROMPTS * 2):
            sampling = Sampling(8, ignore_eos=True)
            handle(Start(number, 0, "ab"[number // 3], array("I", prompt).tobytes(), len(prompt), sampling, "sink"))
        while flying:
            done = landed.get(timeout=60).result()
            flying -= 1
            handle(done)
        assert core.idle
    finally:
        device.close()
    return texts, lanes


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> dict[int, list[int]]:
    return run(smollm2, "none", 16)[0]


@pytest.mark.parametrize("partition", [name for name in PARTITIONS if name != "none"])
def test_the_text_is_the_same_under_every_partition_and_with_too_little_memory(
    smollm2: Path, expected: dict[int, list[int]], partition: str
) -> None:
    texts, lanes = run(smollm2, partition, slabs=3)
    assert texts == expected
    # Under auto prompts as short as these go along with decodes.
    assert set(lanes) == ({"decode"} if partition == "auto" else {"decode", "prefill"})
    assert expected[0] == expected[3], "two names of one model"
