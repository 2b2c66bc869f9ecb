"""Counter-based random numbers: each is a pure function of a key and a counter, whoever draws it and whenever.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
in its counter form. A draw may serve as the key of further draws, which gives a tree:
`draw(draw(seed, epoch), document)` is a key of its own for each document of each epoch.

The streams of all runs hang on these functions: they are fixed for good (`jit` relies on that as well).
"""

from __future__ import annotations

import numpy as np

from fat5.data.jit import jit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_SHIFT_11 = np.uint64(11)
_SHIFT_27 = np.uint64(27)
_SHIFT_30 = np.uint64(30)
_SHIFT_31 = np.uint64(31)
_SHIFT_32 = np.uint64(32)
_FEISTEL_ROUNDS = 6


@jit
def draw(key: np.uint64, counter: int) -> np.uint64:
    """Return number `counter` (>= 0) of the stream `key`: 64 random bits."""
    bits = np.uint64(key) + (np.uint64(counter) + _ONE) * _GOLDEN
    bits = (bits ^ (bits >> _SHIFT_30)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> _SHIFT_27)) * _MULTIPLIER_2
    return bits ^ (bits >> _SHIFT_31)


@jit
def draw_below(key: np.uint64, counter: int, bound: int) -> np.int64:
    """Return an integer of [0, bound), 1 <= bound < 2^32, uniform up to a relative error of bound / 2^32."""
    return np.int64(((draw(key, counter) >> _SHIFT_32) * np.uint64(bound)) >> _SHIFT_32)


@jit
def draw_unit(key: np.uint64, counter: int) -> float:
    """Return a float64 of [0, 1), a multiple of 2^-53."""
    return np.float64(draw(key, counter) >> _SHIFT_11) * 2.0**-53


@jit
def permute(index: int, size: int, key: np.uint64) -> np.int64:
    """Return the image of `index` under the pseudo-random permutation `key` of range(size).

    A Feistel network of 6 rounds permutes the next power of two, and its image is permuted again until it falls
    below `size` (cycle walking; less than twice on average). Random access in constant memory: no shuffled list of
    documents. The domain has 2^8 elements at least: on smaller ones 6 rounds are measurably uneven.
    """
    bits = 8
    while (1 << bits) < size:
        bits += 1
    low_bits = np.uint64(bits // 2)
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << np.uint64(bits - bits // 2)) - _ONE
    value = np.uint64(index)
    limit = np.uint64(size)
    while True:
        high = value >> low_bits
        low = value & low_mask
        for round_number in range(_FEISTEL_ROUNDS):
            round_key = draw(key, round_number)
            if round_number % 2 == 0:
                high ^= draw(round_key, low) & high_mask
            else:
                low ^= draw(round_key, high) & low_mask
        value = (high << low_bits) | low
        if value < limit:
            return np.int64(value)
