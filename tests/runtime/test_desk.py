"""The desk: tokens in order, each once, one ending; resubmission with what was delivered."""

import asyncio
from array import array

import pytest

from forebay.runtime.desk import Desk, RequestFailed
from forebay.transport.messages import (
    Abort,
    Finished,
    Interrupted,
    Opened,
    Query,
    Rejected,
    Sampling,
    Status,
    Stop,
    Submit,
    Tokens,
    ToScheduler,
)

FIRST = 1000


class Front:
    def __init__(self) -> None:
        self.sent: list[ToScheduler] = []
        self.desk = Desk(self.sent.append)
        self.desk.receive(Opened(1, 1, 1.0, FIRST))

    def tokens(self, *rows: tuple[int, int, int]) -> None:
        columns = [array(kind, column).tobytes() for kind, column in zip("QII", zip(*rows, strict=True), strict=True)]
        self.desk.receive(Tokens(*columns))


async def test_tokens_are_read_in_order_and_then_it_is_finished() -> None:
    front = Front()
    delivery = front.desk.open("m", [5, 6], Sampling(3))
    assert front.sent == [Submit(FIRST, 0, "m", array("I", [5, 6]).tobytes(), 2, Sampling(3))]
    front.tokens((FIRST, 0, 7), (FIRST, 0, 8))
    assert await delivery.next() == [7, 8]
    front.tokens((FIRST, 0, 9))
    front.desk.receive(Finished(FIRST, 0, "length"))
    assert await delivery.next() == [9]
    assert await delivery.next() == []
    assert (delivery.finish_reason, delivery.generated, front.desk.live) == ("length", 3, 0)


async def test_a_reader_waits_until_something_comes() -> None:
    front = Front()
    delivery = front.desk.open("m", [5], Sampling(3))
    reading = asyncio.create_task(delivery.next())
    await asyncio.wait([reading], timeout=0.01)
    assert not reading.done()
    front.tokens((FIRST, 0, 7))
    assert await asyncio.wait_for(reading, 5) == [7]


async def test_an_interrupted_request_is_submitted_again_with_what_was_delivered_and_old_frames_are_dropped() -> None:
    front = Front()
    delivery = front.desk.open("m", [5, 6], Sampling(4))
    front.tokens((FIRST, 0, 7))
    front.desk.receive(Interrupted(FIRST, 0, "lost"))
    assert front.sent[-1] == Submit(FIRST, 1, "m", array("I", [5, 6, 7]).tobytes(), 2, Sampling(4))
    front.tokens((FIRST, 0, 8))
    front.desk.receive(Finished(FIRST, 0, "stop"))
    front.desk.receive(Rejected(FIRST, 0, "failed", "old"))
    front.desk.receive(Interrupted(FIRST, 0, "told twice"))
    front.tokens((FIRST, 1, 88))
    assert await delivery.next() == [7, 88]
    assert delivery.state == "live"
    assert len(front.sent) == 2


async def test_a_request_that_ended_here_is_aborted_when_its_worker_was_lost_before_it_said_so() -> None:
    front = Front()
    front.desk.open("m", [5], Sampling(1))
    front.tokens((FIRST, 0, 7))
    front.desk.receive(Finished(FIRST, 0, "length"))
    front.desk.receive(Interrupted(FIRST, 0, "lost"))
    assert front.sent[-1] == Abort(FIRST)


async def test_closing_aborts_once_and_only_what_lives() -> None:
    front = Front()
    delivery = front.desk.open("m", [5], Sampling(3))
    delivery.close()
    delivery.close()
    front.tokens((FIRST, 0, 7))
    assert front.sent[1:] == [Abort(FIRST)]
    with pytest.raises(ValueError, match="request 1000 was closed by its reader"):
        await delivery.next()


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (Rejected(FIRST, 0, "queue_full", "full"), "queue_full", "full"),
        (Finished(FIRST, 0, "failed", "boom"), "failed", "boom"),
        (Stop("bye"), "draining", "the server is shutting down: bye"),
    ],
)
async def test_a_failure_comes_after_the_last_token(
    message: Rejected | Finished | Stop, kind: str, reason: str
) -> None:
    front = Front()
    delivery = front.desk.open("m", [5], Sampling(3))
    front.tokens((FIRST, 0, 7))
    front.desk.receive(message)
    assert await delivery.next() == [7]
    with pytest.raises(RequestFailed, match=reason) as failure:
        await delivery.next()
    assert failure.value.kind == kind


async def test_a_desk_that_was_forgotten_submits_everything_under_new_numbers() -> None:
    front = Front()
    delivery = front.desk.open("m", [5], Sampling(3))
    front.tokens((FIRST, 0, 7))
    front.desk.receive(Opened(1, 2, 1.0, 5000))
    assert front.sent[-1] == Submit(5000, 0, "m", array("I", [5, 7]).tobytes(), 1, Sampling(3))
    front.tokens((FIRST, 0, 99), (5000, 0, 8))
    assert await delivery.next() == [7, 8]


@pytest.mark.parametrize("lengths", [(8, 4, 0), (8, 4, 3), (16, 4, 8), (8, 8, 4), (5, 4, 4)])
async def test_tokens_whose_columns_do_not_match_change_nothing(lengths: tuple[int, int, int]) -> None:
    front = Front()
    delivery = front.desk.open("m", [5], Sampling(3))
    columns = [(array("Q", [FIRST]).tobytes() * 2)[: lengths[0]], *(bytes(length) for length in lengths[1:])]
    with pytest.raises(ValueError, match=rf"{lengths[0]}, {lengths[1]} and {lengths[2]} bytes.*8, 4 and 4"):
        front.desk.receive(Tokens(*columns))
    assert delivery.generated == 0
    front.tokens((FIRST, 0, 7))
    assert await delivery.next() == [7]


def test_before_the_scheduler_answered_nothing_can_be_opened() -> None:
    with pytest.raises(RequestFailed, match="its scheduler has not answered yet"):
        Desk(lambda message: None).open("m", [1], Sampling(1))


async def test_a_status_answers_its_own_query() -> None:
    front = Front()
    asked = asyncio.create_task(front.desk.status())
    await asyncio.wait([asked], timeout=0.01)
    assert front.sent == [Query(0)]
    front.desk.receive(Status(77, (), ()))
    front.desk.receive(Status(0, (), ()))
    assert (await asked).query == 0
