"""The positions of one stack's tokens, found once a forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fat5.nn.layout import MovesToDevice, SequenceLayout
from fat5.nn.position.rotary import Rotation, make_rotation
from fat5.nn.position.settings import PositionSettings
from fat5.nn.position.tokens import drawn_positions, token_positions


@dataclass(frozen=True)
class StackPositions(MovesToDevice):
    """The positions of a stack's tokens, as far as its self-attention cannot tell them from the slots.

    Args:
        ids: int64 [1 or B, L], where the bias has to be made of each pair of positions, quadratic in the length.
        rotation: Rotary encoding: what turns queries and keys.
    """

    ids: Tensor | None = None
    rotation: Rotation | None = None


def locate(
    settings: PositionSettings,
    layout: SequenceLayout,
    hidden_states: Tensor,
    head_dim: int,
    *,
    causal: bool,
    training: bool,
) -> StackPositions:
    """Return the positions for one forward of a stack.

    A stack calls this once, outside its blocks: layers share the draw of random positions, and a block that is computed
    again for its gradient sees the same.

    Args:
        settings: The stack's position encoding.
        layout: Layout of the batch.
        hidden_states: [B, L, d_model], or packed [total, d_model].
        head_dim: Width of a head.
        causal: True in a decoder.
        training: Draw random positions where the settings ask for them.

    Raises:
        ValueError: a packed batch where the bias has to exist in full, or sequences longer than the range of positions.
    """
    position_range = settings.randomized_position_range if training else None
    encoding, drawn = settings.position_encoding, position_range is not None
    # A bias by distance is a function of the slots, unless positions are random or the mask has holes to hide.
    if encoding == "none" or (encoding in ("relative", "alibi") and not drawn and layout.mask is None):
        return StackPositions()
    if layout.is_packed and encoding != "rotary":
        what = f"random positions with position_encoding={encoding!r}" if drawn else f"position_encoding={encoding!r}"
        raise ValueError(
            f"got a packed batch for {what}, whose bias exists in full, quadratic in the length, and has no packed "
            "form; pad the batch instead, or use the rotary encoding"
        )
    batch, length, device = hidden_states.shape[0], hidden_states.shape[-2], hidden_states.device
    if position_range is not None:
        ids = drawn_positions(layout, batch, length, position_range, device)
    else:
        # Rotary scores depend on distances alone: the slots of padded rows do.
        slots = SequenceLayout() if encoding == "rotary" and not layout.is_packed else layout
        ids = token_positions(slots, length, device)
    if encoding != "rotary":
        return StackPositions(ids=ids)
    longest = position_range or (length if layout.max_seqlen is None else layout.max_seqlen)
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else hidden_states.dtype
    return StackPositions(rotation=make_rotation(settings, ids, longest, head_dim, causal=causal, dtype=dtype))
