"""The kernels of the fused AdamWScale."""

from __future__ import annotations

from collections.abc import Iterator

import triton.language as tl

from fat5.optim import kernels
from fat5.optim.fused_update import LAUNCH
from tests.ops.compilation import ARCHITECTURES, Compilation

KERNELS = {
    "adamw_scale sums": kernels.square_sums_kernel,
    "adamw_scale clip": kernels.clip_kernel,
    "adamw_scale scalars": kernels.scalars_kernel,
    "adamw_scale update": kernels.update_kernel,
}
_TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
_TENSORS = {
    "Addresses": "i64", "Table": "i64", "Gradients": "i64", "Owners": "i32", "Sums": "fp32", "Scalars": "fp32",
    "Result": "fp32", "LearningRate": "fp32",
}  # fmt: skip
_SCALARS = dict.fromkeys(
    ("max_norm", "weight_decay", "log_beta1", "log_beta2", "one_minus_beta1", "beta2", "one_minus_beta2", "eps"), "fp32"
)
_BLOCKS = {"BLOCK": LAUNCH.block, "BLOCKS_A_CHUNK": LAUNCH.blocks_a_chunk}


def cases(everything: bool) -> list[Compilation]:
    """Every type, with and without what may be absent, for every card; or bf16 with everything on one card."""
    if everything:
        return [case for architecture in ARCHITECTURES for case in _at(architecture, tuple(_TYPES))]
    return [case for case in _at(90, ("bf16",)) if case.types.get("GradScale", "") is not None]


def _at(architecture: int, dtypes: tuple[str, ...]) -> Iterator[Compilation]:
    for dtype in dtypes:
        kind = _TYPES[dtype]
        for vector in (16 // (kind.primitive_bitwidth // 8), 1):
            constants = {"TYPE": kind, "VECTOR": vector, **_BLOCKS}
            yield _compilation("sums", architecture, _TENSORS, constants, unaligned=vector == 1)
        kahan = dtype != "fp32"
        for scale in ("fp32", None):
            for vector in (4, 1):
                constants = {"TYPE": kind, "GRAD_TYPE": kind, "KAHAN": kahan, "VECTOR": vector, **_BLOCKS}
                types = _TENSORS | {"GradScale": scale}
                yield _compilation("update", architecture, types, constants, unaligned=vector == 1)
    # Loads of whole vectors are not to be had: a tensor's sums may start anywhere.
    yield _compilation("clip", architecture, _TENSORS, {"BLOCK": 4096}, num_warps=16, unaligned=True)
    constants = {"LR_IS_TENSOR": True, "MIN_SCALE": 1e-3, "CHUNK": LAUNCH.chunk, "BLOCK": 1024}
    yield _compilation("scalars", architecture, _TENSORS, constants, num_warps=4, unaligned=True)


def _compilation(
    name: str, architecture: int, types: dict, constants: dict, *, unaligned: bool, num_warps: int = LAUNCH.warps
) -> Compilation:
    named = {parameter.name for parameter in KERNELS[f"adamw_scale {name}"].params}
    own = {parameter: kind for parameter, kind in (types | _SCALARS).items() if parameter in named}
    options = {"num_warps": num_warps}
    return Compilation("optimizer", f"adamw_scale {name}", architecture, own, constants, options, unaligned=unaligned)
