"""The central core: who may join, what is admitted, where it runs, and how each request ends."""

from array import array

import msgspec
import pytest

from forebay.sched.central import MOST_EPOCHS, REQUESTS_PER_FRONT_DOOR, CentralCore
from forebay.sched.central_events import (
    CentralCommand,
    CentralSettings,
    Dismiss,
    Drain,
    Drained,
    PeerGone,
    Placement,
    Received,
    Send,
    Tick,
)
from forebay.transport.messages import (
    PROTOCOL_VERSION,
    Abort,
    Cancel,
    Catalog,
    Concluded,
    DeviceSettings,
    Ended,
    Heartbeat,
    Interrupted,
    Join,
    Leave,
    Load,
    Message,
    ModelFailed,
    ModelReady,
    ModelSpec,
    Open,
    Opened,
    Query,
    Refused,
    Rejected,
    Rejoin,
    Sampling,
    Start,
    Status,
    Submit,
    ToScheduler,
    Welcome,
)

DEVICE = DeviceSettings(1 << 20)
SETTINGS = CentralSettings(
    models=(
        Placement(ModelSpec("popular", "/m", max_sequences=4), ("cpu:0", "cpu:1")),
        Placement(ModelSpec("rare", "/m", max_sequences=4), ("cpu:0",)),
    ),
    devices={"cpu:0": DEVICE, "cpu:1": DEVICE},
    queue_bound=3,
    silence_s=10.0,
)
WINDOW = 6  # routing.window of max_sequences 4


class Centre:
    """A core with a clock, checked after every event."""

    def __init__(self, settings: CentralSettings = SETTINGS) -> None:
        self.core = CentralCore(settings)
        self.now = 100.0

    def send(self, peer: str, message: ToScheduler) -> list[CentralCommand]:
        return self.do(Received(peer, message))

    def do(self, event: Received | PeerGone | Tick | Drain) -> list[CentralCommand]:
        commands = self.core.handle(self.now, event)
        self.core.check()
        return commands

    def join(self, worker: str = "w0", gpu: str = "cpu:0", pid: int = 1) -> list[CentralCommand]:
        return self.send(worker, Join(PROTOCOL_VERSION, 1, gpu, pid, "host"))

    def open(self, door: str = "door") -> list[CentralCommand]:
        return self.send(door, Open(PROTOCOL_VERSION, 1, 9, "ipc:///sink", "http://x"))

    def ready(self, worker: str = "w0", *models: str) -> None:
        for model in models or ("popular", "rare"):
            self.send(worker, ModelReady(model, 100, 10, 10))

    def submit(self, request: int, model: str = "popular", prompt: int = 5, max_tokens: int = 10, epoch: int = 0,
               known: int | None = None) -> list[CentralCommand]:  # fmt: skip
        tokens = array("I", range(prompt if known is None else known)).tobytes()
        return self.send("door", Submit(request, epoch, model, tokens, prompt, Sampling(max_tokens)))


def serving() -> Centre:
    """Two workers with everything loaded, and a front door."""
    centre = Centre()
    centre.open()
    centre.join("w0", "cpu:0", 1)
    centre.join("w1", "cpu:1", 2)
    centre.ready("w0")
    centre.ready("w1", "popular")
    return centre


def sent(commands: list[CentralCommand], peer: str | None = None) -> list[Message]:
    return [c.message for c in commands if isinstance(c, Send) and peer in (None, c.peer)]


def kinds(commands: list[CentralCommand], peer: str | None = None) -> list[str]:
    return [type(message).__name__ for message in sent(commands, peer)]


def test_a_worker_that_joins_is_told_what_its_device_holds() -> None:
    centre = Centre()
    welcome, *loads = sent(centre.join("w0", "cpu:0"))
    assert welcome == Welcome(PROTOCOL_VERSION, 1, 1.0, DEVICE)
    assert [load.model.name for load in loads if isinstance(load, Load)] == ["popular", "rare"]
    assert kinds(centre.join("w1", "cpu:1")) == ["Welcome", "Load"]


def test_a_worker_of_a_device_nobody_configured_joins_with_nothing_to_load() -> None:
    assert sent(Centre().join("w", "cpu:7")) == [Welcome(PROTOCOL_VERSION, 1, 1.0, None)]


def test_a_second_worker_for_a_device_is_refused_and_the_first_goes_on() -> None:
    centre = serving()
    (refused,) = sent(centre.join("thief", "cpu:0", 77))
    assert isinstance(refused, Refused)
    assert "cpu:0 of host has a worker already: w0, process 1" in refused.reason
    assert kinds(centre.submit(1, "rare"), "w0") == ["Start"]


