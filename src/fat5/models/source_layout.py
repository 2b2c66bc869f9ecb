"""The layout of the encoder's tokens, read once where a decoder takes many steps with one cache."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fat5.models.token_layout import make_layout
from fat5.nn import SequenceLayout

_seen: WeakKeyDictionary[Any, tuple[Tensor, int, SequenceLayout]] = WeakKeyDictionary()


def source_layout(cache: Any, shape: torch.Size, mask: Tensor | None) -> SequenceLayout:
    """Return the layout of padded encoder tokens, that of the step before where the cache and the mask are the same.

    Reading a mask takes some ten kernels and waits for the device.

    Args:
        cache: The decoder's cache, or None.
        shape: [B, L] of the encoder's tokens.
        mask: [B, L], or None.
    """
    if cache is None or mask is None or torch.compiler.is_compiling() or mask.is_inference():
        return make_layout(shape, mask, None, None)
    seen = _seen.get(cache)
    if seen is not None and seen[0] is mask and seen[1] == mask._version and mask.shape == shape:
        return seen[2]
    layout = make_layout(shape, mask, None, None)
    _seen[cache] = mask, mask._version, layout
    return layout
