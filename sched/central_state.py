"""What the central core keeps: models, workers, front doors and requests. Records with a few rules, no decisions."""

from dataclasses import dataclass, field
from typing import cast

from forebay.sched.backoff import LONGEST_UNUSABLE_S, restart_delay
from forebay.sched.routing import Ranking, window
from forebay.sched.states import REPLICA, REQUEST, WORKER, IllegalTransition, move
from forebay.transport.messages import ModelSpec, Submit, WorkerState


@dataclass(slots=True)
class Request:
    """A live request. `arrival` orders all requests and survives resubmission. `cost`: tokens it was counted with on
    its worker; `outcome`: how the worker says that it ended."""

    number: int
    model: str
    submit: Submit
    door: str
    arrival: int
    state: str = "queued"
    worker: str = ""
    cost: int = 0
    outcome: str = ""

    @property
    def epoch(self) -> int:
        return self.submit.epoch

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.submit.prompt_tokens + self.submit.sampling.max_tokens

    def move(self, event: str) -> None:
        self.state = move(REQUEST, "request", self.number, self.state, event)


@dataclass(slots=True)
class Model:
    """`queue` holds the numbers of waiting requests, oldest first, with their arrivals. `mean_output` in tokens;
    `max_context` the most of its ready replicas, or what it was when there last was one (0: never). `replicas` are by
    worker, `served_on` are the devices (host, name) that ever had a ready one, `ranking` are the workers with room for
    one more, `window` is how many requests each may hold."""

    spec: ModelSpec
    gpus: tuple[str, ...]
    queue: dict[int, int] = field(default_factory=dict)
    was_ready: bool = False
    served_on: set[tuple[str, str]] = field(default_factory=set)
    max_context: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    restores: int = 0
    restore_seconds: float = 0.0
    mean_output: float = 128.0
    replicas: dict[str, "Replica"] = field(default_factory=dict)
    ranking: Ranking = field(default_factory=Ranking)
    window: int = field(init=False)

    def __post_init__(self) -> None:
        self.window = window(self.spec)

    @property
    def complete(self) -> bool:
        """Every replica that the configuration places is there and ready."""
        return sum(replica.state == "ready" for replica in self.replicas.values()) == len(self.gpus)

    def enqueue(self, request: Request) -> None:
        late = bool(self.queue) and request.arrival < next(reversed(self.queue.values()))
        self.queue[request.number] = request.arrival
        if late:  # a resubmitted request takes the place that it had
            self.queue = dict(sorted(self.queue.items(), key=lambda item: item[1]))


@dataclass(slots=True)
class Replica:
    """One model on one worker. `max_context` in tokens. `failures` in a row, for a `reason`; `again_at`: when loading
    is tried again (None: it is not)."""

    state: str = "loading"
    max_context: int = 0
    reason: str = ""
    failures: int = 0
    again_at: float | None = None

    def try_later(self, now: float) -> None:
        """It has failed: each time in a row it waits for longer."""
        self.failures += 1
        self.again_at = now + restart_delay(self.failures, LONGEST_UNUSABLE_S)


@dataclass(slots=True)
class Worker:
    """`requests` are those that it holds, `outstanding` all their tokens; `delivering` those that it has ended, but
    whose last tokens the front door does not have yet. `given`: bytes of its pool that are the device's for now."""

    id: str
    gpu: str
    host: str
    pid: int
    last_heard: float
    state: str = "loading"
    replicas: dict[str, Replica] = field(default_factory=dict)
    requests: set[int] = field(default_factory=set)
    delivering: set[int] = field(default_factory=set)
    outstanding: int = 0
    given: int = 0
    _held: dict[str, int] = field(default_factory=dict)

    @property
    def status(self) -> WorkerState:
        return cast(WorkerState, self.state)

    def move(self, event: str) -> None:
        self.state = move(WORKER, "worker", self.id, self.state, event)

    def add(self, model: str) -> Replica:
        self.replicas[model] = Replica()
        return self.replicas[model]

    def finish_loading(self, model: str, event: str, max_context: int = 0, reason: str = "") -> None:
        """Raises IllegalTransition for a model that this worker was not told to load."""
        replica = self.replicas.get(model)
        if replica is None:
            raise IllegalTransition(f"worker {self.id} speaks of model {model!r}, which it was not told to load")
        replica.state = move(REPLICA, f"on worker {self.id} model", model, replica.state, event)
        replica.max_context, replica.reason = max_context, reason
        self.settle()

    def load_again(self, model: str) -> None:
        replica = self.replicas[model]
        replica.state = move(REPLICA, f"on worker {self.id} model", model, replica.state, "retry")
        replica.again_at = None

    def settle(self) -> None:
        """Nothing left to load: the worker is ready (for what did load)."""
        if self.state == "loading" and all(replica.state != "loading" for replica in self.replicas.values()):
            self.move("loaded")

    def serves(self, model: str) -> bool:
        replica = self.replicas.get(model)
        return replica is not None and replica.state == "ready"

    def held(self, model: str) -> int:
        """Requests of the model that this worker has and has not ended."""
        return self._held.get(model, 0)

    def hold(self, request: Request, cost: int) -> None:
        request.worker, request.cost = self.id, cost
        self.requests.add(request.number)
        self.outstanding += cost
        self._held[request.model] = self.held(request.model) + 1

    def release(self, request: Request) -> None:
        self.requests.remove(request.number)
        self.outstanding -= request.cost
        self._held[request.model] -= 1
        request.cost = 0


@dataclass(slots=True)
class FrontDoor:
    id: str
    sink: str
    last_heard: float
    requests: set[int] = field(default_factory=set)
