"""The kernels behind `cuda_sampling.DeviceSampler`. Imports Triton: import it only where a kernel is launched.

All see logits [n, vocabulary] in CHUNK tokens a program, and leave per row and chunk what the next one needs."""
# mypy: ignore-errors
# What stands in a kernel is Triton's language, which has no types that Python's checkers know.

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
"""sampling.py's _GROUP: part of what a seed means."""

INFINITY_BITS = tl.constexpr(0x7FF0000000000000)
"""Of a float64. Times are positive, so their bits are in the same order as integers, of which a GPU has an atomic
minimum."""

SECTIONS = tl.constexpr(16)
"""Parts into which one round cuts the interval in which the nucleus ends."""


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _bits(key, counters):
    """`key` and the int64 `counters` as in sampling.py's _bits; all unsigned, of 64 bits."""
    return _mix(key + (counters + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _exponential(bits):
    return -tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit
def _arrivals(waits, values, greatest, temperature, least):
    """Waiting times over weights in float64, exactly as sampling.py has them; infinity for a weight of 0."""
    weights = tl.exp((values.to(tl.float64) - greatest.to(tl.float64)) / temperature)
    weights = tl.where(values < least, 0.0, weights)
    return tl.where(weights > 0.0, waits / tl.where(weights > 0.0, weights, 1.0), float("inf"))


@triton.jit
def _sooner(place, time):
    """The least of `time` and the times that other programs have left at `place`; left there for them."""
    before = tl.atomic_min(place, time.to(tl.int64, bitcast=True), sem="relaxed")
    return tl.minimum(time, before.to(tl.float64, bitcast=True))


@triton.jit
def _greatest(part_greatest, row, chunks, CHUNKS: tl.constexpr):
    """The largest logit of a row, of those of its chunks."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(part_greatest + row * chunks + chunk, chunk < chunks, float("-inf")), 0)


@triton.jit
def look(
    logits,
    settings,
    ends,
    part_greatest,
    part_token,
    part_broken,
    row_soonest,
    stride,
    settings_stride,
    vocabulary,
    chunks,
    ENDS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first largest logit of each chunk and whether one of them is not finite. Bars the end-of-sequence tokens of
    rows that say so, for this kernel and, in `logits`, for those after it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    values = tl.load(logits + row * stride + token, inside, float("-inf")).to(tl.float32)
    broken = tl.max((inside & ~(tl.abs(values) < float("inf"))).to(tl.int32), 0)
    if ENDS > 0:  # noqa: SIM102  # known when the kernel is compiled, the other not
        if (tl.load(settings + 3 * settings_stride + row) & 1) != 0:
            tl.debug_barrier()  # All of the chunk is read, by all warps, before a part of it is overwritten.
            for index in range(ENDS):
                end = tl.load(ends + index)
                values = tl.where(token == end, float("-inf"), values)
                here = (end >= chunk * CHUNK) & (end < chunk * CHUNK + CHUNK)
                tl.store(logits + row * stride + end, float("-inf"), here)
    greatest, first = tl.max(values, 0, return_indices=True)
    at = row * chunks + chunk
    tl.store(part_greatest + at, greatest)
    tl.store(part_token + at, chunk * CHUNK + first)
    tl.store(part_broken + at, broken)
    if chunk == 0:
        tl.store(row_soonest + row, INFINITY_BITS)


@triton.jit
def _threshold(begin, end, section):
    return begin + (end - begin) * (section * (1.0 / SECTIONS))


@triton.jit
def _bounds(
    part_below,
    greatest,
    temperature,
    outside,
    interval,
    row,
    rows,
    chunks,
    span,
    ROUND: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Where the nucleus' least logit may lie before round ROUND: from begin, which is within it, to below end."""
    if ROUND == 0:
        # Below begin at most `vocabulary` weights of e^-span x outside each: less than what is left out.
        reach = temperature * (span - tl.log(outside))
        begin = (greatest.to(tl.float64) - reach - tl.abs(greatest).to(tl.float64) * 1e-6).to(tl.float32)
        end = (greatest.to(tl.float64) + tl.abs(greatest).to(tl.float64) * 1e-6 + 1e-30).to(tl.float32)
    else:
        begin = tl.load(interval + row * 32 + 2 * (ROUND - 1))
        end = tl.load(interval + row * 32 + 2 * (ROUND - 1) + 1)
        chunk = tl.arange(0, CHUNKS)[:, None]
        section = tl.arange(0, SECTIONS)[None, :]
        at = part_below + (((ROUND - 1) * rows + row) * chunks + chunk) * (SECTIONS + 1)
        below = tl.sum(tl.load(at + section, chunk < chunks, 0.0).to(tl.float64), 0)
        whole = tl.sum(tl.sum(tl.load(at + SECTIONS, chunk < chunks, 0.0).to(tl.float64), 1), 0)
        chosen = tl.sum((below <= outside * whole).to(tl.int32), 0) - 1
        chosen = tl.maximum(chosen, 0)
        begin, end = (
            _threshold(begin, end, chosen),
            tl.where(chosen == SECTIONS - 1, end, _threshold(begin, end, chosen + 1)),
        )
    return begin, end


@triton.jit
def narrow(
    logits,
    settings,
    part_greatest,
    part_below,
    interval,
    stride,
    settings_stride,
    vocabulary,
    chunks,
    span,
    ROUND: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One round of the search for the least logit of each row's nucleus. A logit t is within it if the weights below t
    are at most 1 - top_p of all; of SECTIONS thresholds the largest such one begins the next interval.

    `interval` [n, rounds + 1, 2] float32 has begin and end for each round, written by the program of chunk 0 of each
    row; `part_below` [rounds, n, chunks, SECTIONS + 1] float32 has the weights of a chunk below each threshold and, at
    last, all of them."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(settings + settings_stride + row).to(tl.float64, bitcast=True)
    outside = tl.load(settings + 2 * settings_stride + row).to(tl.float64, bitcast=True)
    if (temperature > 0.0) & (outside > 0.0):
        greatest = _greatest(part_greatest, row, chunks, CHUNKS)
        begin, end = _bounds(
            part_below, greatest, temperature, outside, interval, row, rows, chunks, span, ROUND, CHUNKS
        )
        if chunk == 0:
            tl.store(interval + row * 32 + 2 * ROUND, begin)
            tl.store(interval + row * 32 + 2 * ROUND + 1, end)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * stride + token, token < vocabulary, float("-inf")).to(tl.float32)
        # A tiny temperature must not make infinity times zero of the greatest.
        steepness = tl.minimum(1.4426950408889634 / temperature, 1e30).to(tl.float32)
        weights = tl.exp2((values - greatest) * steepness)
        at = part_below + ((ROUND * rows + row) * chunks + chunk) * (SECTIONS + 1)
        for section in tl.static_range(SECTIONS):
            below = values < _threshold(begin, end, section)
            tl.store(at + section, tl.sum(tl.where(below, weights, 0.0), 0))
        tl.store(at + SECTIONS, tl.sum(weights, 0))


@triton.jit
def race(
    logits,
    settings,
    part_greatest,
    part_below,
    interval,
    row_soonest,
    part_time,
    part_winner,
    stride,
    settings_stride,
    vocabulary,
    chunks,
    span,
    ROUNDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first arrival of each chunk, as far as it may be the row's. As in sampling.py, a group's shortest wait over
    its largest weight bounds the arrivals of its tokens, and groups are looked into in the order of their bounds until
    none may come before the first arrival that any chunk of the row has found so far (`row_soonest`: float64 bits)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.num_programs(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(settings + settings_stride + row).to(tl.float64, bitcast=True)
    if temperature > 0.0:
        outside = tl.load(settings + 2 * settings_stride + row).to(tl.float64, bitcast=True)
        key = tl.load(settings + row).to(tl.uint64, bitcast=True)
        greatest = _greatest(part_greatest, row, chunks, CHUNKS)
        least = tl.full([], float("-inf"), tl.float32)
        if outside > 0.0:
            begin, _end = _bounds(
                part_below, greatest, temperature, outside, interval, row, rows, chunks, span, ROUNDS, CHUNKS
            )
            # However small top_p is, the most probable token stays.
            least = tl.minimum(begin, greatest)
        GROUPS: tl.constexpr = CHUNK // GROUP
        place = tl.arange(0, GROUPS)
        group = (chunk * GROUPS + place).to(tl.int64)
        member = tl.arange(0, GROUP)
        token = chunk * CHUNK + place[:, None] * GROUP + member[None, :]
        values = tl.load(logits + row * stride + token, token < vocabulary, float("-inf")).to(tl.float32)
        shortest = _exponential(_bits(key, group + 4294967296)) / GROUP
        bound = _arrivals(shortest, tl.max(values, 1), greatest, temperature, least)
        time = tl.full([], float("inf"), tl.float64)
        winner = tl.full([], 0, tl.int32)
        soonest, at = tl.min(bound, 0, return_indices=True)
        # An atomic that changes nothing: a plain load might find an older time in the L1 cache.
        known = _sooner(row_soonest + row, time)
        # The margin is for rounding: a group must not miss the arrival that its own bound was made from.
        while (soonest < float("inf")) & (soonest <= known * (1.0 + 1e-12)):
            number = (chunk * GROUPS + at).to(tl.int64)
            tokens = number * GROUP + member
            some = tl.load(logits + row * stride + tokens, tokens < vocabulary, float("-inf")).to(tl.float32)
            bits = _bits(key, number + 4294967296)
            least_wait = _exponential(bits) / GROUP
            waits = least_wait + _exponential(_bits(key, tokens))
            waits = tl.where(member == (bits % GROUP).to(tl.int32), least_wait, waits)
            arrival, first = tl.min(_arrivals(waits, some, greatest, temperature, least), 0, return_indices=True)
            if arrival < time:
                time = arrival
                winner = (chunk * CHUNK + at * GROUP + first).to(tl.int32)
            known = _sooner(row_soonest + row, time)
            bound = tl.where(place == at, float("inf"), bound)
            soonest, at = tl.min(bound, 0, return_indices=True)
        tl.store(part_time + row * chunks + chunk, time)
        tl.store(part_winner + row * chunks + chunk, winner)


@triton.jit
def finish(
    settings,
    ends,
    part_greatest,
    part_token,
    part_broken,
    part_time,
    part_winner,
    tokens,
    stopped,
    settings_stride,
    chunks,
    ENDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token and the stop mark of each row, of those of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = row * chunks + chunk
    flags = tl.load(settings + 3 * settings_stride + row)
    broken = tl.max(tl.load(part_broken + at, inside, 0), 0)
    _largest, best = tl.max(tl.load(part_greatest + at, inside, float("-inf")), 0, return_indices=True)
    token = tl.load(part_token + row * chunks + best)
    if WARM:
        temperature = tl.load(settings + settings_stride + row).to(tl.float64, bitcast=True)
        if temperature > 0.0:
            _earliest, first = tl.min(tl.load(part_time + at, inside, float("inf")), 0, return_indices=True)
            token = tl.load(part_winner + row * chunks + first)
    token = tl.where(broken != 0, 0, token)
    mark = tl.where(broken != 0, 2, 0)
    if ENDS > 0:
        for index in range(ENDS):
            ended = (tl.load(ends + index) == token) & ((flags & 2) == 0) & (broken == 0)
            mark = tl.where(ended, 1, mark)
    tl.store(tokens + row, token)
    tl.store(stopped + row, mark.to(tl.uint8))
