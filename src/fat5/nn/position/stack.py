"""The positions of one stack's tokens, found once a forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        ids: Those of the keys, int64 [1 or B, Lk], where the bias has to be made of each pair of positions, quadratic
            in the length.
        query_ids: Those of the queries, [1 or B, Lq], where `ids` are given.
        rotation: Rotary encoding: what turns queries and new keys.
    """

    ids: Tensor | None = None
    query_ids: Tensor | None = None
    rotation: Rotation | None = None

    def on_backend(self, name: str) -> StackPositions:
        """Return the same with a rotation that runs on this backend of `fat5.ops.apply_rotary_qk`."""
        return self if self.rotation is None else replace(self, rotation=replace(self.rotation, backend=name))


def locate(
    settings: PositionSettings,
    layout: SequenceLayout,
    hidden_states: Tensor,
    head_dim: int,
    *,
    causal: bool,
    training: bool,
    past: int | Tensor = 0,
    num_keys: int | None = None,
    in_full: bool = False,
) -> StackPositions:
    """Return the positions for one forward of a stack.

    A stack calls this once, outside its blocks: layers share the draw of random positions, and a block that is computed
    again for its gradient sees the same.

    Args:
        settings: The stack's position encoding.
        layout: Layout of the batch, keys in a cache included.
        hidden_states: [B, L, d_model], or packed [total, d_model].
        head_dim: Width of a head.
        causal: True in a decoder.
        training: Draw random positions where the settings ask for them.
        past: Tokens in the cache before these: an int, or an int tensor without dimensions.
        num_keys: Keys with the cache's, by default those of these tokens.
        in_full: Have a bias made of each pair of positions where distances would do: for few queries of many layers.

    Raises:
        ValueError: a packed batch where the bias has to exist in full or with a cache, sequences longer than the range
            of positions, or random positions with a cache.
    """
    position_range = settings.randomized_position_range if training else None
    encoding, drawn = settings.position_encoding, position_range is not None
    # A bias by distance is a function of the slots, unless positions are random or the mask has holes to hide.
    by_distance = encoding in ("relative", "alibi") and not drawn and layout.mask is None
    if encoding == "none" or (by_distance and not in_full):
        return StackPositions()
    if layout.is_packed and encoding != "rotary":
        what = f"random positions with position_encoding={encoding!r}" if drawn else f"position_encoding={encoding!r}"
        raise ValueError(
            f"got a packed batch for {what}, whose bias exists in full, quadratic in the length, and has no packed "
            "form; pad the batch instead, or use the rotary encoding"
        )
    batch, length, device = hidden_states.shape[0], hidden_states.shape[-2], hidden_states.device
    look = not isinstance(past, Tensor)  # a count on the device belongs to a step that is a graph, or is to become one
    if position_range is not None:
        if num_keys is not None:
            raise ValueError(
                "got a cache with random positions, which are drawn anew in each call; call model.eval() to generate, "
                "or pass use_cache=False"
            )
        ids = query_ids = drawn_positions(layout, batch, length, position_range, device)
    elif encoding == "rotary":
        # Rotary scores depend on distances alone: the slots of padded rows do.
        slots = layout if layout.is_packed else SequenceLayout()
        ids = query_ids = token_positions(slots, length, device, look=look) + past
    else:
        ids = query_ids = token_positions(layout, length if num_keys is None else num_keys, device, look=look)
        if num_keys is not None:
            query_ids = ids.index_select(1, torch.arange(length, device=device) + past)
    if encoding != "rotary":
        return StackPositions(ids=ids, query_ids=query_ids)
    longest = position_range or (num_keys or length if layout.max_seqlen is None else layout.max_seqlen)
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else hidden_states.dtype
    return StackPositions(rotation=make_rotation(settings, ids, longest, head_dim, causal=causal, dtype=dtype))
