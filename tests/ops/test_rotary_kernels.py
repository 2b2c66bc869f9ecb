"""The rotary kernel against complex numbers in float64: through Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fat5.ops import apply_rotary, apply_rotary_qk, rotary_phases, xpos_scale
from fat5.ops.rotary.reference import rotary_reference
from tests.ops.kernel_checks import (
    CUDA,
    DEVICE,
    LOW_PRECISION,
    captured,
    hold_the_tolerance_rule,
    leaf,
    needs_gpu,
    needs_kernels,
    relative_error,
    with_gradients,
)

pytestmark = needs_kernels

POSITIONS = {
    "padded": ((2, 43, 3, 24), torch.arange(43)),
    "a row": ((2, 5, 3, 24), torch.tensor([[0, 3, 4, 9, 70], [1, 2, 40, 41, 1000]])),
    "packed": ((11, 3, 24), torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1])),
    "one position": ((2, 4, 3, 24), torch.tensor([7])),
    "more dimensions": ((2, 2, 3, 1, 24), torch.tensor([[[0, 1, 2]], [[5, 6, 7]]])),
}


def tables(positions: Tensor, dim: int, scale_base: float | None = None) -> tuple[Tensor, ...]:
    """Cosine and sine of queries and of keys, which xPos's scale tells apart."""
    positions = positions.to(DEVICE)
    cos, sin = rotary_phases(positions, dim, theta=500.0)
    if scale_base is None:
        return cos, sin, cos, sin
    scale = xpos_scale(positions, dim, scale_base=scale_base)
    return cos * scale, sin * scale, cos / scale, sin / scale


def rotate(q: Tensor, k: Tensor, phases: tuple[Tensor, ...], *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    return apply_rotary_qk(q, k, *phases, interleaved=interleaved, backend="triton")


def plain(q: Tensor, k: Tensor, phases: tuple[Tensor, ...], *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    return apply_rotary_qk(q, k, *phases, interleaved=interleaved, backend="torch")


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "scale_base"), [(24, None), (10, 64.0)])
def test_equals_complex_numbers_with_gradients(where, interleaved, dim, scale_base):
    shape, positions = POSITIONS[where]
    q, k = leaf(*shape), leaf(*shape)
    q_out, k_out, *grads = with_gradients(
        functools.partial(rotate, phases=tables(positions, dim, scale_base), interleaved=interleaved), [q, k], [k, q]
    )
    options = {"theta": 500.0, "interleaved": interleaved, "scale_base": scale_base}
    wide = [x.detach().double().cpu().requires_grad_() for x in (q, k)]
    expected = [rotary_reference(x, positions, dim, is_key=x is wide[1], **options) for x in wide]
    truth = torch.autograd.grad(expected, wide, [k.detach().double().cpu(), q.detach().double().cpu()])
    for got, want in zip((q_out, k_out, *grads), (*expected, *truth), strict=True):
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-4, atol=1e-4 if scale_base is None else 1e-2)
    assert torch.equal(q_out[..., dim:], q[..., dim:])
    if scale_base is None and where != "one position":
        assert relative_error(q_out, q) > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("width", [2, 16, 72])
def test_heads_of_any_number_and_width(interleaved, heads, width):
    phases = tables(torch.arange(9), width)
    options = {"phases": phases, "interleaved": interleaved}
    leaves = [leaf(2, 9, heads, width), leaf(2, 9, heads, width)]
    hold_the_tolerance_rule(functools.partial(rotate, **options), functools.partial(plain, **options), leaves)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("interleaved", [False, True])
def test_low_precision_is_rounded_once(dtype, interleaved):
    """Pitfall: a float32 table with half-precision input changes the output type."""
    options = {"phases": tables(torch.arange(40), 16), "interleaved": interleaved}
    leaves = [leaf(2, 40, 2, 16, dtype=dtype), leaf(2, 40, 2, 16, dtype=dtype)]
    results = hold_the_tolerance_rule(functools.partial(rotate, **options), functools.partial(plain, **options), leaves)
    assert {x.dtype for x in results} == {dtype}


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_both_frozen(frozen):
    leaves = [leaf(2, 7, 2, 8), leaf(2, 7, 2, 8)]
    leaves[frozen].requires_grad_(False)
    phases = tables(torch.arange(7), 8, 40.0)
    hold_the_tolerance_rule(functools.partial(rotate, phases=phases), functools.partial(plain, phases=phases), leaves)


def test_only_keys_or_queries_reach_the_loss():
    leaves = [leaf(2, 7, 2, 8), leaf(2, 7, 2, 8)]
    phases = tables(torch.arange(7), 8, 40.0)
    for place in (0, 1):
        got, expected = (f(*leaves, phases)[place].square().sum() for f in (rotate, plain))
        torch.testing.assert_close(
            torch.autograd.grad(got, leaves[place]), torch.autograd.grad(expected, leaves[place]), rtol=1e-4, atol=1e-5
        )


