"""The gated activation's kernels."""

from __future__ import annotations

import itertools

from fat5.ops.activation import kernels
from fat5.ops.activation.tiles import TILES
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {"gated_gelu forward": kernels.forward_kernel, "gated_gelu backward": kernels.backward_kernel}
_TENSORS = ("Gate", "Up", "Out", "Grad", "GradGate", "GradUp")


def cases(everything: bool) -> list[Compilation]:
    """Both kernels and forms for every card and type; or the tanh form in bf16 on one card."""
    types = ("bf16", "fp16", "fp32") if everything else ("bf16",)
    architectures = ARCHITECTURES if everything else (90,)
    flags = itertools.product(TILES.items(), architectures, types, (True, False) if everything else (True,))
    return [
        Compilation(
            "activation",
            f"gated_gelu {name}",
            architecture,
            dict.fromkeys(_TENSORS, dtype),
            {"TANH": tanh, "BLOCK": tile.block},
            tile.options(),
        )
        for (name, tile), architecture, dtype, tanh in flags
    ]
