"""Which position encoding a model has, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import cast

from fat5.errors import nearest

POSITION_ENCODINGS = ("relative", "alibi", "rotary", "fire", "none")
"""Position encodings of self-attention by name; cross-attention has none."""

_PREFIXES = {"relative_": "relative", "alibi_": "alibi", "rotary_": "rotary", "fire_": "fire"}


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and cast(float, value) > 0


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_switch(value: object) -> bool:
    return type(value) is bool


_EXPECTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "relative_attention_num_buckets": (_is_count, "an integer of at least 1"),
    "relative_attention_max_distance": (_is_count, "an integer of at least 1"),
    "relative_attention_per_layer": (_is_switch, "true or false"),
    "alibi_symmetric": (_is_switch, "true or false"),
    "alibi_learned_slopes": (_is_switch, "true or false"),
    "rotary_theta": (_is_positive, "a number above 0"),
    "rotary_fraction": (lambda value: _is_positive(value) and cast(float, value) <= 1, "a number in (0, 1]"),
    "rotary_interleaved": (_is_switch, "true or false"),
    "rotary_scale_base": (lambda value: value is None or _is_positive(value), "a number above 0, or None"),
    "fire_threshold": (_is_positive, "a number above 0"),
    "fire_width": (_is_count, "an integer of at least 1"),
    "randomized_position_range": (lambda value: value is None or _is_count(value), "an integer of at least 1, or None"),
}


@dataclass(frozen=True)
class PositionSettings:
    """The position encoding of a stack's self-attention; names and meanings are those of `FAT5Config`.

    Attributes:
        position_encoding: A name in `POSITION_ENCODINGS`.
        relative_attention_num_buckets: relative: rows of T5's table.
        relative_attention_max_distance: relative: distance in tokens from which the last bucket holds.
        relative_attention_per_layer: relative: a table a layer, rather than a table a stack.
        alibi_symmetric: alibi, encoder: True penalises earlier and later keys alike; False lets the first half of the
            heads see earlier keys alone and the second half later keys alone.
        alibi_learned_slopes: alibi: train the slopes.
        rotary_theta: rotary: base of the frequencies.
        rotary_fraction: rotary: share of each head's channels that is rotated, rounded down to an even number.
        rotary_interleaved: rotary: pair neighbouring channels instead of the first half with the second.
        rotary_scale_base: rotary, decoder: scale base of xPos in tokens; None for none.
        fire_threshold: fire: initial threshold L in tokens.
        fire_width: fire: hidden units of the function that makes the bias.
        randomized_position_range: In training each sequence takes a sorted random subset of range(this) as its
            positions; None for plain positions.

    Raises:
        ValueError: A value that cannot be, or a setting of another encoding than the one chosen.
    """

    position_encoding: str = "relative"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_attention_per_layer: bool = False
    alibi_symmetric: bool = True
    alibi_learned_slopes: bool = False
    rotary_theta: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_interleaved: bool = False
    rotary_scale_base: float | None = None
    fire_threshold: float = 512.0
    fire_width: int = 32
    randomized_position_range: int | None = None

    def __post_init__(self) -> None:
        encoding = self.position_encoding
        if encoding not in POSITION_ENCODINGS:
            hint = nearest(str(encoding), POSITION_ENCODINGS)
            raise ValueError(f"got position_encoding={encoding!r}; expected one of {list(POSITION_ENCODINGS)}{hint}")
        for field in fields(self):
            owner = next((name for prefix, name in _PREFIXES.items() if field.name.startswith(prefix)), encoding)
            value = getattr(self, field.name)
            if owner != encoding and value != field.default:
                raise ValueError(
                    f"got {field.name}={value!r} with position_encoding={encoding!r}; it is a setting of {owner!r} and "
                    f"would do nothing: leave it out, or set position_encoding={owner!r}"
                )
        for name, (fits, expected) in _EXPECTED.items():
            value = getattr(self, name)
            if not fits(value):
                raise ValueError(f"got {name}={value!r}; expected {expected}")
        if encoding == "none" and self.randomized_position_range is not None:
            raise ValueError(
                f"got randomized_position_range={self.randomized_position_range} with position_encoding='none', which "
                "has no positions to randomise"
            )

    def check_head(self, num_heads: int, head_dim: int) -> None:
        """Raise a ValueError where heads of this number and width cannot take the encoding."""
        if not self.alibi_symmetric and num_heads < 2:
            raise ValueError(f"got alibi_symmetric=False with {num_heads} head; expected at least 2, one a direction")
        if self.position_encoding == "rotary" and self.rotary_dim(head_dim) < 2:
            raise ValueError(
                f"got rotary_fraction={self.rotary_fraction} for heads of {head_dim} channels, which rotates none; "
                f"expected at least {2 / head_dim:.3g}"
            )

    def is_one_sided(self, *, causal: bool) -> bool:
        """Return whether half of the heads see earlier keys alone and half later keys alone: in an encoder."""
        return self.position_encoding == "alibi" and not self.alibi_symmetric and not causal

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated."""
        # The rounding takes back what 0.7 * 10 = 6.999... loses.
        return int(round(head_dim * self.rotary_fraction, 6)) // 2 * 2
