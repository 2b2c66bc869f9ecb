"""Rotary position embedding, with xPos's scale."""

from fat5.ops.rotary.api import apply_rotary, rotary_phases, xpos_scale

__all__ = ["apply_rotary", "rotary_phases", "xpos_scale"]
