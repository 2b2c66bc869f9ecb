"""Position encodings of self-attention: T5's relative bias, ALiBi, rotary, FIRE, and randomised positions."""

from fat5.nn.position.alibi import AlibiSlopes, one_sided_attention, slope_exponents
from fat5.nn.position.bias import BIAS_NAMES, attention_bias, bias_module, hide_holes, shared_bias
from fat5.nn.position.fire import INITIAL_SCALE, FireBias
from fat5.nn.position.randomized import draw_positions
from fat5.nn.position.relative import RelativePositionBias
from fat5.nn.position.settings import POSITION_ENCODINGS, PositionSettings
from fat5.nn.position.stack import StackPositions, locate

__all__ = [
    "BIAS_NAMES",
    "INITIAL_SCALE",
    "POSITION_ENCODINGS",
    "AlibiSlopes",
    "FireBias",
    "PositionSettings",
    "RelativePositionBias",
    "StackPositions",
    "attention_bias",
    "bias_module",
    "draw_positions",
    "hide_holes",
    "locate",
    "one_sided_attention",
    "shared_bias",
    "slope_exponents",
]
