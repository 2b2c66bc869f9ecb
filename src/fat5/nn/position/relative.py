"""T5's relative position bias as a module."""

from __future__ import annotations

from torch import nn

from fat5.ops import DistanceBias, RelativeBias


class RelativePositionBias(nn.Embedding):
    """T5's table of learned biases, `weight` [num_buckets, num_heads]; see `fat5.ops.RelativeBias`.

    Args:
        num_buckets: Buckets in all; a bidirectional table splits them evenly between both directions.
        num_heads: Heads, one column each.
        bidirectional: True in an encoder, False in a causal decoder.
        max_distance: Distance in tokens from which the last bucket holds.
    """

    def __init__(self, num_buckets: int, num_heads: int, *, bidirectional: bool, max_distance: int = 128) -> None:
        super().__init__(num_buckets, num_heads)
        self.bidirectional = bidirectional
        self.max_distance = max_distance

    def by_distance(self) -> DistanceBias:
        """Return the bias expanded to one entry a distance, [num_heads, 2R + 1] in float32."""
        return RelativeBias(self.weight, bidirectional=self.bidirectional, max_distance=self.max_distance).by_distance()
