"""Modules: T5's attention, feed-forward, norm and position bias."""

from fat5.nn.attention import Attention
from fat5.nn.feed_forward import FeedForward
from fat5.nn.layout import SequenceLayout
from fat5.nn.norm import RMSNorm
from fat5.nn.position import RelativePositionBias

__all__ = ["Attention", "FeedForward", "RMSNorm", "RelativePositionBias", "SequenceLayout"]
