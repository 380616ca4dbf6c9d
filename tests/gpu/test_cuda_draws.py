"""The settings of draws, written for one changing batch after another."""

import random

import numpy as np
import pytest

from forebay.gpu import cuda_draws
from forebay.gpu.cuda_draws import BARRED, FIELDS, IGNORE_END, DrawSettings
from forebay.gpu.sampling import row_keys, seed_keys
from forebay.transport.messages.common import Sampling


def check(settings: DrawSettings, draws: list[tuple[Sampling, int]]) -> None:
    out = np.full((FIELDS, len(draws) + 2), -1, np.int64)
    warm = settings.prepare(draws, out)
    assert warm == any(sampling.temperature > 0 for sampling, _ in draws)
    for row, (sampling, index) in enumerate(draws):
        if warm:
            assert out.view(np.uint64)[0, row] == row_keys(seed_keys([sampling.seed]), [index])[0]
        assert out.view(np.float64)[1, row] == sampling.temperature
        assert out.view(np.float64)[2, row] == 1.0 - sampling.top_p
        expected = (BARRED if index < sampling.min_tokens else 0) | (IGNORE_END if sampling.ignore_eos else 0)
        assert out[3, row] == expected, f"row {row}: {sampling}, token {index}"
    assert not out[:, len(draws) :].any(), "further columns are greedy"


def some(rng: random.Random, *, warm: bool) -> Sampling:
    return Sampling(
        max_tokens=99,
        temperature=rng.choice([0.0, 0.3, 1.0]) if warm else 0.0,
        top_p=rng.choice([1.0, 0.9, 1e-9]),
        seed=rng.randrange(-(2**63), 2**63),
        min_tokens=rng.choice([0, 0, 3]),
        ignore_eos=rng.random() < 0.5,
    )


@pytest.mark.parametrize("known", [24, 4096])
def test_batches_that_change(known, monkeypatch) -> None:
    """Requests come and go, some share one Sampling; with room for few constants they are often forgotten."""
    monkeypatch.setattr(cuda_draws, "_KNOWN", known)
    rng = random.Random(1)
    settings = DrawSettings()
    batch: list[list] = []
    for step in range(300):
        if step % 3:
            batch = [entry for entry in batch if rng.random() < 0.9]
            for _ in range(rng.randrange(4)):
                batch.insert(rng.randrange(len(batch) + 1), [some(rng, warm=step > 100), rng.randrange(2)])
            if batch and not step % 5:
                batch.append([batch[0][0], 7])
        check(settings, [(sampling, index) for sampling, index in batch])
        for entry in batch:
            entry[1] += 1


def test_a_batch_larger_than_what_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(cuda_draws, "_KNOWN", 4)
    rng = random.Random(2)
    settings = DrawSettings()
    for count in (3, 9, 2, 12, 12):
        check(settings, [(some(rng, warm=True), index) for index in range(count)])


def test_no_draws() -> None:
    check(DrawSettings(), [])
