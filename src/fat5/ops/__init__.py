"""Functions on tensors: attention, norms and losses. Knows torch, and nothing of the models."""

from fat5.ops.activation import gated_gelu, gated_gelu_linear, joined_gated_gelu
from fat5.ops.attention.api import flash_attention
from fat5.ops.attention.bias import (
    AlibiBias,
    DenseBias,
    DistanceBias,
    RelativeBias,
    relative_position_buckets,
    saturation_radius,
)
from fat5.ops.attention.joined import joined_attention
from fat5.ops.attention.plan import AttentionPlan, plan_attention
from fat5.ops.feed_forward import gated_feed_forward
from fat5.ops.inductor_messages import shorten as _shorten_inductor_messages
from fat5.ops.loss import CrossEntropyOutput, cross_entropy, linear_cross_entropy
from fat5.ops.norm import add_rms_norm, rms_norm
from fat5.ops.rotary import apply_rotary, apply_rotary_qk, rotary_phases, xpos_scale

_shorten_inductor_messages()

__all__ = [
    "AlibiBias",
    "AttentionPlan",
    "CrossEntropyOutput",
    "DenseBias",
    "DistanceBias",
    "RelativeBias",
    "add_rms_norm",
    "apply_rotary",
    "apply_rotary_qk",
    "cross_entropy",
    "flash_attention",
    "gated_feed_forward",
    "gated_gelu",
    "gated_gelu_linear",
    "joined_attention",
    "joined_gated_gelu",
    "linear_cross_entropy",
    "plan_attention",
    "relative_position_buckets",
    "rms_norm",
    "rotary_phases",
    "saturation_radius",
    "xpos_scale",
]
