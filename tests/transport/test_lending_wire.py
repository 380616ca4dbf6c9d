"""The bytes of lending: what a party of another build must find in them."""

from typing import get_args

import msgpack
import pytest

from forebay.transport.codec import encode, read_to_front_door, read_to_party, read_to_scheduler
from forebay.transport.messages import (
    Answered,
    AskLending,
    Attach,
    Attached,
    Borrow,
    Complain,
    Detach,
    FromParty,
    GpuStatus,
    Grant,
    Granted,
    Holding,
    LeaseOver,
    LeaseStatus,
    Lend,
    LendingAnswer,
    LendingStatus,
    LendingWish,
    Map,
    Mapped,
    Message,
    Offer,
    ReclaimGpu,
    Release,
    Returned,
    Revoke,
    RevokeLease,
    TakeBack,
    ToParty,
    Unmap,
    Yielded,
)

HELD = Holding(7, 3, (1, 2), 4096, "b", "/l", "t")
HELD_BYTES = [7, 3, [1, 2], 4096, "b", "/l", "t"]

WIRE: list[tuple[Message, list[object]]] = [
    (
        Attach(1, 2, "p", 0, 10, 1000, "h", "c", "/l", 4096, (5,), (HELD,), (), "n"),
        ["Attach", 1, 2, "p", 0, 10, 1000, "h", "c", "/l", 4096, [5], [HELD_BYTES], [], "n"],
    ),
    (Offer((1, 2)), ["Offer", [1, 2]]),
    (TakeBack(3, 8192, 1.5), ["TakeBack", 3, 8192, 1.5]),
    (Borrow(4, 8192, "l"), ["Borrow", 4, 8192, "l"]),
    (Mapped(7, 3), ["Mapped", 7, 3]),
    (Release(7, 3, (1,)), ["Release", 7, 3, [1]]),
    (Complain(7, 3, "why"), ["Complain", 7, 3, "why"]),
    (Detach("bye"), ["Detach", "bye"]),
    (Attached(1, 2, 1.0, 10.0), ["Attached", 1, 2, 1.0, 10.0]),
    (
        Granted(4, (Grant(7, 3, "l", 0, (1, 2), 4096, "/l", "t"),), "less"),
        ["Granted", 4, [[7, 3, "l", 0, [1, 2], 4096, "/l", "t"]], "less"],
    ),
    (Lend(7, 3, (1, 2), "b", "t"), ["Lend", 7, 3, [1, 2], "b", "t"]),
    (Revoke(7, 3, (1,), 2.5, "why"), ["Revoke", 7, 3, [1], 2.5, "why"]),
    (LeaseOver(7, 3, "why"), ["LeaseOver", 7, 3, "why"]),
    (Returned(7, 3, (1,), True), ["Returned", 7, 3, [1], True]),
    (Yielded(3, (1,), (2,), True, 4096, ("b",)), ["Yielded", 3, [1], [2], True, 4096, ["b"]]),
    (Map(1, 0, 2), ["Map", 1, 0, 2]),
    (Unmap(1, 0, 2), ["Unmap", 1, 0, 2]),
    (RevokeLease(1, 7, "red", 2.0), ["RevokeLease", 1, 7, "red", 2.0]),
    (ReclaimGpu(1, 0, "red", 4096, 2.0), ["ReclaimGpu", 1, 0, "red", 4096, 2.0]),
    (AskLending(1, "red"), ["AskLending", 1, "red"]),
    (Answered(1, "done", "", 4096, 0, ("b",)), ["Answered", 1, "done", "", 4096, 0, ["b"], None]),
    (
        LendingStatus(
            1,
            ((0, 2),),
            (GpuStatus(0, "g", 9, 8, 7, 6, "n"),),
            (LeaseStatus(7, 3, "l", 0, "b", 2, 8192, "active", None),),
            (("grants", 1),),
        ),
        [
            "LendingStatus",
            1,
            [[0, 2]],
            [[0, "g", 9, 8, 7, 6, "n"]],
            [[7, 3, "l", 0, "b", 2, 8192, "active", None]],
            [["grants", 1]],
        ],
    ),
]


@pytest.mark.parametrize(("message", "fields"), WIRE, ids=lambda value: type(value).__name__)
def test_the_wire_is_what_it_was(message: Message, fields: list[object]) -> None:
    assert msgpack.unpackb(encode([message])) == [fields]
    kind = type(message)
    read = (
        read_to_party()
        if kind in get_args(ToParty)
        else read_to_front_door()
        if kind in get_args(LendingAnswer)
        else read_to_scheduler()
    )
    assert read(encode([message])) == [message]


def test_every_message_is_among_them() -> None:
    known = {type(message) for message, _ in WIRE}
    assert known == {kind for union in (FromParty, ToParty, LendingWish, LendingAnswer) for kind in get_args(union)}
