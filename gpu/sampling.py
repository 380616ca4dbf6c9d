"""How the next token is chosen from logits. Batched, and without state: what is drawn for output token i of a request
depends on its seed, i and the logits, never on who else is in the batch or on which worker it runs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.transport.messages.common import Sampling

STOP_NONE, STOP_END_OF_SEQUENCE, STOP_NOT_FINITE = 0, 1, 2

_NUCLEUS_GUESS = 256
"""A nucleus is rarely larger; if it is, the whole vocabulary is sorted."""


class Draw(NamedTuple):
    """One row's choice to make: `output_index` is the number of the output token, from 0."""

    sampling: Sampling
    output_index: int


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, index): two rounds of the SplitMix64 output function (Steele, Lea and Flood
    2014) over the seed and then the index, the upper 53 bits of it."""
    key = _mix(np.array([seed % 2**64 for seed in seeds], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    counter = (np.array(indices, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(key + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


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
    warm = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if warm:
        rows = torch.tensor(warm)
        chosen = logits if len(warm) == len(draws) else logits[rows]
        tokens[rows] = _draw(chosen, [draws[row] for row in warm])
    tokens.masked_fill_(~finite, 0)
    stopped = np.where(finite.numpy(), STOP_NONE, STOP_NOT_FINITE).astype(np.uint8)
    for row, token in enumerate(tokens.tolist()):
        if token in end_of_sequence and not stopped[row] and not draws[row].sampling.ignore_eos:
            stopped[row] = STOP_END_OF_SEQUENCE
    return tokens.numpy().astype(np.uint32), stopped


def _draw(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Inverts the cumulative distribution in the vocabulary's order: rounding in the logits moves its steps by no more
    than itself, while an order by probability would swap neighbours."""
    temperature = torch.tensor([draw.sampling.temperature for draw in draws], dtype=torch.float64).unsqueeze(1)
    weights = logits.double()
    weights.sub_(weights.amax(-1, keepdim=True)).div_(temperature).exp_()
    _keep_nucleus(weights, [draw.sampling.top_p for draw in draws])
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    numbers = uniform([draw.sampling.seed for draw in draws], [draw.output_index for draw in draws])
    target = torch.from_numpy(numbers).unsqueeze(1) * total
    # Rounding must not reach the total itself: the step before it is the last one with any weight.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)


def _keep_nucleus(weights: torch.Tensor, top_p: list[float]) -> None:
    """Zeroes, in place, all but the fewest most probable tokens whose probabilities reach `top_p`. Tokens as probable
    as the least of them stay too, so that the order among equals does not matter."""
    rows = [row for row, share in enumerate(top_p) if share < 1.0]
    if not rows:
        return
    some = weights[torch.tensor(rows)]
    goal = torch.tensor([top_p[row] for row in rows], dtype=torch.float64).unsqueeze(1) * some.sum(-1, keepdim=True)
    ordered = some.topk(min(_NUCLEUS_GUESS, some.shape[-1]), -1).values
    if bool((ordered.sum(-1, keepdim=True) < goal).any()):
        ordered = some.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    kept = (before < goal).sum(-1, keepdim=True).clamp_(min=1)
    least = ordered.gather(-1, kept - 1)
    weights[torch.tensor(rows)] = some.masked_fill_(some < least, 0.0)
