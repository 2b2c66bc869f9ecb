"""The gated activation's kernels."""

from __future__ import annotations

import itertools

from fat5.ops.activation import kernels
from fat5.ops.activation.tiles import TILES
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {
    "gated_gelu forward": kernels.forward_kernel,
    "gated_gelu backward": kernels.backward_kernel,
    "gated_gelu backward again": kernels.backward_kernel,
}
_INPUTS = ("Gate", "Up", "Grad", "GradGate", "GradUp")


def cases(everything: bool) -> list[Compilation]:
    """All kernels and forms for every card and type; or the tanh form in bf16 on one card.

    The backward is compiled without and with the forward's output, which it then writes again.
    """
    types = ("bf16", "fp16", "fp32") if everything else ("bf16",)
    architectures = ARCHITECTURES if everything else (90,)
    flags = itertools.product(KERNELS, architectures, types, (True, False) if everything else (True,))
    found = []
    for name, architecture, dtype, tanh in flags:
        tile = TILES["forward" if name.endswith("forward") else "backward"]
        out = None if name.endswith("backward") else dtype
        found.append(
            Compilation(
                "activation",
                name,
                architecture,
                dict.fromkeys(_INPUTS, dtype) | {"Out": out},
                {"TANH": tanh, "BLOCK": tile.block},
                tile.options(),
            )
        )
    return found
