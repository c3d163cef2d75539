"""Test data/rng.py: numbers are uniform, independent and the same in every version."""

import math

import numpy as np
import pytest
import torch

from common import InputError
from data import rng
from data.rng import DROPOUT, batch_pairs, seed_from, uniform


def test_numbers_are_uniform_and_independent():
    """Every bound is five standard deviations."""
    index = torch.arange(20_000)
    u = uniform(index, 12, 3, 1)
    assert u.dtype == torch.float32 and u.shape == (20_000, 12) and u.min() >= 0 and u.max() < 1
    assert torch.equal(u * 2 ** 24, (u * 2 ** 24).round())
    n = u.numel()
    assert abs(u.double().mean() - 1 / 2) < 5 / math.sqrt(12 * n)
    counts = (u.flatten() * 256).long().bincount(minlength=256)
    # chi-squared test
    assert abs(((counts - n / 256) ** 2 / (n / 256)).sum().item() - 255) < 5 * math.sqrt(2 * 255)

    # swapping seed and purpose gives other numbers
    keys = [uniform(index, 3, seed, purpose) for seed in (0, 1, 2) for purpose in (0, 1, 2, 20)]
    ends = torch.cat([torch.arange(2000), torch.arange(2 ** 31 - 2000, 2 ** 31),
                      torch.arange(2 ** 30, 2 ** 30 + 2000)])
    ends = uniform(ends, 4, 2 ** 31 - 1, 2 ** 31 - 1)
    assert ends.min() >= 0 and ends.max() < 1 and len(ends[:, 0].unique()) > 0.999 * len(ends)
    for columns in (u, torch.cat([u[:-1], u[1:]], 1), torch.cat(keys, 1), ends):
        correlations = torch.corrcoef(columns.double().T).fill_diagonal_(0)
        assert correlations.abs().max() < 5 / math.sqrt(len(columns))


def test_numbers_do_not_change_between_versions():
    """A stopped run can only resume with newer code if these numbers do not change."""
    got = (uniform(torch.tensor([0, 1, 2 ** 31 - 1]), 2, 0, 10) * 2 ** 24).long().tolist()
    assert got == [[7081562, 14558248], [100576, 14437633], [1565904, 1843712]]


def test_seeds_of_more_than_31_bits_are_errors():
    assert uniform(torch.arange(2), 1, 2 ** 31 - 1, 10).shape == (2, 1)
    for seed in (2 ** 31, 2 ** 40, -1):
        with pytest.raises(InputError, match=f"the seed {seed} .* expected 0 to 2147483647"):
            uniform(torch.arange(2), 1, seed, 10)


def test_purposes_are_pinned_and_distinct():
    """PATCH_PLACES and TEXT_WINDOW share a number, because no sample uses both."""
    purposes = {name: value for name, value in vars(rng).items()
                if name.isupper() and not name.startswith("HASH_")}
    assert purposes == dict(
        SCENE=10, SCENE_NOISE=11, RANDOM_CROP=12, SHIFT=20, FLIP=21, RAND_AUGMENT=22, ERASE=23,
        ERASE_NOISE=24, MIX=25, VIEW=30, DISTORT=31, START=40, SIGNS=41, NOISE=42, APGD=43,
        SQUARE=44, FROST_NOISE=50, CORRUPTION=51, TEXT_WINDOW=70, PATCH_PLACES=70, PATCH_VALUES=71, DROPOUT=80,
        ADVERSARIAL=90)
    every = [*purposes.values(), *(rng.CORRUPTION + i for i in range(1, 15))]
    assert len({*every}) == len(every) - 1


def test_seeds_of_steps_are_pinned_and_distinct():
    """A resumed run needs the same seeds in every version of Python."""
    assert seed_from(0, DROPOUT, 1, 2) == 44090609972116
    assert seed_from(0, DROPOUT, np.int64(1), torch.tensor(2)) == 44090609972116
    seeds = {seed_from(seed, DROPOUT, step, rank) for seed in (0, 1, 2 ** 31 - 1)
             for step in range(25) for rank in range(4)}
    assert len(seeds) == 300 and 0 <= min(seeds) and max(seeds) < 2 ** 48


def test_seeds_of_steps_keep_their_distribution():
    """Seeds by BLAKE2 and by the earlier hash: PyTorch's generator gives uniform numbers."""
    def earlier(*key):
        *key, index = key
        high, low = (uniform(torch.tensor([index]), 2, *key)[0] * 2 ** 24).long().tolist()
        return high << 24 | low

    n = 3000
    sorted_numbers = []
    for make_seed in (seed_from, earlier):
        numbers = []
        for step in range(n):
            generator = torch.Generator().manual_seed(make_seed(0, DROPOUT, step))
            numbers.append(torch.rand(4, generator=generator))
        u = torch.stack(numbers).double()                                   # (n, 4)
        assert (u.mean(0) - 0.5).abs().max() < 5 / math.sqrt(12 * n)
        assert (u.var(0) * 12 - 1).abs().max() < 5 * math.sqrt(0.8 / n)
        neighbours = torch.cat([u[1:], u[:-1]], 1)
        correlations = torch.corrcoef(neighbours.T).fill_diagonal_(0)
        assert correlations.abs().max() < 5 / math.sqrt(n)
        sorted_numbers.append(u.flatten().sort().values)
    new, old = sorted_numbers                                               # Kolmogorov-Smirnov
    rank = torch.searchsorted(old, new) / len(old)
    distance = (rank - torch.arange(len(new)) / len(new)).abs().max()
    assert distance < 1.95 * math.sqrt(2 / len(new))                        # p = 0.001


def test_processes_share_whole_batches():
    """11 images make two batches of 4 per epoch. A resumed run continues in an epoch."""
    whole = [torch.stack(pair, 1) for pair in batch_pairs(11, 4, 0, 6, seed=1)]
    assert torch.cat(whole)[:, 0].tolist() == list(range(24))                   # positions
    first, second = (torch.cat(whole[i:i + 2])[:, 1] for i in (0, 2))
    assert len(first.unique()) == len(second.unique()) == 8 and not torch.equal(first, second)
    parts = [[torch.stack(pair, 1) for pair in batch_pairs(11, 4, 3, 6, 1, rank, 2)]
             for rank in (0, 1)]
    assert all(torch.equal(torch.cat(both), batch) for *both, batch in zip(*parts, whole[3:]))
    (_, index), = batch_pairs(20, 6, 0, 1, 1, repeats=3)
    assert len(index.unique()) == 2 and torch.equal(index[:2], index[2:4])      # ABABAB
