"""Modules: T5's attention, feed-forward and norm, position encodings, and pooling."""

from fat5.nn.attention import Attention
from fat5.nn.feed_forward import FeedForward
from fat5.nn.layout import SequenceLayout
from fat5.nn.norm import RMSNorm
from fat5.nn.pooling import POOLINGS, pool
from fat5.nn.position import AlibiSlopes, FireBias, PositionSettings, RelativePositionBias

__all__ = [
    "POOLINGS",
    "AlibiSlopes",
    "Attention",
    "FeedForward",
    "FireBias",
    "PositionSettings",
    "RMSNorm",
    "RelativePositionBias",
    "SequenceLayout",
    "pool",
]
