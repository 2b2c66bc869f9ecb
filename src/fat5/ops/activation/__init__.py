"""Gated activations of feed-forward layers."""

from fat5.ops.activation.api import gated_gelu, gated_gelu_linear, joined_gated_gelu

__all__ = ["gated_gelu", "gated_gelu_linear", "joined_gated_gelu"]
