"""The norm's kernels against the formula in float64: through Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from fat5.ops import add_rms_norm, rms_norm
from fat5.ops.norm import tiles
from fat5.ops.norm.reference import rms_norm_reference
from fat5.ops.norm.residual import FLOAT16_LIMIT
from tests.ops.kernel_checks import (
    CUDA,
    DEVICE,
    LOW_PRECISION,
    captured,
    hold_the_tolerance_rule,
    leaf,
    needs_gpu,
    needs_kernels,
    with_gradients,
)  # fmt: skip

pytestmark = needs_kernels

norm = functools.partial(rms_norm, eps=0.1, backend="triton")
add_norm = functools.partial(add_rms_norm, eps=0.1, backend="triton")


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_reference(x, weight, 0.1)


def add_reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, 0.1), total


SHAPES = [(7,), (1, 1), (43, 33), (2, 3, 5, 48), (203, 512), (3, 704), (2, 5000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference_with_gradients(shape):
    hold_the_tolerance_rule(norm, reference, [leaf(*shape), leaf(shape[-1], mean=1.0)])


@pytest.mark.parametrize("shape", SHAPES)
def test_addition_and_norm_equal_the_reference_with_gradients(shape):
    hold_the_tolerance_rule(add_norm, add_reference, [leaf(*shape), leaf(*shape), leaf(shape[-1], mean=1.0)])


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("weight_dtype", ["same", torch.float32])
def test_types_and_errors_in_low_precision(dtype, weight_dtype):
    """Pitfall: a float32 weight with half-precision input changes the output type."""
    weight = leaf(176, mean=1.0, dtype=dtype if weight_dtype == "same" else weight_dtype)
    x, residual = leaf(41, 176, dtype=dtype), leaf(41, 176, dtype=dtype)
    for results in (
        hold_the_tolerance_rule(norm, reference, [x, weight]),
        hold_the_tolerance_rule(add_norm, add_reference, [x, residual, weight]),
    ):
        *others, grad_weight = results
        assert {t.dtype for t in others} == {dtype}
        assert grad_weight.dtype == weight.dtype


def test_sum_of_two_types_has_the_wider():
    x, residual, weight = leaf(5, 24, dtype=torch.float16), leaf(5, 24), leaf(24)
    y, total, *grads = with_gradients(add_norm, [x, residual, weight], [torch.ones(5, 24, device=DEVICE)] * 2)
    assert y.dtype == total.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.float16, torch.float32, torch.float32]
    assert torch.equal(grads[0], grads[1].half())
    assert torch.equal(total, x.float() + residual)


def test_weight_gradient_is_summed_in_float32():
    """Pitfall: a norm's weight gradient summed in half precision; over 5,000 rows such a sum sticks at 2,048."""
    rows = 5_000
    x = torch.ones(rows, 8, dtype=torch.float16, device=DEVICE)
    weight = torch.ones(8, dtype=torch.float16, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(norm(x, weight, eps=1e-6), weight, torch.ones_like(x))
    torch.testing.assert_close(grad, torch.full_like(grad, rows), rtol=1e-3, atol=0)


def test_rows_above_the_widest_fused_one(monkeypatch):
    """The weight's gradient then takes a kernel of its own."""
    monkeypatch.setattr(tiles, "MAX_FUSED_WIDTH", 64)
    monkeypatch.setattr(tiles, "WEIGHT_COLUMNS", 32)
    hold_the_tolerance_rule(norm, reference, [leaf(37, 100), leaf(100)])
    hold_the_tolerance_rule(norm, reference, [leaf(37, 100).detach(), leaf(100)])
    hold_the_tolerance_rule(add_norm, add_reference, [leaf(37, 100), leaf(37, 100), leaf(100)])


@pytest.mark.parametrize("frozen", [(0,), (2,), (0, 1), (1, 2)])
def test_frozen_inputs_take_no_gradient_and_change_none(frozen):
    leaves = [leaf(11, 20), leaf(11, 20), leaf(20, mean=1.0)]
    for place in frozen:
        leaves[place].requires_grad_(False)
    hold_the_tolerance_rule(add_norm, add_reference, leaves)
    hold_the_tolerance_rule(norm, reference, [leaves[0], leaf(20)] if 0 in frozen else [leaf(11, 20), leaves[2]])


@pytest.mark.parametrize("place", [0, 1])
def test_one_of_the_two_outputs_alone(place):
    leaves = [leaf(6, 20), leaf(6, 20), leaf(20)]
    grads = [torch.randn(6, 20, device=DEVICE)]
    got, expected = (
        with_gradients(lambda *x, f=f: f(*x)[place] * x[2].sum(), leaves, grads) for f in (add_norm, add_reference)
    )
    torch.testing.assert_close(got, expected)


def test_strided_and_expanded_inputs_equal_contiguous_ones():
    x, weight = leaf(6, 10), leaf(10)
    for view in (x[:, :6], x.t(), x[::2, 1::2], x[:1].expand(4, 10), x.reshape(2, 3, 10).transpose(0, 1)):
        gain = weight[: view.shape[-1]]
        torch.testing.assert_close(norm(view, gain), reference(view, gain))
        torch.testing.assert_close(add_norm(view, view, gain), add_reference(view, view, gain))
        # The gradient of a sum has no strides.
        grads = [torch.autograd.grad(f(view, gain).sum(), (x, weight)) for f in (norm, reference)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    y = norm(x, weight)
    (got,) = torch.autograd.grad(y.t()[::2], x, torch.ones_like(y.t()[::2]))
    y = reference(x, weight)
    torch.testing.assert_close(got, torch.autograd.grad(y.t()[::2], x, torch.ones_like(y.t()[::2]))[0])


def test_inputs_stay_as_they_are():
    x, residual, weight = (leaf(*shape).detach() for shape in ((4, 12), (4, 12), (12,)))
    before = [t.clone() for t in (x, residual, weight)]
    _, total = add_norm(x, residual, weight)
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), before, strict=True))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_empty_input_gives_empty_output_and_zero_weight_gradient(shape):
    x, weight = leaf(*shape), leaf(16)
    y, grad_x, grad_weight = with_gradients(norm, [x, weight], [torch.ones(shape, device=DEVICE)])
    assert y.shape == grad_x.shape == shape
    assert torch.equal(grad_weight, torch.zeros_like(weight))
    assert add_norm(x, x, weight)[1].shape == shape


