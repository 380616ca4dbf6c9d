"""A model that its device has served before is loaded again until that succeeds; one that it never served is not."""

from forebay.sched.backoff import LONGEST_UNUSABLE_S
from forebay.sched.central_events import PeerGone, Tick
from forebay.transport.messages import Heartbeat, Load, ModelFailed, ModelReady, Query, Rejected, Start, Status
from tests.sched.test_central import Centre, kinds, sent, serving


def loads(centre: Centre) -> list[str]:
    return [message.model.name for message in sent(centre.do(Tick()), "w0") if isinstance(message, Load)]


def beat(centre: Centre) -> None:
    for peer in ("w0", "w1", "door"):
        centre.send(peer, Heartbeat())


def restart(centre: Centre) -> None:
    centre.do(PeerGone("w0", "planted"))
    centre.join("w0", "cpu:0", 3)
    centre.ready("w0", "popular")


def test_it_is_tried_again_with_growing_pauses_and_its_requests_wait() -> None:
    centre = serving()
    restart(centre)
    commands = centre.submit(1, model="rare")
    commands += centre.send("w0", ModelFailed("rare", "the folder does not exist"))
    assert "Rejected" not in kinds(commands)
    pauses = []
    for _ in range(12):
        began = centre.now
        while not loads(centre):
            centre.now += 0.125
            beat(centre)
        pauses.append(centre.now - began)
        assert loads(centre) == []
        assert "Rejected" not in kinds(centre.send("w0", ModelFailed("rare", "the folder does not exist")))
        (status,) = sent(centre.send("door", Query(1)))
        assert isinstance(status, Status)
        assert [(m.state, m.reason) for m in status.models if m.name == "rare"] == [
            ("waiting", "the folder does not exist")
        ]
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert pauses[-1] == LONGEST_UNUSABLE_S
    while not loads(centre):
        centre.now += 1.0
        beat(centre)
    started = sent(centre.send("w0", ModelReady("rare", 100, 10, 10)), "w0")
    assert [message.request for message in started if isinstance(message, Start)] == [1]


def test_one_that_the_device_never_served_stays_refused() -> None:
    centre = Centre()
    centre.open()
    centre.join("w0", "cpu:0", 1)
    centre.ready("w0", "popular")
    centre.send("w0", ModelFailed("rare", "not a model"))
    centre.now += 5.0
    assert loads(centre) == []
    (refused,) = sent(centre.submit(1, model="rare"), "door")
    assert isinstance(refused, Rejected)
    assert refused.kind == "failed"
    restart(centre)
    centre.send("w0", ModelFailed("rare", "not a model"))
    centre.now += 5.0
    assert loads(centre) == []


def test_a_replica_elsewhere_does_not_count() -> None:
    """`popular` was served by cpu:1 alone: cpu:0 may be too small for it."""
    centre = Centre()
    centre.open()
    centre.join("w0", "cpu:0", 1)
    centre.join("w1", "cpu:1", 2)
    centre.ready("w1", "popular")
    centre.send("w0", ModelFailed("popular", "too large"))
    centre.now += 5.0
    assert loads(centre) == []


def test_a_worker_that_goes_meanwhile_is_told_nothing() -> None:
    centre = serving()
    restart(centre)
    centre.send("w0", ModelFailed("rare", "gone"))
    centre.do(PeerGone("w0", "planted"))
    centre.now += 5.0
    assert loads(centre) == []
