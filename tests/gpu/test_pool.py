"""The pool: capacity in whole slabs, and several shapes over the same bytes."""

import pytest
import torch

from forebay.gpu.errors import DeviceError
from forebay.gpu.pool import KVPool, KVShape

SLAB = 1 << 16
SHAPES = [
    KVShape(2, 2, 8, torch.float32),
    KVShape(3, 1, 16, torch.bfloat16),
    KVShape(5, 3, 4, torch.float16),
]


@pytest.fixture
def pool():
    opened = KVPool(4 * SLAB + 123, SLAB)
    yield opened
    opened.close()


def test_capacity_is_whole_slabs(pool) -> None:
    assert pool.capacity == 4 * SLAB
    assert [slab.size for slab in pool.slabs] == [SLAB] * 4
    with pytest.raises(DeviceError, match=f"memory is {SLAB - 1} bytes, less than one slab of {SLAB}"):
        KVPool(SLAB - 1, SLAB)
    with pytest.raises(DeviceError, match="slab_bytes is 1000"):
        KVPool(1 << 20, 1000)


def test_a_block_lies_at_a_multiple_of_its_size(pool) -> None:
    base = pool.view(SHAPES[0]).data_ptr()
    for shape in SHAPES:
        view = pool.view(shape)
        assert view.shape == (pool.capacity // shape.block_bytes, shape.layers, 2, 16, shape.kv_heads, shape.head_size)
        assert view.dtype == shape.dtype
        assert view.data_ptr() == base
        assert view[3].data_ptr() == base + 3 * shape.block_bytes
        assert view[3].is_contiguous()


def test_blocks_of_different_shapes_do_not_disturb_each_other(pool) -> None:
    """Blocks are dealt out by bytes, as the scheduler does, until no shape fits; each keeps what was written."""
    views = [pool.view(shape) for shape in SHAPES]
    written = []
    place = turn = 0
    while True:
        shape = SHAPES[turn % 3]
        block = -(-place // shape.block_bytes)
        if block >= pool.blocks(shape):
            break
        fill = torch.randn(shape.block, generator=torch.Generator().manual_seed(turn)).to(shape.dtype)
        views[turn % 3][block] = fill
        written.append((turn % 3, block, fill))
        place = (block + 1) * shape.block_bytes
        turn += 1
    assert len(written) >= 50
    for which, block, fill in written:
        assert torch.equal(views[which][block], fill)


def test_memory_is_taken_when_written(pool) -> None:
    view = pool.view(SHAPES[0])
    assert pool.resident == 0
    view[0] = 1.0
    assert 0 < pool.resident < SLAB


def test_too_large_a_block_is_refused(pool) -> None:
    with pytest.raises(DeviceError, match="does not fit a pool of"):
        pool.view(KVShape(1000, 8, 128, torch.float32))


def test_closed_pool_gives_its_memory_back_with_the_last_view(pool) -> None:
    view = pool.view(SHAPES[0])
    view[1] = 2.0
    pool.close()
    pool.close()
    assert float(view[1].sum()) == 2.0 * view[1].numel()
    with pytest.raises(DeviceError, match="closed"):
        pool.view(SHAPES[0])


def test_slabs_that_are_dropped_take_no_memory_and_come_back_as_zeros() -> None:
    pool = KVPool(4 * SLAB, SLAB)
    whole = pool.view(KVShape(1, 1, 8, torch.float32))
    flat = whole.view(-1)
    flat.fill_(1.0)
    before = pool.slabs
    pool.drop(2)
    pool.drop(2)
    assert before[2].closed
    assert pool.resident == 3 * SLAB
    assert (pool.slabs[0], pool.slabs[3]) == (before[0], before[3])
    assert float(flat[: SLAB // 2].sum()) == SLAB // 2
    pool.fill(2)
    pool.fill(2)
    assert float(flat.sum()) == 3 * SLAB // 4
    flat.fill_(2.0)
    assert pool.resident == 4 * SLAB
    pool.drop(0)
    pool.close()
    assert all(slab.closed for slab in before)
