"""A step of decoding, in which few rows pass each weight and the number of kernels is what counts."""

from fat5.ops.step.attention import step_attention
from fat5.ops.step.choice import choose_next
from fat5.ops.step.linear import step_linear

__all__ = ["choose_next", "step_attention", "step_linear"]
