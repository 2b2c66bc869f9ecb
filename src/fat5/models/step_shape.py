"""The sizes of a step of decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepShape:
    """What the buffers of a step depend on.

    Attributes:
        batch: Rows of the encoder.
        beams: Rows of the decoder for each of them, neighbours.
        source_length: Encoder tokens that there is room for.
        target_length: Decoder tokens that there is room for.
        source_holes: The encoder's mask has padding between real tokens.
        target_padding: "none", "start" for rows of the decoder's prompt that begin with padding, or "holes".
        dtype: Type of keys and values.
    """

    batch: int
    beams: int
    source_length: int
    target_length: int
    source_holes: bool
    target_padding: str
    dtype: torch.dtype
