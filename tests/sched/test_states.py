"""The state tables: an illegal move raises, names everything, and changes nothing."""

import pytest

from forebay.sched.states import TABLES, IllegalTransition, move


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reachable_and_every_move_leads_to_a_state(name: str) -> None:
    table = TABLES[name]
    targets = {target for moves in table.values() for target in moves.values()}
    assert targets <= set(table)
    assert set(table) - targets <= {next(iter(table))}, "only the first state may have no way in"


@pytest.mark.parametrize("name", sorted(set(TABLES) - {"weights"}))
def test_every_story_can_end(name: str) -> None:
    table = TABLES[name]
    ending = {state for state, moves in table.items() if not moves}
    assert ending
    while more := {s for s, moves in table.items() if s not in ending and ending & set(moves.values())}:
        ending |= more
    assert ending == set(table)


def test_weights_can_come_back_from_everywhere() -> None:
    table = TABLES["weights"]
    reaching = {"resident"}
    while more := {s for s, moves in table.items() if s not in reaching and reaching & set(moves.values())}:
        reaching |= more
    assert reaching == set(table)


def test_an_illegal_move_names_the_thing_its_state_the_event_and_what_was_allowed() -> None:
    with pytest.raises(IllegalTransition, match=r"request 7 is ended: 'end' cannot happen to it \(allowed: nothing"):
        move(TABLES["request"], "request", 7, "ended", "end")
    with pytest.raises(IllegalTransition, match="allowed: end, conclude, abort, lose"):
        move(TABLES["request"], "request", 7, "running", "resubmit")