def test_zero_rows_are_finite():
    x = torch.zeros(2, 8, device=DEVICE, requires_grad=True)
    y, grad = with_gradients(lambda x: norm(x, torch.ones(8, device=DEVICE), eps=1e-6), [x], [torch.ones_like(x)])
    assert torch.equal(y, torch.zeros_like(x))
    torch.testing.assert_close(grad, torch.full_like(x, 1e3))


def test_float16_sums_stay_finite_as_in_t5():
    """Pitfall: fp16 states overflow. Both backends clamp the sum, and clamped elements pass no gradient."""
    x = torch.tensor([[60_000.0, torch.inf, -60_000.0, 3.0]], dtype=torch.float16, device=DEVICE)
    residual = 0.5 * x.clamp(-60_000, 60_000)
    grads = [torch.full_like(x, 0.5), torch.ones_like(x)]
    results = []
    for backend in ("torch", "triton"):
        leaves = [t.clone().requires_grad_() for t in (x, residual, torch.ones(4, device=DEVICE))]
        results.append(with_gradients(functools.partial(add_rms_norm, backend=backend), leaves, grads))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-3, atol=1e-3)
    y, total, grad_x, *_ = results[1]
    assert total.tolist() == [[FLOAT16_LIMIT, FLOAT16_LIMIT, -FLOAT16_LIMIT, 4.5]]
    assert y.isfinite().all()
    assert (grad_x != 0).tolist() == [[False, False, False, True]]


def test_opcheck():
    from fat5.ops.norm.custom_ops import triton_add_rms_norm, triton_rms_norm, triton_rms_norm_backward

    x, residual, weight = leaf(2, 5, 24), leaf(2, 5, 24), leaf(24)
    torch.library.opcheck(triton_rms_norm, (x, weight, 1e-6))
    torch.library.opcheck(triton_add_rms_norm, (x, residual, weight, 1e-6))
    plain = [t.detach() for t in (x, residual, weight)]
    _, total, rstd = triton_add_rms_norm(*plain, 1e-6)
    for other, flags in ((plain[0], (True, True, True)), (None, (False, True, False)), (None, (False, False, True))):
        arguments = (plain[1], other, total, plain[2], rstd, *flags)
        torch.library.opcheck(triton_rms_norm_backward, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiles_whole_with_dynamic_lengths():
    def step(x, residual, weight):
        y, total = add_norm(x, residual, weight)
        return norm(y, weight) + total

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="inductor" if CUDA else "aot_eager")
    for rows in (7, 12):
        leaves = [leaf(rows, 24), leaf(rows, 24), leaf(24)]
        grads = [torch.randn(rows, 24, device=DEVICE)]
        for got, expected in zip(*(with_gradients(f, leaves, grads) for f in (compiled, step)), strict=True):
            torch.testing.assert_close(got, expected)
            assert got.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: rms_norm(x, w, backend="tritn"), "'tritn'.*did you mean 'triton'"),
        (lambda x, w: norm(x.double(), w), "not torch.float64; use 'auto' or 'torch'"),
        (lambda x, w: norm(x.new_zeros(1, 65_537), w.new_zeros(65_537)), "1 to 65,536 elements, not 65537"),
        (lambda x, w: add_rms_norm(x, x[:1], w), r"x \(2, 4\).*residual \(1, 4\)"),
        (lambda x, w: add_rms_norm(x, x.long(), w), "residual .* torch.int64"),
        (lambda x, w: add_rms_norm(x, x, w[:3]), r"weight of shape \(3,\)"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 4, device=DEVICE), torch.ones(4, device=DEVICE))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("rows", [1, 13, 40])
