"""The central core: admission, routing and the one ending of every request, in the scheduler process.

Only what decides lives here, as `handle(now, event) -> commands`. `now` is any clock in seconds that does not go back.
Prompts pass through as bytes that nobody here reads.
"""

from typing import assert_never

from forebay.sched import routing
from forebay.sched.admission import refusal, too_long
from forebay.sched.central_events import (
    CentralCommand,
    CentralEvent,
    CentralSettings,
    Dismiss,
    Drain,
    Drained,
    PeerGone,
    Received,
    Send,
    Tick,
)
from forebay.sched.central_state import FrontDoor, Model, Request, Worker
from forebay.sched.overview import hopeless, model_statuses, worker_statuses
from forebay.sched.states import IllegalTransition
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Abort,
    Cancel,
    Catalog,
    Concluded,
    Ended,
    Heartbeat,
    Interrupted,
    Join,
    Leave,
    Load,
    ModelFailed,
    ModelReady,
    ModelStatus,
    Open,
    Opened,
    PoolResized,
    Query,
    Refused,
    Rejected,
    RejectKind,
    Rejoin,
    Start,
    Started,
    Status,
    Submit,
    ToFrontDoor,
    ToScheduler,
    ToWorker,
    WeightsMoved,
    Welcome,
)

REQUESTS_PER_FRONT_DOOR = 1 << 32
"""Request numbers of the n-th front door begin at n times this: no two requests ever share one."""

MOST_EPOCHS = 8
"""A request that took so many workers down with it, or saw them go, is not given to another."""


