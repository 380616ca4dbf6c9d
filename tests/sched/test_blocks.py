"""Blocks of several sizes over shared slabs: conserved under any sequence of calls."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.sched.blocks import BlockPool

SIZES = {"small": 96, "odd": 250, "large": 1000, "huge": 2300}  # slabs are 1000 bytes: straddling, whole, several


def pool(slabs: int = 8) -> BlockPool:
    made = BlockPool(slabs, 1000)
    for model, size in SIZES.items():
        made.add_model(model, size)
    return made


@given(
    st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(0, 12), st.booleans()), max_size=60),
    st.integers(3, 9),
)
def test_blocks_are_conserved_and_never_overlap(calls: list[tuple[str, int, bool]], slabs: int) -> None:
    blocks = pool(slabs)
    held: dict[str, list[int]] = {model: [] for model in SIZES}
    for model, count, take in calls:
        if take:
            got = blocks.allocate(model, count)
            assert got is None or len(got) == count
            held[model].extend(got or ())
        else:
            blocks.release(model, [held[model].pop() for _ in range(min(count, len(held[model])))])
        blocks.check()
        spans = sorted((b * SIZES[m], (b + 1) * SIZES[m]) for m, mine in held.items() for b in mine)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "two blocks overlap"
        assert not spans or spans[-1][1] <= slabs * 1000


@pytest.mark.parametrize("model", sorted(SIZES))
def test_one_model_alone_gets_the_whole_pool(model: str) -> None:
    blocks = pool()
    assert blocks.allocate(model, blocks.capacity(model)) is not None
    assert blocks.capacity(model) == 8000 // SIZES[model]
    assert blocks.allocate(model, 1) is None
    blocks.check()


def test_an_idle_slab_changes_hands_and_a_used_one_does_not() -> None:
    blocks = pool(3)
    taken = blocks.allocate("large", 3) or ()
    assert blocks.allocate("small", 1) is None
    blocks.release("large", taken[:1])
    assert len(blocks.allocate("small", 10) or ()) == 10
    assert blocks.allocate("large", 1) is None
    blocks.check()


def test_freeing_twice_raises_and_changes_nothing() -> None:
    blocks = pool()
    (block,) = blocks.allocate("small", 1) or (0,)
    blocks.release("small", [block])
    with pytest.raises(KeyError):
        blocks.release("small", [block])
    blocks.check()


def test_a_model_whose_block_exceeds_the_pool_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'vast' has KV blocks of 9000 bytes; the pool holds 8000"):
        pool().add_model("vast", 9000)
