"""The decoder's cache: keys and values of the tokens that it has seen, and of the encoder's states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import ALL_CACHE_NAMES

from fat5.nn import KeyValues

CACHE_NAME = "cache" if "cache" in ALL_CACHE_NAMES else "past_key_values"
"""What this release of Transformers calls a cache, in arguments and outputs."""


class DecoderCache(Protocol):
    """What a decoder's stack asks of a cache."""

    @property
    def past(self) -> int | Tensor:
        """Tokens in the cache before the call: an int, or an int tensor without dimensions on the device."""
        ...

    def num_keys(self, num_queries: int) -> int:
        """Return the length of a layer's keys after this many more, free slots included."""
        ...

    def layer(self, index: int) -> tuple[KeyValues, KeyValues]:
        """Return a layer's keys and values of self-attention and of cross-attention."""
        ...

    def joined_feed_forward(self, index: int) -> Tensor | None:
        """Return the weights of a layer's wi_0 and wi_1 one below the other, or None to use them as they are."""
        ...


class TransformersCache:
    """A cache of Transformers, dynamic or static, as a `DecoderCache`.

    Args:
        cache: Where keys and values are kept, [B, H, L, D].
    """

    def __init__(self, cache: EncoderDecoderCache) -> None:
        self._cache = cache
        past = cache.get_seq_length()
        # A static cache counts in a tensor that its first layer moves on.
        self.past: int | Tensor = past.clone() if isinstance(past, Tensor) else past

    def num_keys(self, num_queries: int) -> int:
        """Return the length of the keys that self-attention sees."""
        length, _ = self._cache.get_mask_sizes(num_queries, 0)
        return length

    def layer(self, index: int) -> tuple[KeyValues, KeyValues]:
        """Return the two caches of a layer."""
        return _SelfKeyValues(self._cache, index), _CrossKeyValues(self._cache, index)

    def joined_feed_forward(self, index: int) -> Tensor | None:
        """Use the weights as they are."""
        return None


@dataclass(slots=True)
class _SelfKeyValues:
    cache: EncoderDecoderCache
    index: int
    joined: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.self_attention_cache.update(k.transpose(1, 2), v.transpose(1, 2), self.index)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def stored(self) -> tuple[Tensor, Tensor] | None:
        return None


@dataclass(slots=True)
class _CrossKeyValues:
    cache: EncoderDecoderCache
    index: int
    joined: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.cross_attention_cache.update(k.transpose(1, 2), v.transpose(1, 2), self.index)
        self.cache.is_updated[self.index] = True
        return keys.transpose(1, 2), values.transpose(1, 2)

    def stored(self) -> tuple[Tensor, Tensor] | None:
        if not self.cache.is_updated.get(self.index):
            return None
        layer: Any = self.cache.cross_attention_cache.layers[self.index]
        return layer.keys.transpose(1, 2), layer.values.transpose(1, 2)


def given_cache(cache: Any, past_key_values: Any) -> EncoderDecoderCache | None:
    """Return the cache that a model was called with, under either of the names that Transformers has for it.

    Raises:
        ValueError: Both names are used, or the cache is not one for an encoder and a decoder.
    """
    if cache is not None and past_key_values is not None:
        raise ValueError("got cache and past_key_values, two names of one thing; pass one of them")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, EncoderDecoderCache):
        raise ValueError(
            f"got a cache of type {type(cache).__name__}; expected an EncoderDecoderCache, which holds one cache for "
            "self-attention and one for cross-attention"
        )
    return cache


def new_cache() -> EncoderDecoderCache:
    """Return an empty cache that grows."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def mask_with_past(mask: Tensor | None, past: int | Tensor, num_queries: int, num_keys: int) -> Tensor | None:
    """Return a decoder's padding mask over all keys of a cache.

    Args:
        mask: [B, past + num_queries], or longer where the cache is, or None.
        past: Tokens in the cache.
        num_queries: Tokens of this call.
        num_keys: Keys with the cache's free slots, which causality hides: they count as real.

    Raises:
        ValueError: The mask leaves out the tokens in the cache, or is longer than it.
    """
    if mask is None:
        return None
    least = num_queries if isinstance(past, Tensor) else past + num_queries
    if mask.ndim != 2 or not least <= mask.shape[1] <= num_keys:
        raise ValueError(
            f"got decoder_attention_mask {list(mask.shape)} for {num_queries} tokens behind a cache; expected "
            f"[batch, length] with an entry for each token, those in the cache first: {least} to {num_keys}"
        )
    return F.pad(mask, (0, num_keys - mask.shape[1]), value=1)
