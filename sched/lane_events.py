"""What enters the lane core and what it answers. The core itself is in lane.py."""

from forebay.transport.messages import (
    Cancel,
    CloseSequence,
    CopyBlocks,
    CopyDone,
    CopyFailed,
    EvictWeights,
    Message,
    OpenSequence,
    RestoreWeights,
    Start,
    StepDone,
    StepFailed,
    StepPlan,
    ToFrontDoor,
    ToScheduler,
    WeightsBack,
    WeightsFailed,
    WeightsGone,
)


class ModelOpened(Message, frozen=True):
    """A model can run: its sequences may start. `popularity` as in `ModelSpec`; `cost_name` is what the cost file calls
    it, if not the same. `weight_bytes`: what its weights take, which are away and come when they are asked for
    (RestoreWeights); 0: they are there, and stay."""

    model: str
    block_bytes: int
    max_sequences: int
    step_tokens: int
    popularity: float = 1.0
    cost_name: str = ""
    weight_bytes: int = 0


class Reset(Message, frozen=True):
    """The scheduler has forgotten this worker: drop every request, say nothing."""

    reason: str


class Tick(Message, frozen=True):
    """Time has passed."""


class SpillGrew(Message, frozen=True):
    """Lent memory is mapped in these slots of the spill arena."""

    slots: tuple[int, ...]


class SpillRevoked(Message, frozen=True):
    """These slots of the arena are asked back. By the deadline `SpillFreed` is said of each, unless a copy that had
    begun is still on its way then. Send a `Tick` at the deadline."""

    slots: tuple[int, ...]
    deadline_s: float


class SlabsBack(Message, frozen=True):
    """These slabs of the pool were lent and are its own again, asked for or not. Their content means nothing."""

    slabs: tuple[int, ...]


class DeviceMemory(Message, frozen=True):
    """So many bytes of the device are free now, for all processes that use it."""

    free: int


class SlabsFilled(Message, frozen=True):
    """The first `count` slabs of the last `FillSlabs` have memory again; for the others the device had none. Their
    content means nothing."""

    count: int


LaneEvent = (
    ModelOpened
    | Start
    | Cancel
    | StepDone
    | StepFailed
    | CopyDone
    | CopyFailed
    | SpillGrew
    | SpillRevoked
    | SlabsBack
    | DeviceMemory
    | SlabsFilled
    | WeightsGone
    | WeightsBack
    | WeightsFailed
    | Tick
    | Reset
)


class Deliver(Message, frozen=True):
    """One frame for the front door that listens at `sink`."""

    sink: str
    messages: tuple[ToFrontDoor, ...]


class Report(Message, frozen=True):
    """For the scheduler."""

    message: ToScheduler


class WantSpill(Message, frozen=True):
    """Borrow so many bytes for the spill arena, if there is anything to be had: `SpillGrew` answers, perhaps with less,
    perhaps never."""

    bytes: int


class SpillFreed(Message, frozen=True):
    """Nothing of ours is in these slots of the arena any more, asked back or not needed: give them back."""

    slots: tuple[int, ...]


class LendSlabs(Message, frozen=True):
    """These slabs of the pool may be lent to others, until `SlabsBack`; nothing here touches them. What they hold is to
    be zeroed first."""

    slabs: tuple[int, ...]


class TakeBackSlabs(Message, frozen=True):
    """Ask for so many of the lent slabs, any of them, within the deadline."""

    count: int
    deadline_s: float


class DropSlabs(Message, frozen=True):
    """Give the memory of these slabs of the pool back to the device, at once: nothing here touches them."""

    slabs: tuple[int, ...]


class FillSlabs(Message, frozen=True):
    """Give these slabs, which were dropped, memory again. `SlabsFilled` answers, before the next `DeviceMemory`."""

    slabs: tuple[int, ...]


LaneCommand = (
    OpenSequence
    | CloseSequence
    | StepPlan
    | CopyBlocks
    | Deliver
    | Report
    | WantSpill
    | SpillFreed
    | LendSlabs
    | TakeBackSlabs
    | DropSlabs
    | FillSlabs
    | EvictWeights
    | RestoreWeights
)