@pytest.mark.parametrize("message", [Join(99, 1, "cpu:0", 1, "h"), Open(99, 1, 1, "ipc:///s", "u")])
def test_another_protocol_version_is_refused_naming_both(message: ToScheduler) -> None:
    (refused,) = sent(Centre().send("p", message))
    assert isinstance(refused, Refused)
    assert f"protocol 99, this scheduler {PROTOCOL_VERSION}" in refused.reason


def test_a_stranger_is_asked_to_join_once_until_time_passes() -> None:
    centre = Centre()
    assert kinds(centre.send("w", Heartbeat())) == ["Rejoin"]
    assert centre.send("w", Ended(1, 0, "stop", 1)) == []
    centre.do(Tick())
    assert sent(centre.send("w", Heartbeat())) == [
        Rejoin("this scheduler does not know you: it was restarted, or you were silent too long")
    ]
    assert centre.send("w", Leave("bye")) == []


def test_each_front_door_has_its_own_request_numbers() -> None:
    centre = Centre()
    numbers = [
        message.first_request
        for door in ("a", "b", "a")
        for message in sent(centre.open(door))
        if isinstance(message, Opened)
    ]
    assert numbers == [REQUESTS_PER_FRONT_DOOR * n for n in (1, 2, 3)]


def test_load_is_spread_by_outstanding_tokens() -> None:
    centre = serving()
    first = [kinds(centre.submit(1, prompt=80), w) for w in ("w0",)]
    assert first == [["Start"]]
    for request in (2, 3):  # both still less than the one long prompt
        assert kinds(centre.submit(request, prompt=5), "w1") == ["Start"]


def test_a_full_window_waits_in_the_scheduler_and_an_ending_lets_the_oldest_in() -> None:
    centre = serving()
    for request in range(1, WINDOW + 1):
        assert kinds(centre.submit(request, "rare"), "w0") == ["Start"]
    assert centre.submit(10, "rare") == []
    assert centre.submit(11, "rare") == []
    (start,) = sent(centre.send("w0", Ended(3, 0, "stop", 4)), "w0")
    assert isinstance(start, Start)
    assert start.request == 10


def test_a_worker_that_shares_fairly_gets_all_requests_with_their_tenants() -> None:
    devices = {gpu: DeviceSettings(1, fairness="cfs") for gpu in ("cpu:0", "cpu:1")}
    centre = Centre(msgspec.structs.replace(SETTINGS, devices=devices))
    centre.join()
    centre.open()
    centre.ready("w0", "popular")
    for request in range(1, 3 * WINDOW):
        submit = Submit(request, 0, "popular", bytes(20), 5, Sampling(10), f"tenant {request}")
        (begun,) = sent(centre.send("door", submit), "w0")
        assert isinstance(begun, Start)
        assert begun.tenant == f"tenant {request}"


def test_what_exceeds_the_queue_bound_is_rejected() -> None:
    centre = serving()
    for request in range(1, WINDOW + 4):
        centre.submit(request, "rare")
    (rejected,) = sent(centre.submit(50, "rare"), "door")
    assert isinstance(rejected, Rejected)
    assert rejected.kind == "queue_full"
    assert "queue_bound: 3" in rejected.reason


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"model": "none"}, "unknown_model", "there is no model 'none' here (there is: popular, rare)"),
        ({"prompt": 95}, "context_too_long", "the prompt has 95 tokens and max_tokens is 10: 105 together"),
    ],
)
def test_what_cannot_be_served_is_rejected_with_a_reason(arguments: dict[str, object], kind: str, words: str) -> None:
    (rejected,) = sent(serving().submit(1, **arguments))  # type: ignore[arg-type]
    assert isinstance(rejected, Rejected)
    assert rejected.kind == kind
    assert words in rejected.reason


def test_before_the_first_replica_is_ready_requests_are_rejected_and_later_they_queue() -> None:
    centre = Centre()
    centre.open()
    centre.join()
    (rejected,) = sent(centre.submit(1))
    assert isinstance(rejected, Rejected)
    assert rejected.kind == "not_ready"
    centre.ready()
    centre.do(PeerGone("w0", "killed"))
    assert sent(centre.submit(2)) == []
    centre.join("w9", "cpu:0", 3)
    assert kinds(centre.send("w9", ModelReady("popular", 100, 10, 10)), "w9") == ["Start"]