class CentralCore:
    """Several calls to `handle`, one after the other; the commands of each are to be carried out in order."""

    def __init__(self, settings: CentralSettings) -> None:
        self.settings = settings
        self._models = {place.spec.name: Model(place.spec, place.gpus) for place in settings.models}
        self._workers: dict[str, Worker] = {}
        self._doors: dict[str, FrontDoor] = {}
        self._requests: dict[int, Request] = {}
        self._strangers: set[str] = set()
        self._doors_opened = 0
        self._last_tick = 0.0
        self._arrivals = 0
        self._draining = False
        self._commands: list[CentralCommand] = []
        self.endings: dict[str, int] = {}
        """How many requests ended, by how: a finish reason or a kind of rejection."""

    def handle(self, now: float, event: CentralEvent) -> list[CentralCommand]:
        match event:
            case Received(peer, message):
                try:
                    self._received(now, peer, message)
                except IllegalTransition as error:
                    # A peer whose story does not add up is worth less than the others' service.
                    self._lose(peer, str(error))
                    self._send(peer, Refused(str(error)))
                    self._commands.append(Dismiss(peer, str(error)))
            case PeerGone(peer, reason):
                self._lose(peer, reason)
            case Tick():
                self._strangers.clear()
                self._find_silent(now)
                self._load_again(now)
            case Drain():
                self._draining = True
                self._announce()
                self._say_if_drained()
            case _:
                assert_never(event)
        commands, self._commands = self._commands, []
        return commands

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def check(self) -> None:
        """Asserts that every live request is in exactly the places that its state says."""
        for request in self._requests.values():
            model = self._models[request.model]
            worker = self._workers.get(request.worker) if request.worker else None
            assert (request.state == "queued") == (request.number in model.queue), request
            on_worker = request.state in ("running", "cancelling")
            assert on_worker == (worker is not None and request.number in worker.requests), request
            delivering = request.state == "delivering"
            assert delivering == (worker is not None and request.number in worker.delivering), request
            assert request.door in self._doors or request.state == "cancelling", request
        for worker in self._workers.values():
            held = [self._requests[number] for number in worker.requests]
            for name in worker.replicas:
                mine = [request for request in held if request.model == name]
                assert worker.held(name) == len(mine), (worker.id, name)
            assert worker.outstanding == sum(request.cost for request in held), worker.id
        for model in self._models.values():
            name = model.spec.name
            assert model.ranking.loads == {
                worker.id: worker.outstanding
                for worker in self._workers.values()
                if worker.serves(name) and worker.held(name) < self._window(worker, model)
            }, name
            assert list(model.queue) == sorted(model.queue, key=model.queue.__getitem__), model.spec.name

    # Peers ---------------------------------------------------------------------------------------------------------

    def _received(self, now: float, peer: str, message: ToScheduler) -> None:
        if isinstance(message, Join):
            return self._join(now, peer, message)
        if isinstance(message, Open):
            return self._open(now, peer, message)
        if (worker := self._workers.get(peer)) is not None:
            worker.last_heard = now
            return self._from_worker(now, worker, message)
        if (door := self._doors.get(peer)) is not None:
            door.last_heard = now
            return self._from_door(door, message)
        if not isinstance(message, Leave) and peer not in self._strangers:
            self._strangers.add(peer)  # told once a tick, however much it still has to say
            self._send(
                peer,
                Rejoin("this scheduler does not know you: it was restarted, or you were silent too long"),
            )

    def _join(self, now: float, peer: str, join: Join) -> None:
        if self._versions_differ(peer, join.version):
            return
        self._lose(peer, "it joined anew")
        for other in self._workers.values():
            if other.gpu == join.gpu and other.host == join.host:
                reason = f"{join.gpu} of {join.host} has a worker already: {other.id}, process {other.pid}"
                return self._send(peer, Refused(reason))
        worker = Worker(peer, join.gpu, join.host, join.pid, now)
        self._workers[peer] = worker
        settings = self.settings.devices.get(join.gpu)
        self._send(peer, Welcome(PROTOCOL_VERSION, join.session, self.settings.heartbeat_s, settings))
        if settings is not None:
            for model in self._models.values():
                if join.gpu in model.gpus:
                    model.replicas[peer] = worker.add(model.spec.name)
                    self._send(peer, Load(model.spec))
        worker.settle()
        self._announce()

    def _open(self, now: float, peer: str, message: Open) -> None:
        if self._versions_differ(peer, message.version):
            return
        self._lose(peer, "it opened anew")
        self._doors[peer] = FrontDoor(peer, message.sink, now)
        self._doors_opened += 1
        first = self._doors_opened * REQUESTS_PER_FRONT_DOOR
        self._send(peer, Opened(PROTOCOL_VERSION, message.session, self.settings.heartbeat_s, first))
        self._send(peer, self._catalog())

    def _versions_differ(self, peer: str, version: int) -> bool:
        if version == PROTOCOL_VERSION:
            return False
        reason = f"you speak protocol {version}, this scheduler {PROTOCOL_VERSION}: install the same forebay on both"
        self._send(peer, Refused(reason))
        return True

    def _find_silent(self, now: float) -> None:
        peers: list[Worker | FrontDoor] = [*self._workers.values(), *self._doors.values()]
        absent, self._last_tick = now - self._last_tick, now
        if absent > self.settings.silence_s / 2:
            # It was we who did not listen (stopped, or starved of processor time): what they said meanwhile is unread.
            for peer in peers:
                peer.last_heard = now
        for peer in peers:
            silence = now - peer.last_heard
            if silence > self.settings.silence_s:
                reason = f"silent for {silence:.1f} s (allowed: {self.settings.silence_s:g})"
                self._lose(peer.id, reason)
                self._commands.append(Dismiss(peer.id, reason))

    def _lose(self, peer: str, reason: str) -> None:
        if (worker := self._workers.pop(peer, None)) is not None:
            worker.move("lose")
            for name in worker.replicas:
                self._models[name].ranking.remove(peer)
                del self._models[name].replicas[peer]
            for number in sorted(worker.requests | worker.delivering):
                request = self._requests[number]
                request.move("lose")
                if number in worker.requests:
                    worker.release(request)
                request.worker = ""
                if request.state == "interrupted":
                    self._send(request.door, Interrupted(number, request.epoch, f"worker {peer} was lost: {reason}"))
                else:
                    self._conclude(request, "aborted")
            self._fail_hopeless()
            self._announce()
        elif (door := self._doors.pop(peer, None)) is not None:
            for number in sorted(door.requests):
                self._abort(self._requests[number])

    # Workers -------------------------------------------------------------------------------------------------------

    def _from_worker(self, now: float, worker: Worker, message: ToScheduler) -> None:
        match message:
            case Started() | Heartbeat():
                pass
            case Ended(number, epoch, reason, generated, cached):
                request = self._requests.get(number)
                if request is None or number not in worker.requests or request.epoch != epoch:
                    return  # an ending that crossed with ours
                request.move("end")
                worker.release(request)
                self._rank(worker)
                model = self._models[request.model]
                model.prompt_tokens += len(request.submit.tokens) // 4
                model.cached_tokens += cached
                if reason in ("stop", "length"):
                    model.mean_output = routing.updated_mean(model.mean_output, generated)
                request.outcome = reason
                if request.state == "delivering":
                    worker.delivering.add(number)
                else:
                    request.worker = ""
                    self._conclude(request, reason)
                self._dispatch(model)
            case ModelReady(name, max_context):
                worker.finish_loading(name, "ready", max_context)
                self._rank(worker)
                self._models[name].was_ready = True
                self._models[name].served_on.add((worker.host, worker.gpu))
                self._models[name].max_context = max(
                    replica.max_context for replica in self._models[name].replicas.values() if replica.state == "ready"
                )
                self._announce()
                self._dispatch(self._models[name])
            case ModelFailed(name, reason):
                worker.finish_loading(name, "fail", reason=reason)
                if (worker.host, worker.gpu) in self._models[name].served_on:
                    worker.replicas[name].try_later(now)
                self._fail_hopeless()
                self._announce()
            case PoolResized(given=given):
                worker.given = given
            case WeightsMoved(name, resident, seconds):
                model = self._models[name]
                if resident:
                    model.restores += 1
                    model.restore_seconds = seconds
                else:
                    model.evictions += 1
            case Leave(reason):
                self._lose(worker.id, f"it left: {reason}")
            case _:
                raise IllegalTransition(
                    f"worker {worker.id} sent {type(message).__name__}, which only front doors send"
                )

    def _load_again(self, now: float) -> None:
        """What a device has served before is there again when the cause is gone: a file, a neighbour's memory."""
        for worker in self._workers.values():
            for name, replica in worker.replicas.items():
                if replica.again_at is not None and replica.again_at <= now:
                    worker.load_again(name)
                    self._send(worker.id, Load(self._models[name].spec))
                    self._announce()

    def _dispatch(self, model: Model) -> None:
        """Gives waiting requests to replicas, oldest first, while any has room."""
        for number in list(model.queue):
            best = model.ranking.best()
            if best is None:
                return
            request = self._requests[number]
            fits = request.context <= model.replicas[best].max_context
            worker = self._workers[best] if fits else self._choose_larger(model, request)
            if worker is None:
                if request.context > model.max_context and model.complete:
                    self._reject(request, "context_too_long", too_long(model, request.submit))
                continue  # it is too long for those with room; a younger one may not be
            del model.queue[number]
            request.move("dispatch")
            submit = request.submit
            cost = routing.outstanding_tokens(
                len(submit.tokens) // 4, submit.prompt_tokens, submit.sampling.max_tokens, model.mean_output
            )
            worker.hold(request, cost)
            self._rank(worker)
            self._send(
                worker.id,
                Start(
                    submit.request,
                    submit.epoch,
                    submit.model,
                    submit.tokens,
                    submit.prompt_tokens,
                    submit.sampling,
                    self._doors[request.door].sink,
                    submit.tenant,
                ),
            )

    def _choose_larger(self, model: Model, request: Request) -> Worker | None:
        """The least loaded worker with room for the request and memory for it: replicas may have pools of any size."""
        fitting = (
            (load, worker)
            for worker, load in model.ranking.loads.items()
            if request.context <= model.replicas[worker].max_context
        )
        _, worker = min(fitting, default=(0, ""))
        return self._workers.get(worker)

    def _window(self, worker: Worker, model: Model) -> int:
        """How many requests of the model this worker may have."""
        settings = self.settings.devices.get(worker.gpu)
        fair = settings is not None and settings.fairness != "fcfs"
        return max(model.window, routing.FAIR_WINDOW) if fair else model.window

    def _rank(self, worker: Worker) -> None:
        """Its load has changed, or what it serves: every model that it serves needs to know."""
        for name, replica in worker.replicas.items():
            model = self._models[name]
            if replica.state == "ready" and worker.held(name) < self._window(worker, model):
                model.ranking.update(worker.id, worker.outstanding)
            else:
                model.ranking.remove(worker.id)

    def _fail_hopeless(self) -> None:
        """A model that failed on every device that could hold it never comes: what waits for it is told so."""
        for model in self._models.values():
            if model.queue and (reason := hopeless(model)):
                for number in list(model.queue):
                    self._reject(self._requests[number], "failed", reason)

    # Requests ------------------------------------------------------------------------------------------------------

    def _from_door(self, door: FrontDoor, message: ToScheduler) -> None:
        match message:
            case Submit(request=number):
                request = self._requests.get(number)
                if request is None:
                    self._admit(door, message)
                elif request.state == "interrupted" and message.epoch == request.epoch + 1 and request.door == door.id:
                    request.move("resubmit")
                    request.submit = message
                    self._enqueue(request)
                else:
                    raise IllegalTransition(
                        f"front door {door.id} submitted request {number} as epoch {message.epoch}, "
                        f"but it is {request.state} in epoch {request.epoch}"
                    )
            case Abort(number) | Concluded(number):
                request = self._requests.get(number)
                if request is not None and request.door == door.id:
                    self._finish(request, "abort" if isinstance(message, Abort) else "conclude")
            case Query(query):
                self._send(
                    door.id,
                    Status(query, self._model_statuses(), worker_statuses(self._workers, self._draining)),
                )
            case Leave(reason):
                self._lose(door.id, f"it left: {reason}")
            case Heartbeat():
                pass
            case _:
                raise IllegalTransition(f"front door {door.id} sent {type(message).__name__}, which only workers send")

    def _admit(self, door: FrontDoor, submit: Submit) -> None:
        refused = refusal(submit, self._models, self._draining, self.settings.queue_bound)
        if refused is not None:
            kind, reason = refused
            self.endings[kind] = self.endings.get(kind, 0) + 1
            self._send(door.id, Rejected(submit.request, submit.epoch, kind, reason))
            return
        request = Request(submit.request, submit.model, submit, door.id, self._arrivals)
        self._arrivals += 1
        self._requests[submit.request] = request
        door.requests.add(submit.request)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        model = self._models[request.model]
        model.enqueue(request)
        if reason := hopeless(model):
            self._reject(request, "failed", reason)
        elif request.epoch > MOST_EPOCHS:
            lost = f"{request.epoch} workers were lost while they ran this request; it is not tried again"
            self._reject(request, "failed", lost)
        self._dispatch(model)

    def _reject(self, request: Request, kind: RejectKind, reason: str) -> None:
        self._models[request.model].queue.pop(request.number, None)
        request.move("reject")
        self._send(request.door, Rejected(request.number, request.epoch, kind, reason))
        self._conclude(request, kind)

    def _abort(self, request: Request) -> None:
        self._finish(request, "abort")

    def _finish(self, request: Request, event: str) -> None:
        """The front door wants no more of it (`abort`), or has all of it (`conclude`)."""
        if request.state == "cancelling" or (event == "conclude" and request.state in ("queued", "interrupted")):
            return
        self._models[request.model].queue.pop(request.number, None)
        was_delivering = request.state == "delivering"
        request.move(event)
        if was_delivering:
            self._workers[request.worker].delivering.discard(request.number)
        if request.state == "ended":
            self._conclude(request, request.outcome or "aborted")
        elif event == "abort":
            self._send(request.worker, Cancel(request.number, request.epoch))

    def _conclude(self, request: Request, how: str) -> None:
        del self._requests[request.number]
        if (door := self._doors.get(request.door)) is not None:
            door.requests.discard(request.number)
        self.endings[how] = self.endings.get(how, 0) + 1
        self._say_if_drained()

    def _say_if_drained(self) -> None:
        if self._draining and not self._requests:
            self._commands.append(Drained())

    # What others are told ------------------------------------------------------------------------------------------

    def _send(self, peer: str, message: ToWorker | ToFrontDoor) -> None:
        self._commands.append(Send(peer, message))

    def _model_statuses(self) -> tuple[ModelStatus, ...]:
        return model_statuses(self._models, self._workers)

    def _catalog(self) -> Catalog:
        return Catalog(self._model_statuses(), self._draining)

    def _announce(self) -> None:
        if self._doors:
            catalog = self._catalog()
            for door in self._doors:
                self._send(door, catalog)
