"""Comparing a configuration of the Hopper kernels with the portable kernels on a small input.

A fault of the assembler in this area gives wrong numbers without a word (docs/hopper.md), so no configuration serves
before it has passed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from fat5.ops.attention import launch as portable
from fat5.ops.attention.hopper.configuration import EVERYWHERE, Configuration, ForwardShape, forward_shape
from fat5.ops.attention.hopper.support import DTYPES, HEAD_DIMS
from fat5.ops.attention.problem import Problem
from fat5.ops.attention.tiles import SHARED_MEMORY

LARGEST_ERROR = 2e-2  # of the norm; both round weights and dS to 16 bits, which costs up to 5e-3
LARGEST_DEVIATION = 6e-2  # of one element, relative to the largest
_HEADS = 3
_PROGRAMS = 3  # so few that each takes several tiles, and every barrier turns over
_SHORTEST = 640
_LONG = 2**14
_BARRIERS = 1024  # bytes, with room
_T5_RADIUS = {False: 91, True: 113}


class MismatchError(RuntimeError):
    """The Hopper kernels gave another result than the portable ones."""


def compare(configuration: Configuration, device: torch.device) -> None:
    """Run a configuration on a small input, beside the portable kernels. Waits for the device.

    The memory around the input holds NaN: what a kernel reads past a sequence must not matter.

    Raises:
        MismatchError: A result differs by more than rounding explains.
    """
    from fat5.ops.attention.hopper import launch

    problem = small_problem(configuration, device)
    out, lse = portable.run_forward(problem)
    if configuration.kernel == "forward":
        ours, our_lse = launch.run_forward(problem, configuration, _PROGRAMS)
        _hold("output", ours, out)
        if not torch.equal(our_lse.isinf(), lse.isinf()):
            raise MismatchError("its rows without keys differ from the portable kernel's")
        _hold("log-sum-exp", our_lse.nan_to_num(posinf=0.0), lse.nan_to_num(posinf=0.0))
        return
    generator = torch.Generator(device).manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator, device=device, dtype=out.dtype)
    want = portable.run_backward(problem, grad_out, out, lse, configuration.table_grad, problem.room_for_gradients())
    runs = [
        launch.run_backward(problem, configuration, grad_out, out, lse, problem.room_for_gradients(), _PROGRAMS)
        for _ in range(1 if configuration.one_pass else 2)
    ]
    for name, got, expected in zip(("dq", "dk", "dv", "gradient of the table"), runs[0], want, strict=True):
        if got is not None and expected is not None:
            _hold(name, got, expected)
    for first, last in zip(runs[0], runs[-1], strict=True):
        if first is not None and last is not None and not torch.equal(first, last):
            raise MismatchError("two runs of its deterministic backward differ")


def _hold(name: str, got: Tensor, want: Tensor) -> None:
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm())
    deviation = float((got - want).abs().max() / want.abs().max())
    if not (error <= LARGEST_ERROR and deviation <= LARGEST_DEVIATION):  # NaN never passes
        raise MismatchError(
            f"its {name} differs from the portable kernel's by {error:.1e} of the norm (at most {LARGEST_ERROR}) and "
            f"{deviation:.1e} of the largest element (at most {LARGEST_DEVIATION})"
        )


def small_problem(configuration: Configuration, device: torch.device) -> Problem:
    """Return a problem that a configuration serves, with far and near tiles, several tiles a program, and NaN around
    it.

    Packed where the configuration is ragged: with an empty document, one of a single token, and unused rows. Padded on
    both sides where its rows stand apart.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    length = max(_SHORTEST, 128 * triton.cdiv(2 * configuration.radius + 300, 128)) - 39 * configuration.tails
    dim = configuration.head_dim
    packed = configuration.ragged and not configuration.phased

    def tokens() -> Tensor:
        room = torch.full((2, length + 128, _HEADS, dim), torch.nan, device=device, dtype=configuration.dtype)
        room[:, :length] = draw(2, length, _HEADS, dim)
        # Padded rows have to lie evenly apart, so those have no room around them.
        return room[0] if packed else room[:, :length].contiguous() if configuration.phased else room[:, :length]

    def on_device(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    q, k, v = tokens(), tokens(), tokens()
    offsets = on_device(0, 131, 132, 132, length, length) if packed else None
    starts = lengths = None
    if configuration.phased:
        starts, lengths = on_device(37, 64), on_device(length - 137, length - 70)
        for x in (k, v):
            x[0, :37] = x[0, -100:] = x[1, :64] = x[1, -6:] = torch.nan
    bias, kind = None, "none"
    if configuration.radius == EVERYWHERE:
        bias, kind = draw(_HEADS).abs() / 8, "alibi"
    elif configuration.bias:
        bias, kind = draw(_HEADS, 2 * configuration.radius + 1), "distance"
    return Problem(
        q=q,
        k=k,
        v=v,
        bias=bias,
        bias_kind=kind,
        offset=None if packed else 0,
        offsets=None,
        key_starts=starts,
        key_lengths=lengths,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        softmax_scale=dim**-0.5,
        causal=configuration.causal,
        dropout_p=0.0,
        seed=None,
    )


def all_shapes(head_dim: int) -> Iterator[ForwardShape]:
    """Yield every shape of the forward that a multiprocessor holds; `forward_shape` takes some of them."""
    ways = (  # ahead, alternating, and halves
        (True, False, False),
        (False, False, False),
        (True, True, False),
        (False, False, True),
    )
    for consumers, stages, (ahead, alternate, halves) in itertools.product((2, 3), (2, 3, 4), ways):
        if halves and consumers == 3:
            continue
        shape = ForwardShape(consumers, stages, ahead, alternate=alternate, halves=halves)
        # Registers for a third consumer are few: none for accumulators of 128 columns, nor for a tile begun ahead.
        held = consumers == 2 or (head_dim == 64 and not ahead)
        if held and shape.shared_bytes(head_dim) + _BARRIERS <= SHARED_MEMORY[90]:
            yield shape


def all_configurations() -> Iterator[Configuration]:
    """Yield every configuration that T5's bias, ALiBi and no bias lead to, in rows of all lengths."""
    for head_dim, dtype, causal, layout in itertools.product(HEAD_DIMS, DTYPES, (False, True), range(3)):
        biases = {(causal, 1), (True, _T5_RADIUS[causal]), (True, EVERYWHERE)}
        for bias, radius in sorted(biases):
            ragged, tails = layout == 2, layout > 0
            fixed = (head_dim, dtype, causal, bias, radius, ragged, tails)
            forward = Configuration("forward", *fixed)
            for shape in dict.fromkeys(forward_shape(forward, num_keys) for num_keys in (_SHORTEST, _LONG)):
                yield dataclasses.replace(forward, shape=shape)
            for one_pass in (True, False):
                yield Configuration("backward", *fixed, one_pass=one_pass)
                if radius > 1:
                    yield Configuration("backward", *fixed, one_pass=one_pass, table_grad=True)
                if radius > 1 and ragged:
                    yield Configuration("backward", *fixed, one_pass=one_pass, table_grad=True, phased=True)
