"""How the next token is chosen from logits. Batched, and without state: what is drawn for output token i of a request
depends on its seed, i and the logits, never on who else is in the batch or on which worker it runs.

A draw is a race (the Gumbel-max trick in its exponential form): each token has a random waiting time that depends on
(seed, i, token) alone, divides it by its weight, and the first to arrive is drawn, which gives every token its
probability exactly. A request that resumes elsewhere sees the same waiting times, so logits that differ in their last
bits change the winner only where two tokens arrive almost together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.transport.messages.common import Sampling

STOP_NONE, STOP_END_OF_SEQUENCE, STOP_NOT_FINITE = 0, 1, 2

_GROUP = 32
"""Tokens whose waiting times are made together, and only if one of them may win. Part of what a seed means."""

_PROBES = 16
"""Groups that may arrive soonest, looked into first: they nearly always hold the winner and leave few others."""

_STEPS_PER_NAT = 32
_STEPS = 64 * _STEPS_PER_NAT
"""A nucleus is found by a histogram of log-probabilities below the largest; only the step at its edge is sorted."""


class Draw(NamedTuple):
    """One row's choice to make: `output_index` is the number of the output token, from 0."""

    sampling: Sampling
    output_index: int


def waiting_times(seed: int, output_index: int, vocabulary: int) -> NDArray[np.float64]:
    """What every token [vocabulary] waits in the race for one output token: independent draws from the exponential
    distribution of mean 1, between 3e-18 and 38. The token with the least waiting time / weight is drawn."""
    groups = np.arange(-(-vocabulary // _GROUP))
    return _waits(np.repeat(row_keys(seed_keys([seed]), [output_index]), len(groups)), groups).ravel()[:vocabulary]


def choose(
    logits: torch.Tensor, draws: Sequence[Draw], end_of_sequence: frozenset[int]
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Tokens and stop marks (see StepDone) for `logits` [n, vocabulary], one draw a row. May overwrite `logits`."""
    logits = logits.float()
    finite = torch.isfinite(logits.sum(-1))
    barred = [row for row, (sampling, index) in enumerate(draws) if index < sampling.min_tokens]
    if barred and end_of_sequence:
        rows = torch.tensor(barred).unsqueeze(1)
        logits[rows, torch.tensor(sorted(end_of_sequence))] = -torch.inf
    tokens = logits.argmax(-1)
    usable = enumerate(zip(draws, finite.tolist(), strict=True))
    warm = [row for row, (draw, is_finite) in usable if is_finite and draw.sampling.temperature > 0]
    if warm:
        rows = torch.tensor(warm)
        chosen = logits if len(warm) == len(draws) else logits[rows]
        tokens[rows] = torch.from_numpy(_race(chosen, [draws[row] for row in warm]))
    tokens.masked_fill_(~finite, 0)
    stopped = np.where(finite.numpy(), STOP_NONE, STOP_NOT_FINITE).astype(np.uint8)
    for row, token in enumerate(tokens.tolist()):
        if token in end_of_sequence and not stopped[row] and not draws[row].sampling.ignore_eos:
            stopped[row] = STOP_END_OF_SEQUENCE
    return tokens.numpy().astype(np.uint32), stopped


def _race(logits: torch.Tensor, draws: list[Draw]) -> NDArray[np.int64]:
    """The token [n] that arrives first in each row of `logits` [n, vocabulary]. A group's shortest wait divided by its
    largest weight bounds the arrivals of all its tokens, so few groups are ever looked into."""
    if logits.shape[1] % _GROUP:
        logits = torch.nn.functional.pad(logits, (0, -logits.shape[1] % _GROUP), value=-torch.inf)
    grouped = logits.contiguous().view(len(draws), -1, _GROUP)
    by_group, largest = grouped.numpy(), grouped.amax(-1).numpy()
    greatest = largest.max(1).astype(np.float64)
    temperature = np.array([draw.sampling.temperature for draw in draws])
    seeds = seed_keys([draw.sampling.seed for draw in draws])
    keys = row_keys(seeds, [draw.output_index for draw in draws])
    least = np.full(len(draws), -np.inf)
    for row, (sampling, _) in enumerate(draws):
        if sampling.top_p < 1.0:
            least[row] = _least_of_nucleus(by_group[row].ravel(), sampling.temperature, sampling.top_p)

    def weights(values: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        tempered = np.exp((values - greatest[rows, None]) / temperature[rows, None])
        return np.where(values < least[rows, None], 0.0, tempered)

    def arrivals(rows: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
        return _waits(keys[rows], groups) / weights(by_group[rows, groups], rows)

    everyone = np.arange(len(draws))
    # A difference over a tiny temperature may overflow, and a weight may be 0: both arrive at infinity, never first.
    with np.errstate(over="ignore", divide="ignore"):
        bound = _shortest_waits(keys[:, None], np.arange(largest.shape[1]))[0] / weights(largest, everyone)
        probes = np.argpartition(bound, min(_PROBES, bound.shape[1]) - 1)[:, :_PROBES]
        known = arrivals(np.repeat(everyone, probes.shape[1]), probes.ravel()).reshape(len(draws), -1).min(1)
        # The margin is for rounding: a group must not miss the arrival that its own bound was made from.
        rows, groups = np.nonzero(bound <= known[:, None] * (1 + 1e-12))
        times = arrivals(rows, groups)
    first = times.argmin(1)
    order = np.lexsort((times[np.arange(len(rows)), first], rows))
    winner = order[np.searchsorted(rows, everyone)]
    tokens: NDArray[np.int64] = groups[winner] * _GROUP + first[winner]
    return tokens


def _least_of_nucleus(logits: NDArray[np.float32], temperature: float, top_p: float) -> float:
    """The least logit among the fewest most probable tokens whose probabilities reach `top_p`. Tokens as probable as
    the least of them stay too, so that the order among equals does not matter."""
    tempered = torch.from_numpy(logits).double().sub_(float(logits.max())).div_(temperature)
    weights = tempered.exp().numpy()
    steps = tempered.mul_(-_STEPS_PER_NAT).clamp_(max=_STEPS - 1).long().numpy()
    reached = np.bincount(steps, weights, _STEPS).cumsum()
    goal = top_p * reached[-1]
    edge = int(np.searchsorted(reached, goal))
    at_edge = np.flatnonzero(steps == edge)
    order = at_edge[np.argsort(-logits[at_edge])]
    missing = goal - (reached[edge - 1] if edge else 0.0)
    kept = int(np.searchsorted(weights[order].cumsum(), missing))
    return float(logits[order[min(kept, len(order) - 1)]])


def _waits(keys: NDArray[np.uint64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Waiting times [m, _GROUP] of the tokens of `groups` [m] under `keys` [m]: the shortest at the group's first
    token and, the exponential distribution having no memory, that plus a wait of its own at each other one."""
    shortest, first = _shortest_waits(keys, groups)
    tokens = groups[:, None] * _GROUP + np.arange(_GROUP)
    waits = shortest[:, None] + _exponential(_bits(keys[:, None], tokens))
    waits[np.arange(len(groups)), first] = shortest
    return waits


def _shortest_waits(
    keys: NDArray[np.uint64], groups: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
    """For each group the least of its tokens' waiting times and which token has it: the least of k exponential draws
    is one draw over k, at any of the places alike."""
    bits = _bits(keys, groups + 2**32)
    return _exponential(bits) / _GROUP, bits % np.uint64(_GROUP)


def _exponential(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """-log of the upper 52 bits as a fraction in the middle of its step, so that neither 0 nor 1 occurs."""
    return -np.log(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def _bits(keys: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    return _mix(keys + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def seed_keys(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """What the key of each output token is made from."""
    return _mix(np.array([seed % 2**64 for seed in seeds], np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def row_keys(seeds: NDArray[np.uint64], indices: Sequence[int]) -> NDArray[np.uint64]:
    """The keys of draws: of output token `indices[i]` under `seeds[i]`, one of `seed_keys`."""
    return _bits(seeds, np.array(indices))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
