"""Launching the activation's kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fat5.ops.activation.kernels import backward_kernel, forward_kernel
from fat5.ops.activation.tiles import TILES, BlockTile, candidates
from fat5.ops.launching import launch, on_device
from fat5.ops.prepared_launch import LAUNCHES_KEPT, PreparedLaunch, ceil_divide


def run_forward(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """Return `gelu(gate) * up`, contiguous; `tanh` for the approximation."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    (gate, up), strides, rows, width = _rows(gate, up)

    def run(tile: BlockTile) -> None:
        _forward_launch(tile, *strides, rows, width, tanh)(gate, up, out)

    with on_device(gate):
        size = (gate.element_size(), tanh, rows > 1)
        launch("gated_gelu forward", size, gate.device, TILES["forward"], candidates(), run)
    return out


def run_backward(
    grad: Tensor, gate: Tensor, up: Tensor, tanh: bool, gate_grad: bool, up_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of gate and up, contiguous, or None where not asked for."""
    grad_gate, grad_up = (gate.new_empty(gate.shape) if wanted else None for wanted in (gate_grad, up_grad))
    if gate.numel() == 0 or not (gate_grad or up_grad):
        return grad_gate, grad_up
    (grad, gate, up), strides, rows, width = _rows(grad, gate, up)

    def run(tile: BlockTile) -> None:
        _backward_launch(tile, *strides, width, rows, width, tanh)(grad, gate, up, grad_gate, grad_up, None)

    with on_device(gate):
        size = (gate.element_size(), tanh, rows > 1)
        launch("gated_gelu backward", size, gate.device, TILES["backward"], candidates(), run)
    return grad_gate, grad_up


def run_joined_backward(grad: Tensor, joined: Tensor, tanh: bool, again: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of gate and up, side by side as they are, and if asked for the forward's output again."""
    grad_joined = joined.new_empty(joined.shape)
    out = joined.new_empty(grad.shape) if again else None
    if joined.numel() == 0:
        return grad_joined, out
    width = grad.shape[-1]
    grad, joined, made = (_unit_stride(x.reshape(-1, x.shape[-1])) for x in (grad, joined, grad_joined))
    (gate, up), (grad_gate, grad_up) = (x.split(width, -1) for x in (joined, made))
    strides = (grad.stride(0), joined.stride(0), joined.stride(0), made.stride(0))

    def run(tile: BlockTile) -> None:
        _backward_launch(tile, *strides, joined.shape[0], width, tanh)(grad, gate, up, grad_gate, grad_up, out)

    with on_device(joined):
        size = (joined.element_size(), tanh, "joined", again)
        launch("gated_gelu backward", size, joined.device, TILES["backward"], candidates(), run)
    return grad_joined, out


@functools.lru_cache(LAUNCHES_KEPT)
def _forward_launch(tile: BlockTile, gate_row: int, up_row: int, rows: int, width: int, tanh: bool) -> PreparedLaunch:
    blocks = ceil_divide(width, tile.block)
    return PreparedLaunch(
        forward_kernel, (rows * blocks,), gate_row=gate_row, up_row=up_row, width=width, blocks_a_row=blocks, TANH=tanh,
        BLOCK=tile.block, **tile.options(),
    )  # fmt: skip


@functools.lru_cache(LAUNCHES_KEPT)
def _backward_launch(
    tile: BlockTile, grad_row: int, gate_row: int, up_row: int, made_row: int, rows: int, width: int, tanh: bool
) -> PreparedLaunch:
    blocks = ceil_divide(width, tile.block)
    return PreparedLaunch(
        backward_kernel, (rows * blocks,), grad_row=grad_row, gate_row=gate_row, up_row=up_row, made_row=made_row,
        width=width, blocks_a_row=blocks, TANH=tanh, BLOCK=tile.block, **tile.options(),
    )  # fmt: skip


def _rows(*tensors: Tensor) -> tuple[list[Tensor], list[int], int, int]:
    """Return the tensors as rows of neighbours, the strides from row to row, and the number and width of the rows.

    Where all are contiguous they are one row, which wastes nothing on widths that no block divides.
    """
    if all(x.is_contiguous() for x in tensors):
        return list(tensors), [0] * len(tensors), 1, tensors[0].numel()
    flat = [_unit_stride(x.reshape(-1, x.shape[-1])) for x in tensors]
    return flat, [x.stride(0) for x in flat], *flat[0].shape


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