def test_a_lost_workers_requests_are_interrupted_and_resume_in_their_old_order() -> None:
    centre = serving()
    for request in range(1, WINDOW + 1):
        centre.submit(request, "rare")
    centre.submit(20, "rare")
    interrupted = sent(centre.do(PeerGone("w0", "its process was ended by SIGKILL")), "door")
    assert [m.request for m in interrupted if isinstance(m, Interrupted)] == list(range(1, WINDOW + 1))
    for request in range(WINDOW, 0, -1):
        assert centre.submit(request, "rare", epoch=1, known=7) == []
    centre.join("w2", "cpu:0", 3)
    starts = sent(centre.send("w2", ModelReady("rare", 100, 10, 10)), "w2")
    assert [m.request for m in starts if isinstance(m, Start)] == list(range(1, WINDOW + 1))
    assert all(m.epoch == 1 and len(m.tokens) == 28 for m in starts if isinstance(m, Start))


def test_a_resubmission_needs_no_place_in_a_full_queue() -> None:
    centre = serving()
    for request in range(1, WINDOW + 4):
        centre.submit(request, "rare")
    centre.do(PeerGone("w0", "killed"))
    assert centre.submit(1, "rare", epoch=1) == []


def test_an_aborted_request_is_cancelled_and_keeps_its_place_in_the_window_until_the_worker_says_so() -> None:
    centre = serving()
    for request in range(1, WINDOW + 2):
        centre.submit(request, "rare")
    assert sent(centre.send("door", Abort(1)), "w0") == [Cancel(1, 0)]
    assert centre.send("door", Abort(1)) == []
    assert kinds(centre.send("w0", Ended(1, 0, "aborted", 0)), "w0") == ["Start"]


@pytest.mark.parametrize("message", [Abort(12345), Abort(1)])
def test_aborting_what_is_gone_does_nothing(message: Abort) -> None:
    centre = serving()
    centre.submit(1)
    centre.send("w0", Ended(1, 0, "stop", 1))
    assert centre.send("door", message) == []


def test_an_ending_under_an_old_epoch_or_from_another_worker_is_ignored() -> None:
    centre = serving()
    centre.submit(1, "rare")
    assert centre.send("w1", Ended(1, 0, "stop", 1)) == []
    assert centre.send("w0", Ended(1, 5, "stop", 1)) == []
    assert centre.core.live == 1


def test_a_request_whose_worker_dies_before_its_last_tokens_arrived_is_interrupted() -> None:
    centre = serving()
    centre.submit(1, "rare")
    assert kinds(centre.send("w0", Ended(1, 0, "length", 10))) == []
    (interrupted,) = [m for m in sent(centre.do(PeerGone("w0", "killed")), "door") if isinstance(m, Interrupted)]
    assert interrupted.request == 1


@pytest.mark.parametrize("order", [("door", "w0"), ("w0", "door")])
def test_a_request_is_over_once_both_its_worker_and_its_front_door_said_so(order: tuple[str, str]) -> None:
    centre = serving()
    centre.submit(1, "rare")
    words: dict[str, ToScheduler] = {"door": Concluded(1), "w0": Ended(1, 0, "stop", 3)}
    for peer in order:
        assert centre.core.live == 1
        assert centre.send(peer, words[peer]) == []
    assert centre.core.live == 0
    assert centre.core.endings == {"stop": 1}
    assert centre.do(PeerGone("w0", "killed")) != []
    assert centre.core.endings == {"stop": 1}


def test_another_front_door_can_not_end_a_request() -> None:
    centre = serving()
    centre.open("thief")
    centre.submit(1, "rare")
    assert centre.send("thief", Abort(1)) == []
    assert centre.send("thief", Concluded(1)) == []
    assert centre.core.live == 1


def test_the_schedulers_own_absence_is_not_held_against_its_peers() -> None:
    centre = serving()
    centre.do(Tick())
    centre.now += 60.0
    assert centre.do(Tick()) == []
    centre.now += 4.0
    assert centre.do(Tick()) == []


def test_a_request_goes_where_it_fits() -> None:
    centre = Centre()
    centre.open()
    centre.join("w0", "cpu:0", 1)
    centre.join("w1", "cpu:1", 2)
    centre.send("w0", ModelReady("popular", 50, 1, 1))
    centre.send("w1", ModelReady("popular", 500, 1, 1))
    for request in range(WINDOW):
        assert kinds(centre.submit(request, prompt=100, max_tokens=300), "w1") == ["Start"]
    assert kinds(centre.submit(50, prompt=100, max_tokens=300)) == [], "the one that could hold it is full"
    assert kinds(centre.submit(51, prompt=10), "w0") == ["Start"], "a younger one does not wait for it"
    centre.do(PeerGone("w1", "killed"))
    resubmitted = centre.submit(0, prompt=100, max_tokens=300, epoch=1)
    assert kinds(resubmitted) == [], "it waits for a replica that can hold it"


