"""What enters the lane core and what it answers. The core itself is in lane.py."""

from forebay.transport.messages import (
    Cancel,
    CloseSequence,
    Message,
    OpenSequence,
    Start,
    StepDone,
    StepFailed,
    StepPlan,
    ToFrontDoor,
    ToScheduler,
)


class ModelOpened(Message, frozen=True):
    """A model can run: its sequences may start. `popularity` as in `ModelSpec`."""

    model: str
    block_bytes: int
    max_sequences: int
    step_tokens: int
    popularity: float = 1.0


class Reset(Message, frozen=True):
    """The scheduler has forgotten this worker: drop every request, say nothing."""

    reason: str


LaneEvent = ModelOpened | Start | Cancel | StepDone | StepFailed | Reset


class Deliver(Message, frozen=True):
    """One frame for the front door that listens at `sink`."""

    sink: str
    messages: tuple[ToFrontDoor, ...]


class Report(Message, frozen=True):
    """For the scheduler."""

    message: ToScheduler


LaneCommand = OpenSequence | CloseSequence | StepPlan | Deliver | Report
