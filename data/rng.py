"""Random numbers from a hash instead of a generator.

The numbers of a sample depend on (seed, purpose, sample) only. So batch size, device, worker,
number of processes and resuming do not change these numbers, and no random state has to be saved.
"""

import hashlib
import math

import torch

# The purpose of a random number: the part of its key after the seed.
SCENE = 10                              # data/shapes.py
SCENE_NOISE = 11
RANDOM_CROP = 12                        # data/datasets.py
SHIFT = 20                              # data/augment.py
FLIP = 21
RAND_AUGMENT = 22
ERASE = 23
ERASE_NOISE = 24
MIX = 25
VIEW = 30                               # data/masks.py
DISTORT = 31
START = 40                              # attacks in robust/
SIGNS = 41
NOISE = 42
APGD = 43
SQUARE = 44
FROST_NOISE = 50                        # robust/frost.py, where this is the whole key, without seed
CORRUPTION = 51                         # 51 to 65, one per corruption of ImageNet-C: robust/
TEXT_WINDOW = 70                        # data/text.py; no image uses it, so the next 70 is safe
PATCH_PLACES = 70                       # robust/patches.py; no text uses it
PATCH_VALUES = 71
DROPOUT = 80                            # seeds of PyTorch's generator in the trainers
ADVERSARIAL = 90                        # train_cls.py

HASH_START = 0x1E3779B9                 # arbitrary
HASH_ADDED = 0x3C6EF372                 # arbitrary, but not 0: _mix does not change 0


def _mix(x):
    """Change int32 numbers in place by a round of a 32-bit hash, with the constants of "lowbias32".

    The products keep their last 32 bits. `>>` repeats the sign bit, so a mask removes the repeats.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2 ** 32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def uniform(index, n, *key):
    """Draw uniform numbers in [0, 1), (B, n) float32 on index's device, multiples of 2**-24.

    index: (B,) int64 in [0, 2**31), the samples' numbers. key: ints, such as (seed, purpose), whose
    last 32 bits count, or (B,) int32 tensors, such as the image of each pixel in augment.py. Row i
    depends on (key, index[i]) only, and column j does not depend on n.
    """
    row = torch.full_like(index, HASH_START, dtype=torch.int32)
    for k in (*key, index.int()):
        row = _mix(_mix(row ^ k).add_(HASH_ADDED))
    column = _mix(torch.arange(1, n + 1, device=index.device, dtype=torch.int32))
    hashed = _mix(_mix(row[:, None] ^ column).add_(row[:, None]))         # (B, n)
    hashed.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)                 # the first 24 bits
    return hashed.float().mul_(2.0 ** -24)


def normal(u):
    """Turn uniform numbers, multiples of 2**-24, into standard normal numbers.

    2**-24 moves each number to the middle of its interval, so that 0 does not become -infinity. The
    results lie between -5.5 and 5.5.
    """
    return math.sqrt(2) * torch.erfinv(2 * u - 1 + 2 ** -24)


def seed_from(*key):
    """Hash ints to a seed in [0, 2**48) for PyTorch's random generator."""
    numbers = tuple(int(number) for number in key)      # NumPy's integers have another repr
    text = repr(numbers)
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def epoch_order(n, epoch, seed, repeats=1):
    """Order the samples of an epoch, (n,) int64: a permutation of 0..n-1 keyed by (seed, epoch).

    repeats > 1 is DeiT's repeated augmentation: an epoch draws n / repeats images, each `repeats`
    times. The copies are neighbours in the result.
    """
    seed_of_epoch = seed * 1_000_003 + epoch        # differs for all seeds and epochs < 1,000,003
    generator = torch.Generator().manual_seed(seed_of_epoch)
    return torch.randperm(n, generator=generator).repeat_interleave(repeats)[:n]


def batch_pairs(n, batch_size, start, stop, seed, rank=0, world=1, repeats=1):
    """Yield (position, index) for each training step from `start` to `stop` - 1: (b,) int64 each.

    position: a sample's number in the whole run, which determines its random numbers. index: the
    number of its image, 0 to n - 1. An epoch has only whole batches. Process `rank` of `world` gets
    b = batch_size / world neighbouring samples of the batch.
    """
    b = batch_size // world
    epoch_steps = n // batch_size
    for step in range(start, stop):
        epoch, i = divmod(step, epoch_steps)
        if i == 0 or step == start:
            order = epoch_order(n, epoch, seed, repeats)                # (n,), shuffled images
        batch = order[i * batch_size:(i + 1) * batch_size]
        # Neighbours are mixed, so move copies of an image (--repeats) apart: AABBCC -> ABCABC.
        batch = torch.cat([batch[r::repeats] for r in range(repeats)])
        position = step * batch_size + torch.arange(batch_size)
        share = slice(rank * b, (rank + 1) * b)                         # of this process
        yield position[share], batch[share]