def test_programs_that_take_tile_after_tile(monkeypatch, stages, rows):
    """Four multiprocessors when interpreted, or a few rows a program: no tile, one, and several, the last one cut."""
    for tensors in (2, 3):
        monkeypatch.setitem(tiles._BACKWARD, (32, 4, tensors), tiles.RowTile(2, 4, stages))
    monkeypatch.setattr("fat5.ops.norm.launch.processors", lambda device: 4)
    hold_the_tolerance_rule(norm, reference, [leaf(rows, 32), leaf(32, mean=1.0)])
    hold_the_tolerance_rule(add_norm, add_reference, [leaf(rows, 32), leaf(rows, 32), leaf(32, mean=1.0)])


def test_parts_that_are_summed_in_several_turns(monkeypatch):
    """More programs than the sum over them takes at once, the last turn cut; columns that fill no tile."""
    monkeypatch.setitem(tiles._BACKWARD, (64, 4, 2), tiles.RowTile(2, 4))
    monkeypatch.setattr("fat5.ops.norm.launch.processors", lambda device: 7)
    monkeypatch.setattr(tiles, "SUM_COLUMNS", 32)
    for at_once in (2, 4, 8):
        monkeypatch.setattr(tiles, "MIN_SUM_PARTS", at_once)
        monkeypatch.setattr(tiles, "MAX_SUM_PARTS", at_once)
        hold_the_tolerance_rule(norm, reference, [leaf(40, 48), leaf(48, mean=1.0)])


def test_registers_of_all_programs_fit():
    for width, (itemsize, tensors) in itertools.product((16, 512, 768, 4096, 8192), ((2, 2), (2, 3), (4, 2), (4, 3))):
        tile = tiles.backward_tile(width, itemsize, tensors)
        assert 32 * tile.warps * tile.programs * tile.options().get("maxnreg", 65_536 // (32 * tile.warps)) <= 65_536
        for other in tiles.backward_candidates(tile, 1 << (width - 1).bit_length()):
            assert other.options().get("maxnreg", 128) >= 64


def test_wide_rows_fall_back_to_torch():
    x, weight = leaf(1, 65_537), leaf(65_537)
    torch.testing.assert_close(rms_norm(x, weight), rms_norm_reference(x, weight))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(32_768, 512), (16_384, 1024), (361, 768), (1, 512), (65_537, 64), (4096, 4096), (40, 12_288), (9, 65_536)],
)
def test_real_sizes(dtype, shape):
    leaves = [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=dtype, mean=1.0)]
    hold_the_tolerance_rule(norm, reference, leaves[::2])
    hold_the_tolerance_rule(add_norm, add_reference, leaves)


@pytest.mark.gpu
@needs_gpu
def test_auto_takes_the_kernels_and_bits_repeat():
    leaves = [leaf(5000, 512, dtype=torch.bfloat16), leaf(5000, 512, dtype=torch.bfloat16), leaf(512)]
    grads = [torch.randn(5000, 512, device=DEVICE)] * 2
    first = with_gradients(add_rms_norm, leaves, grads)
    for results in (
        *(with_gradients(add_rms_norm, leaves, grads) for _ in range(3)),
        captured(add_rms_norm, leaves, grads),
    ):
        assert all(torch.equal(got, expected) for got, expected in zip(results, first, strict=True))
    plain = with_gradients(functools.partial(add_rms_norm, backend="torch"), leaves, grads)
    assert not torch.equal(plain[0], first[0]) or not torch.equal(plain[-1], first[-1])  # other sums, other rounding


@pytest.mark.gpu
@needs_gpu
def test_the_sum_that_overlaps_equals_the_one_that_waits(monkeypatch):
    """A sum that began too early would find the parts of the run before, in the same memory."""
    weight = leaf(512, dtype=torch.bfloat16, mean=1.0)
    for _ in range(30):
        x, grads = leaf(32_768, 512, dtype=torch.bfloat16), [torch.randn(32_768, 512, device=DEVICE)]
        got = with_gradients(norm, [x, weight], grads)
        with monkeypatch.context() as patch:
            patch.setattr("fat5.ops.norm.launch.dependent_launch", lambda device: False)
            expected = with_gradients(norm, [x, weight], grads)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_more_than_2_to_the_31_elements():
    """Pitfall: 32-bit offsets wrap."""
    rows = 2**31 // 512 + 3
    x = torch.ones(rows, 512, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = 2.0
    weight = torch.full((512,), 3.0, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = norm(x, weight, eps=1e-6)  # little beside the mean squares 1 and 4, so that the rows are ones before the weight
    assert torch.equal(y[-1], torch.full_like(y[-1], 3.0))
    (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    torch.testing.assert_close(grad.float(), torch.full((512,), float(rows), device=DEVICE), rtol=1e-2, atol=0)
