"""The spill arena: slots and blocks conserved under any sequence of calls, and slots emptied when asked."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.sched.blocks import BlockPool
from forebay.sched.spill import SpillSpace

SIZES = {"small": 96, "odd": 250, "large": 1000, "huge": 2300}  # slots are 1000 bytes


def space(slots: int = 8, host: int = 3) -> SpillSpace:
    made = SpillSpace(slots, host, 1000)
    for model, size in SIZES.items():
        made.add_model(model, size)
    return made


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "give", "grow", "revoke", "publish"]),
            st.sampled_from(sorted(SIZES)),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)
def test_blocks_lie_where_memory_is_and_never_overlap(calls: list[tuple[str, str, int]]) -> None:
    arena = space()
    held: list[tuple[str, int]] = []
    there: set[int] = set()
    leaving: set[int] = set()
    for key, (call, model, number) in enumerate(calls):
        if call == "take":
            got = arena.allocate(model, number)
            assert got is None or len(got) == number
            for block in got or ():
                touched = range(block * SIZES[model] // 1000, ((block + 1) * SIZES[model] - 1) // 1000 + 1)
                assert not leaving.intersection(touched), "put into a slot that was asked back"
            held += [(model, block) for block in got or ()]
        elif call == "give":
            for _ in range(min(number, len(held))):
                model, block = held.pop()
                arena.release(model, [block])
        elif call == "publish" and held:
            model, block = held[number % len(held)]
            arena.publish(model, block, key.to_bytes(4, "little"))
        elif call == "grow" and (slot := 3 + number % 5) not in there:
            arena.grow([slot])
            there.add(slot)
        elif call == "revoke":
            slots = {3 + number % 5}
            arena.revoke(slots, 1.0)
            leaving |= slots & there
        for slot in arena.freed():
            assert slot in leaving
            leaving.remove(slot)
            there.remove(slot)
        arena.check()
        spans = sorted((b * SIZES[m], (b + 1) * SIZES[m]) for m, b in held)
        for (_, end), (begin, _) in pairwise(spans):
            assert end <= begin, "two blocks overlap"
        for begin, end in spans:
            assert {*range(begin // 1000, (end - 1) // 1000 + 1)} <= {0, 1, 2} | there, "in memory that is not there"
    for model, block in held:
        arena.release(model, [block])
    arena.revoke(there, 0.0)
    assert set(arena.freed()) == there
    arena.check()


def test_content_is_found_until_its_room_is_needed() -> None:
    arena = space(slots=1, host=1)
    (block,) = arena.allocate("odd", 1) or ()
    arena.publish("odd", block, b"key")
    arena.release("odd", [block])
    assert arena.take("odd", b"key") == block
    arena.release("odd", [block])
    assert len(arena.allocate("odd", 4) or ()) == 4
    assert arena.take("odd", b"key") is None


def test_a_model_whose_blocks_are_larger_than_the_arena_is_not_spilled() -> None:
    arena = space(slots=2, host=2)
    assert arena.allocate("huge", 1) is None
    assert arena.take("huge", b"key") is None
    assert arena.used("huge") == 0


def test_memory_in_a_slot_that_has_some_is_refused_by_number() -> None:
    arena = space()
    arena.grow([4])
    for slot in (4, 2, 8):
        with pytest.raises(ValueError, match=rf"slot {slot} of the arena cannot be lent memory: slots 3 to 7 can"):
            arena.grow([slot])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "give", "close", "reopen", "cache"]), st.integers(0, 12)), max_size=60),
    st.sampled_from(sorted(SIZES)),
)
@example([("take", 1), ("close", 0), ("cache", 0)], "huge")
def test_closed_slabs_of_a_pool_are_left_alone(calls: list[tuple[str, int]], model: str) -> None:
    pool = BlockPool(8, 1000)
    for name, size in SIZES.items():
        pool.add_model(name, size)
    held: list[int] = []
    closed: set[int] = set()
    for key, (call, number) in enumerate(calls):
        slab = number % 8
        if call == "take":
            held += pool.allocate(model, number) or ()
        elif call == "give":
            pool.release(model, [held.pop() for _ in range(min(number, len(held)))])
        elif call == "cache" and held:
            pool.publish(model, held[0], key.to_bytes(4, "little"))
        elif call == "close":
            pool.close(slab)
            closed.add(slab)
        elif call == "reopen" and slab in closed:
            if pool.vacant(slab):
                pool.reopen(slab)
                closed.remove(slab)
            else:
                with pytest.raises(ValueError, match=f"slab {slab} is in use here"):
                    pool.reopen(slab)
        pool.check()
        assert pool.open_slabs == 8 - len(closed)
    pool.release(model, held)
    assert all(pool.vacant(slab) for slab in closed)
    for slab in closed:
        pool.reopen(slab)
    assert len(pool.allocate(model, pool.capacity(model)) or ()) == pool.capacity(model), "something was lost"


def test_what_is_pinned_is_as_old_afterwards_as_it_was_before() -> None:
    pool = BlockPool(1, 1000)
    pool.add_model("a", 100)
    blocks = pool.allocate("a", 3) or ()
    for block in blocks:
        pool.publish("a", block, bytes([block]))
        pool.release("a", [block])
    order = pool.next_evictions("a", 9)
    pinned = [pool.pin("a", order[1][1]), pool.pin("a", order[2][1])]
    assert pool.next_evictions("a", 9) == order[:1]
    pool.unpin("a", pinned)
    assert pool.next_evictions("a", 9) == order
    pool.check()
