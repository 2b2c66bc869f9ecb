"""The kernels of a step of decoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fat5.ops.attention.tiles import SHARED_MEMORY
from fat5.ops.step import attention_kernel, attention_launch, choice, choice_kernel, linear_kernel, tiles
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {
    "step linear": linear_kernel.linear_kernel,
    "step attention": attention_kernel.attention_kernel,
    "step choice": choice_kernel.choice_kernel,
}
_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_SPILLED_FLOAT32 = 256  # the exact path, without matrix units
_WIDTHS = (64, 512, 768, 1024, 2048)


def cases(everything: bool) -> list[Compilation]:
    """Every width, type and card; or those of a step of T5's, and the widest that fit a small card."""
    if not everything:
        few = [*_linear(90, 512, "bf16")][2:4] + [*_linear(90, 2048, "bf16")][3:4] + [*_linear(86, 768, "fp16")][2:3]
        own, cross, unbounded, _, _ = _attention(90, 64, "bf16")
        return [*few, own, cross, unbounded, next(_attention(86, 128, "bf16")), _choice(90)]
    found = []
    for card, width, dtype in itertools.product(ARCHITECTURES, _WIDTHS, ("bf16", "fp16", "fp32")):
        if dtype != "fp16" or width == 512:
            found += _linear(card, width, dtype)
    for card, dim, dtype in itertools.product(ARCHITECTURES, (16, 64, 128, 256), ("bf16", "fp32")):
        found += _attention(card, dim, dtype)
    return [*found, *map(_choice, ARCHITECTURES)]


def _linear(card: int, width: int, dtype: str) -> Iterator[Compilation]:
    constants = {
        "K": width, "BM": tiles.BM, "CLAMP": dtype == "fp16", "PRECISION": "ieee", "PDL": card >= 90,
    }  # fmt: skip
    kinds = dict.fromkeys(("X", "Residual", "Norm", "Weight", "Out", "Total"), dtype) | {"Tokens": None, "eps": "fp32"}
    plain = kinds | {"Residual": None, "Norm": None, "Total": None}
    rows = kinds | {"Tokens": "i64", "Residual": None}
    for types, gate, columns in ((kinds, 0, 512), (kinds, 0, 2048), (kinds, 1, 2048), (plain, 0, 512), (rows, 0, 2048)):
        tile, size = tiles.linear_tile(width, columns, _SIZES[dtype]), _SIZES[dtype]
        if tile.shared_memory(size, gated=gate != 0) > SHARED_MEMORY[card]:
            continue  # `linear_refusal`
        shape = {"BN": tile.columns, "PARTS": tile.parts, "BLOCK_K": tile.block_k, "GATED": gate}
        spills = 16 if size == 2 else MAX_SPILLED_FLOAT32
        options = {"num_warps": tile.parts}
        yield Compilation("step", "step linear", card, types, constants | shape, options, max_spilled=spills)


def _attention(card: int, dim: int, dtype: str) -> Iterator[Compilation]:
    tensors = dict.fromkeys(("Q", "K", "V", "O", "NewK", "NewV"), dtype) | {"scale": "fp32"}
    bounds = {"Positions": "i64", "KeyStarts": "i64", "KeyLengths": "i64"}
    block_n, warps = attention_launch.tile(512, dim, _SIZES[dtype])
    constants = {"BN": block_n, "D": dim, "BLOCK_D": dim, "RADIUS": 113, "ASM": True, "PDL": card >= 90}
    options = {"num_warps": warps}
    own = tensors | bounds | {"Table": "fp32"}
    cross = tensors | bounds | {"Table": None, "NewK": None, "NewV": None, "Positions": None}
    unbounded = own | {"KeyStarts": None, "KeyLengths": None}
    bare = cross | {"KeyStarts": None, "KeyLengths": None}
    for types in (own, cross, unbounded, unbounded | {"Table": None}, bare):
        yield Compilation("step", "step attention", card, types, constants, options)


def _choice(card: int) -> Compilation:
    numbers = ("Tokens", "Sequences", "Places", "Lengths", "Eos", "pad_token_id")
    types = {"Logits": "bf16", "Ended": "i1"} | dict.fromkeys(numbers, "i64")
    constants = {"BLOCK": choice.BLOCK, "BLOCK_EOS": 1}
    return Compilation("step", "step choice", card, types, constants, {"num_warps": choice.WARPS})
