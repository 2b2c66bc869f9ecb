"""Randomised positions: a sorted random subset of a longer range for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_positions(lengths: Tensor, longest: int, position_range: int) -> Tensor:
    """Draw positions for sequences of these lengths.

    Each sequence of n tokens gets its own subset of n distinct positions out of `range(position_range)`, all subsets
    equally likely, in rising order. Short training sequences so see the positions and distances of long ones. The
    draw comes from torch's generator of the device.

    Args:
        lengths: Int tensor [S], each at most `longest`.
        longest: Columns of the result; a bound on the host, so that the shape needs no look at the device.
        position_range: At least `longest`.

    Returns:
        int64 [S, longest]; entries from a sequence's length on are `position_range`.

    Raises:
        ValueError: `longest` exceeds the range.

    Reference: Ruoss et al., Randomized positional encodings boost length generalization of transformers,
        arXiv:2305.16843.
    """
    if longest > position_range:
        raise ValueError(
            f"got sequences of up to {longest} tokens with randomized_position_range={position_range}; "
            "expected a range at least as long as the longest sequence"
        )
    noise = torch.rand(lengths.shape[0], position_range, device=lengths.device)
    order = noise.argsort(-1)[:, :longest]  # the start of a random permutation for each sequence
    unused = torch.arange(longest, device=lengths.device) >= lengths[:, None]
    return order.masked_fill(unused, position_range).sort(-1).values
