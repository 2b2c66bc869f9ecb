"""Small models of every position encoding."""

from __future__ import annotations

import torch

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from tests.models.conftest import SIZES

ENCODINGS = {
    "relative": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
    "alibi": {"position_encoding": "alibi"},
    "alibi, learned": {"position_encoding": "alibi", "alibi_learned_slopes": True},
    "alibi, one-sided": {"position_encoding": "alibi", "alibi_symmetric": False, "alibi_learned_slopes": True},
    "rotary": {"position_encoding": "rotary"},
    "rotary, part": {"position_encoding": "rotary", "rotary_fraction": 0.5, "rotary_interleaved": True,
                     "rotary_theta": 100.0},
    "xpos": {"position_encoding": "rotary", "rotary_scale_base": 20.0, "rotary_interleaved": True},
    "fire": {"position_encoding": "fire", "fire_threshold": 9.0, "fire_width": 5},
    "none": {"position_encoding": "none"},
}  # fmt: skip
RANDOMIZED = {
    f"{name}, randomized": ENCODINGS[name] | {"randomized_position_range": 90}
    for name in ("relative", "alibi, one-sided", "rotary", "fire")
}
DENSE = ("fire", "fire, randomized", "relative, randomized", "alibi, one-sided, randomized")
LAYOUTS = [(name, "padded") for name in [*ENCODINGS, *RANDOMIZED]]
LAYOUTS += [(name, "packed") for name, _ in LAYOUTS if name not in DENSE]


def make(encoding: str, **changes) -> FAT5ForConditionalGeneration:
    """A small model; parameters of the position encoding are moved off their initial values."""
    sizes = {k: v for k, v in SIZES.items() if not k.startswith("relative_")}
    model = FAT5ForConditionalGeneration(FAT5Config(**sizes | (ENCODINGS | RANDOMIZED)[encoding] | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("relative_attention_bias", ".alibi.", ".fire.")):
                parameter += 0.3 * torch.rand_like(parameter)
    return model
