"""The gated feed-forward layer, with the activation inside its first product where that is faster."""

from fat5.ops.feed_forward.api import gated_feed_forward

__all__ = ["gated_feed_forward"]
