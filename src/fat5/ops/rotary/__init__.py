"""Rotary position embedding, with xPos's scale."""

from fat5.ops.rotary.api import apply_rotary, apply_rotary_qk, rotary_phases, xpos_scale

__all__ = ["apply_rotary", "apply_rotary_qk", "rotary_phases", "xpos_scale"]
