"""Whether the fused kernel runs here, and is taken without being asked for."""

from __future__ import annotations

import os

import torch

SWITCH = "FAT5_FEED_FORWARD"
"""Environment variable: with 0 the fused kernel is taken only by those who ask for it."""

CAPABILITY = (9, 0)
"""The cards on which it is faster than a product of cuBLAS with the activation's own kernel behind it."""

LEAST_ROWS = 8192
"""Tokens from which it is taken: with few tiles a program nothing hides the end of the last one, and a step of decoding
is no case for it."""


@torch.compiler.assume_constant_result
def card_can_fuse() -> bool:
    """Return whether the current card has the descriptors that the kernel needs, and is one of `CAPABILITY`."""
    return torch.version.hip is None and torch.cuda.get_device_capability() == CAPABILITY


@torch.compiler.assume_constant_result
def fuses_by_default() -> bool:
    """Return whether the environment lets it be taken by default."""
    return os.environ.get(SWITCH) != "0"