def test_a_request_that_no_replica_can_hold_any_more_is_rejected() -> None:
    centre = serving()
    centre.submit(1, prompt=60, max_tokens=30)
    (lost,) = [w for w in ("w0", "w1") if centre.core._workers[w].requests]
    other = {"w0": "w1", "w1": "w0"}[lost]
    centre.do(PeerGone(other, "killed"))
    centre.do(PeerGone(lost, "killed"))
    centre.submit(1, prompt=60, max_tokens=30, epoch=1)
    centre.join("w2", "cpu:0", 3)
    centre.join("w3", "cpu:1", 4)
    assert "Rejected" not in kinds(centre.send("w2", ModelReady("popular", 50, 1, 1)))
    (rejected,) = [
        m for m in sent(centre.send("w3", ModelReady("popular", 50, 1, 1)), "door") if isinstance(m, Rejected)
    ]
    assert rejected.kind == "context_too_long"


def test_a_request_that_takes_every_worker_down_is_given_up() -> None:
    centre = serving()
    centre.submit(1, "rare")
    for epoch in range(1, MOST_EPOCHS + 2):
        worker = next(iter(w for w in centre.core._workers if w != "w1"))
        assert "Interrupted" in kinds(centre.do(PeerGone(worker, "killed")), "door")
        centre.join(f"again{epoch}", "cpu:0", 100 + epoch)
        centre.ready(f"again{epoch}")
        last = sent(centre.submit(1, "rare", epoch=epoch))
    (rejected,) = last
    assert isinstance(rejected, Rejected)
    assert "9 workers were lost while they ran this request" in rejected.reason


def test_a_silent_peer_is_lost_and_dismissed() -> None:
    centre = serving()
    centre.submit(1, "rare")
    centre.do(Tick())
    for _ in range(4):
        centre.now += 2.7
        for peer in ("w1", "door"):
            centre.send(peer, Heartbeat())
        commands = centre.do(Tick())
    assert "Interrupted" in kinds(commands, "door")
    assert [c.peer for c in commands if isinstance(c, Dismiss)] == ["w0"]


def test_when_its_front_door_is_lost_a_request_ends_everywhere() -> None:
    centre = serving()
    centre.submit(1, "rare")
    assert sent(centre.do(PeerGone("door", "killed")), "w0") == [Cancel(1, 0)]
    centre.send("w0", Ended(1, 0, "aborted", 0))
    assert centre.core.live == 0


def test_a_model_that_fails_on_all_its_devices_fails_its_requests_and_the_rest_goes_on() -> None:
    centre = Centre()
    centre.open()
    centre.join()
    centre.send("w0", ModelFailed("rare", "out of memory"))
    centre.send("w0", ModelReady("popular", 100, 1, 1))
    (rejected,) = sent(centre.submit(1, "rare"))
    assert isinstance(rejected, Rejected)
    assert (rejected.kind, rejected.reason) == ("failed", "model 'rare' could not be loaded: out of memory")
    assert kinds(centre.submit(2), "w0") == ["Start"]
    (status,) = sent(centre.send("door", Query(4)))
    assert isinstance(status, Status)
    assert [(m.name, m.state, m.reason) for m in status.models] == [
        ("popular", "ready", ""),
        ("rare", "failed", "out of memory"),
    ]
    assert [(w.id, w.state, w.models) for w in status.workers] == [("w0", "ready", ("popular",))]


def test_draining_takes_no_new_requests_and_says_when_the_last_one_ended() -> None:
    centre = serving()
    centre.submit(1, "rare")
    (catalog,) = sent(centre.do(Drain()))
    assert isinstance(catalog, Catalog)
    assert catalog.draining
    (rejected,) = sent(centre.submit(2))
    assert isinstance(rejected, Rejected)
    assert rejected.kind == "draining"
    assert Drained() not in centre.send("w0", Ended(1, 0, "stop", 3)), "its last tokens are still on their way"
    assert Drained() in centre.send("door", Concluded(1))


def test_draining_with_nothing_to_do_is_done_at_once() -> None:
    assert Drained() in serving().do(Drain())


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("w0", Submit(1, 0, "popular", b"", 0, Sampling(1))),
        ("door", Ended(1, 0, "stop", 1)),
        ("w0", ModelReady("popular", 1, 1, 1)),
        ("w1", ModelReady("rare", 1, 1, 1)),
        ("door", Submit(1, 3, "popular", b"", 0, Sampling(1))),
    ],
)
def test_a_peer_whose_story_does_not_add_up_is_dismissed_alone(peer: str, message: ToScheduler) -> None:
    centre = serving()
    centre.submit(1, "popular")
    commands = centre.send(peer, message)
    assert [c.peer for c in commands if isinstance(c, Dismiss)] == [peer]
    assert "Refused" in kinds(commands, peer)
