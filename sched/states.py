"""All states and the moves between them, as tables. A move that is not in its table raises and changes nothing."""

from collections.abc import Mapping
from typing import Final

Table = Mapping[str, Mapping[str, str]]
"""state -> event -> next state. A state with no events is final."""


class IllegalTransition(Exception):
    """Somebody's story does not add up: the message names the thing, its state, the event and what was allowed."""


def move(table: Table, kind: str, name: object, state: str, event: str) -> str:
    """The state that follows; raises IllegalTransition that speaks of `kind` `name` ("request 7")."""
    try:
        return table[state][event]
    except KeyError:
        allowed = ", ".join(table.get(state, {})) or "nothing: that state is final"
        raise IllegalTransition(
            f"{kind} {name} is {state}: {event!r} cannot happen to it (allowed: {allowed})"
        ) from None


REQUEST: Final[Table] = {
    # A request as the scheduler sees it. Whatever is in `ended` has ended exactly once.
    "queued": {"dispatch": "running", "abort": "ended", "reject": "ended"},
    "running": {"end": "delivering", "conclude": "cancelling", "abort": "cancelling", "lose": "interrupted"},
    # The worker has ended it; its last tokens are on their way to the front door.
    "delivering": {"conclude": "ended", "abort": "ended", "lose": "interrupted"},
    # The front door is done with it; the worker is not, and it still counts against the worker's window.
    "cancelling": {"end": "ended", "lose": "ended"},
    # The front door was asked to submit it again.
    "interrupted": {"resubmit": "queued", "abort": "ended"},
    "ended": {},
}

WORKER: Final[Table] = {
    "loading": {"loaded": "ready", "lose": "lost"},
    "ready": {"lose": "lost"},
    "lost": {},
}

REPLICA: Final[Table] = {
    # One model on one worker. One that failed is tried again where the same device has served it before.
    "loading": {"ready": "ready", "fail": "failed"},
    "ready": {},
    "failed": {"retry": "loading"},
}

SEQUENCE: Final[Table] = {
    # A request as the worker's lane core sees it. `ending`: its ending was reported, but a step or a copy in flight
    # still uses its blocks. One that gives way is written to the spill arena (spilling), rests there (spilled) and
    # comes back (loading); where that fails at any point it waits, and computes its tokens again. A waiting one may
    # find the keys and values of its beginning in the arena, too.
    "waiting": {"admit": "running", "load": "loading", "end": "ended"},
    "running": {"preempt": "waiting", "spill": "spilling", "end": "ended", "end_in_flight": "ending"},
    "spilling": {"copied": "spilled", "fail": "waiting", "end_in_flight": "ending"},
    "spilled": {
        "load": "loading",
        "admit": "running",
        "drop": "waiting",
        "end": "ended",
        "end_in_flight": "ending",
    },
    "loading": {"copied": "running", "fail": "waiting", "end_in_flight": "ending"},
    "ending": {"land": "ended"},
    "ended": {},
}

SLAB: Final[Table] = {
    # A slab that its lender has offered. `gone`: its lender's own again, or destroyed; the number is not used again.
    "free": {"lend": "lent", "take": "gone"},
    "lent": {"return": "returned", "take": "gone"},
    "returned": {"offer": "free", "take": "gone"},
    "gone": {},
}

LEASE: Final[Table] = {
    # `settle`: what was asked back has come, and something is left.
    "granted": {"map": "active", "revoke": "revoking", "strand": "stranded", "end": "over"},
    "active": {"revoke": "revoking", "strand": "stranded", "end": "over"},
    "revoking": {"settle": "active", "expire": "overdue", "strand": "stranded", "end": "over"},
    "overdue": {"settle": "active", "strand": "stranded", "end": "over"},
    # Its lender is gone. One that comes back (it was only silent) finds it being asked back.
    "stranded": {"resume": "revoking", "end": "over"},
    "over": {},
}

WEIGHTS: Final[Table] = {
    # A model's weights as the worker's lane core sees them, where not all fit the device at once. They have no last
    # state: as long as the worker lives they may come and go. `draining`: nothing new of the model is admitted, and
    # what runs ends or makes room, until nobody needs them.
    "away": {"restore": "coming"},
    "coming": {"back": "resident", "fail": "away"},
    "resident": {"drain": "draining"},
    "draining": {"keep": "resident", "evict": "leaving"},
    "leaving": {"gone": "away", "fail": "resident"},
}

TABLES: Final[Mapping[str, Table]] = {
    "request": REQUEST,
    "worker": WORKER,
    "replica": REPLICA,
    "sequence": SEQUENCE,
    "slab": SLAB,
    "lease": LEASE,
    "weights": WEIGHTS,
}