def test_one_tensor_alone_equals_one_of_both():
    q, k = leaf(2, 7, 2, 8), leaf(2, 7, 2, 8)
    cos, sin, *_ = tables(torch.arange(7), 8)
    alone = apply_rotary(q, cos, sin, backend="triton")
    both = apply_rotary_qk(q, k, cos, sin, backend="triton")[0]
    assert torch.equal(alone, both)
    grads = [torch.autograd.grad(x, q, k) for x in (alone, both)]
    assert torch.equal(grads[0][0], grads[1][0])
    assert relative_error(grads[0][0], k) > 0.1


def test_strided_and_expanded_inputs_and_users_tensors_stay():
    joint = leaf(2, 30, 3, 32).detach()
    before = joint.clone()
    q, k = joint.chunk(2, dim=-1)
    phases = tables(torch.arange(30), 16)
    for a, b in ((q, k), (q.transpose(0, 1)[:, :1].transpose(0, 1), k[:1]), (q, k[..., :1, :].expand_as(q))):
        torch.testing.assert_close(rotate(a, b, phases), plain(a, b, phases))
    backwards = q.flip(-1).transpose(-1, -2).contiguous().transpose(-1, -2)  # channels lie apart
    torch.testing.assert_close(rotate(backwards, k, phases), plain(backwards, k, phases))
    assert torch.equal(joint, before)


@pytest.mark.parametrize("shape", [(2, 0, 3, 8), (0, 4, 3, 8), (0, 3, 8)])
def test_empty_inputs(shape):
    leaves = [leaf(*shape), leaf(*shape)]
    phases = tables(torch.arange(shape[-3]), 8)
    results = with_gradients(functools.partial(rotate, phases=phases), leaves, leaves)
    assert [x.shape for x in results] == [shape] * 4


def test_tables_that_take_a_gradient_go_to_torch():
    q, k = leaf(2, 7, 2, 8), leaf(2, 7, 2, 8)
    cos, sin, *_ = (x.requires_grad_() for x in tables(torch.arange(7), 8))
    assert torch.autograd.grad(apply_rotary_qk(q, k, cos, sin)[0].sum(), cos)[0].any()
    with pytest.raises(ValueError, match=r"take a gradient, .*use 'auto' or 'torch'"):
        rotate(q, k, (cos, sin, cos, sin))


def test_opcheck():
    from fat5.ops.rotary.custom_ops import triton_rotary

    q, k = leaf(2, 5, 3, 16), leaf(2, 5, 3, 16)
    phases = [x[None] for x in tables(torch.arange(5), 16, 40.0)]
    torch.library.opcheck(triton_rotary, (q, k, *phases, True, False))
    torch.library.opcheck(triton_rotary, (q, None, *phases, False, True))


def test_compiles_whole_with_dynamic_lengths():
    def step(q, k, positions):
        return rotate(q, k, tables(positions, 8, 64.0), interleaved=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="inductor" if CUDA else "aot_eager")
    for length in (7, 12):
        leaves = [leaf(2, length, 3, 16), leaf(2, length, 3, 16)]
        positions = torch.arange(length, device=DEVICE)
        grads = [x.detach() for x in leaves]
        got, expected = (
            with_gradients(functools.partial(f, positions=positions), leaves, grads) for f in (compiled, step)
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, t: apply_rotary_qk(q, q[..., :1, :], *t), r"k \[2, 5, 1, 8\]"),
        (lambda q, t: apply_rotary_qk(q, q.half(), *t), "torch.float16"),
        (lambda q, t: apply_rotary_qk(q, q, *t[:2], t[0][:1], t[1][:1]), r"key_cos \[1, 4\]"),
        (lambda q, t: apply_rotary_qk(q, q, t[0][:4], t[1][:4]), r"broadcast to \[2, 5\]"),
        (lambda q, t: apply_rotary_qk(q.double(), q.double(), *t, backend="triton"), "not torch.float64"),
        (lambda q, t: apply_rotary(q, *t[:2], backend="cuda"), "backend='cuda'"),
    ],
)
def test_inputs_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 5, 3, 8, device=DEVICE), tables(torch.arange(5), 8))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 1024, 8, 64), (4, 361, 12, 128), (16_384, 8, 64), (3, 704, 6, 96)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_real_sizes(dtype, shape, interleaved, fraction):
    positions = torch.arange(shape[-3]) % 4096
    options = {"phases": tables(positions, int(fraction * shape[-1])), "interleaved": interleaved}
    leaves = [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype)]
    hold_the_tolerance_rule(functools.partial(rotate, **options), functools.partial(plain, **options), leaves)


@pytest.mark.gpu
@needs_gpu
def test_cuda_graphs():
    leaves = [leaf(4, 300, 8, 64, dtype=torch.bfloat16), leaf(4, 300, 8, 64, dtype=torch.bfloat16)]
    function = functools.partial(rotate, phases=tables(torch.arange(300), 64))
    grads = [x.detach() for x in leaves]
    for got, expected in zip(captured(function, leaves, grads), with_gradients(function, leaves, grads), strict=True):
        assert torch.equal(got, expected)
