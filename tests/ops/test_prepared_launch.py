"""A kernel that is launched again: always with the binary that Triton itself would take, and with all its arguments."""

from __future__ import annotations

import functools
import itertools
import types

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from fat5.ops import DistanceBias, flash_attention, prepared_launch
from fat5.ops.attention.backends import BACKENDS
from fat5.ops.prepared_launch import (
    Descriptor,
    PreparedLaunch,
    PreparedLaunches,
    Relaunched,
    ceil_divide,
    ceil_power_of_2,
)
from tests.ops.kernel_checks import CUDA, needs_gpu


def scale_kernel(X, Y, Other, scale, size, row, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row + lanes, mask=lanes < size, other=0.0) * scale
    if TWICE:
        x *= 2
    if Other is not None:
        x += tl.load(Other + lanes, mask=lanes < size, other=0.0)
    tl.store(Y + row + lanes, x, mask=lanes < size)


@pytest.fixture
def device(monkeypatch):
    """A device whose compiler gives what it was asked for, and that lists what is launched: binary, grid, arguments."""
    listed = types.SimpleNamespace(launches=[], number=0)

    class Binary(CompiledKernel):
        def __init__(self, source, target, options):
            asked = (source.signature, source.constants, source.attrs, sorted(options.items(), key=str))
            self.name, self.src = repr(asked), source
            self.module = self.function = self.packed_metadata = 0
            self._run = self.list_launch

        def list_launch(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
            listed.launches.append((self.name, (x, y, z), arguments))

    driver = types.SimpleNamespace(
        get_current_device=lambda: listed.number,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.compiler, "compile", Binary)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return listed


def tensors(offset=0, dtype=torch.float32, other=None):
    x, y = (torch.zeros(256, dtype=dtype)[offset:][:128] for _ in range(2))
    return x, y, None if other is None else torch.zeros(128, dtype=other)


WAYS = [
    tensors(),
    tensors(dtype=torch.bfloat16),
    tensors(other=torch.float32),
    tensors(other=torch.bfloat16),
    tensors(offset=1),
    tensors(offset=4),
    tensors(dtype=torch.bfloat16, offset=4),
    (*tensors()[:1], *tensors(offset=2)[1:]),
]
FIXED = [
    {"scale": 0.5, "size": 128, "row": 0, "BLOCK": 64, "TWICE": False, "num_warps": 2},
    {"scale": 0.5, "size": 127, "row": 16, "BLOCK": 64, "TWICE": False, "num_warps": 2},
    {"scale": 2.0, "size": 128, "row": 1, "BLOCK": 64, "TWICE": True, "num_warps": 4},
    {"scale": 2.0, "size": 128, "row": 2**31, "BLOCK": 64, "TWICE": True, "launch_pdl": True},
]


@pytest.mark.skipif(not prepared_launch._REUSES, reason="this Triton's binaries are not launched again")
@pytest.mark.parametrize("again", ["prepared", "relaunched"])
def test_takes_the_binary_and_the_arguments_that_triton_takes(device, again):
    """Each way to call twice over, in turn, so that a launch which serves the wrong way would be seen."""
    kernel = JITFunction(scale_kernel)
    relaunched = Relaunched(kernel)
    launches = [PreparedLaunch(kernel, (2,), **fixed) for fixed in FIXED]
    binaries = set()
    for _ in range(3):
        for launch, fixed in zip(launches, FIXED, strict=True):
            for given in WAYS:
                x, y, other = given
                kernel[(2,)](x, y, other, **fixed)
                if again == "prepared":
                    launch(*given)
                else:
                    relaunched[(2,)](x, y, Other=other, **fixed)
                wanted, got = device.launches[-2:]
                assert got[:2] == wanted[:2]
                assert all(a is b or a == b for a, b in zip(got[2], wanted[2], strict=True))
                binaries.add(got[0])
    assert len(binaries) >= 12


@pytest.mark.skipif(not prepared_launch._REUSES, reason="this Triton's binaries are not launched again")
def test_integers_that_a_call_gives_choose_the_binary_too(device):
    """Triton compiles for 1, for multiples of 16, and for what fits 32 bits."""
    kernel = JITFunction(scale_kernel)
    fixed = {"scale": 0.5, "BLOCK": 64, "TWICE": False, "num_warps": 2}
    launch = PreparedLaunch(kernel, (2,), **fixed)
    sizes = [128, 127, 1, 0, 16, 17, 2**31, 2**31 + 1, 2**31 - 1, -(2**31), 112]
    binaries = set()
    for _ in range(2):
        for size, row in itertools.product(sizes, sizes):
            given = tensors()
            kernel[(2,)](*given, **fixed, size=size, row=row)
            launch(*given, size, row)
            wanted, got = device.launches[-2:]
            assert got[:2] == wanted[:2]
            assert all(a is b or a == b for a, b in zip(got[2], wanted[2], strict=True))
            binaries.add(got[0])
    assert len(binaries) >= 25


@pytest.mark.skipif(not prepared_launch._REUSES, reason="this Triton's binaries are not launched again")
def test_triton_is_asked_once_for_each_kind_and_device_and_always_for_what_is_not_aligned(device, monkeypatch):
    kernel = JITFunction(scale_kernel)
    launch = PreparedLaunch(kernel, (2,), **FIXED[0])
    asked = []
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *a, **k: asked.append(1) or run(*a, **k))
    for number in (0, 1, 0, 1):
        device.number = number
        for given in (tensors(), tensors(dtype=torch.bfloat16), tensors(other=torch.float32)):
            launch(*given)
    assert len(asked) == 6
    launch(*tensors(offset=1))
    launch(*tensors(offset=1))
    assert len(asked) == 8


@pytest.mark.skipif(not prepared_launch._REUSES, reason="this Triton's binaries are not launched again")
def test_a_descriptor_counts_by_its_kind(monkeypatch, device):
    class Tile(Descriptor):
        def __init__(self, kind):
            self.kind = kind

    asked, reused = [], []

    def compiled(grid, **arguments):
        asked.append(arguments["X"].kind)
        return {(1, 1, 1): lambda *arguments: reused.append(arguments[0].kind)}

    kernel = JITFunction(scale_kernel)
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: functools.partial(compiled, grid))
    launch = PreparedLaunch(kernel, (1,), **FIXED[0])
    for kind in ("small", "small", "large", "small", "large"):
        launch(Tile(kind), None, None)
    assert asked == ["small", "large"]
    assert reused == ["small", "small", "large"]


def test_too_few_tensors_are_an_error():
    launch = PreparedLaunch(triton.jit(scale_kernel), (1,), **FIXED[0])
    with pytest.raises(ValueError, match="zip"):
        launch(*tensors()[:2])


def test_launches_are_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(prepared_launch, "LAUNCHES_KEPT", 2)
    made = []
    kept = PreparedLaunches()

    def make(key):
        return kept.get(key, lambda: made.append(key) or PreparedLaunch(triton.jit(scale_kernel), (1,)))

    first = make("a")
    assert make("a") is first
    make("b")
    make("c")
    make("a")
    assert made == ["a", "b", "c", "a"]
    assert len(kept._kept) == 2


@pytest.mark.skipif(CUDA, reason="the interpreter is for the CPU")
@pytest.mark.parametrize("again", ["prepared", "relaunched"])
def test_an_interpreted_kernel_runs_as_ever(again):
    kernel = triton.jit(scale_kernel)
    for offset, value in ((0, 1.0), (1, 2.0), (0, 3.0)):
        x, y, _ = tensors(offset)
        x.fill_(value)
        if again == "prepared":
            PreparedLaunch(kernel, (2,), **FIXED[0])(x, y, None)
        else:
            Relaunched(kernel)[(2,)](x, y, None, **FIXED[0])
        assert torch.equal(y, torch.full_like(y, value / 2))


@needs_gpu
def test_the_device_gets_every_argument_anew():
    kernel = triton.jit(scale_kernel)
    relaunched = Relaunched(kernel)
    for fixed in FIXED[:2]:
        launch = PreparedLaunch(kernel, (2,), **fixed)
        for turn in range(4):
            for offset in (0, 4, 1):
                x, y, other, again = (torch.randn(256, device="cuda") for _ in range(4))
                for out, run in ((y, launch), (again, lambda *a, fixed=fixed: relaunched[(2,)](*a, **fixed))):
                    out.zero_()
                    run(x[offset:], out[offset:], other if turn % 2 else None)
                row, size = fixed["row"] + offset, fixed["size"]
                want = torch.zeros(256, device="cuda")
                want[row : row + size] = x[row : row + size] / 2 + (other[:size] if turn % 2 else 0)
                want = want[:256]
                torch.testing.assert_close(y, want)
                torch.testing.assert_close(again, want)


@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_attention_launched_again_reads_the_new_tensors(backend, packed):
    """Other values at other addresses each time, with the plain formula beside it; documents move between the calls."""
    if BACKENDS[backend]() is not None:
        pytest.skip(BACKENDS[backend]())
    held = []
    for turn in range(4):
        shape = (600, 2, 64) if packed else (2, 300, 2, 64)
        leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        leaves.append(torch.randn(2, 183, device="cuda", requires_grad=True))
        documents = {}
        if packed:
            offsets = torch.tensor([0, 150 + 70 * turn, 600], dtype=torch.int32, device="cuda")
            documents = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 600, "max_seqlen_k": 600}
        weights = torch.randn(shape, device="cuda")
        results = []
        for name in (backend, "torch"):
            bias = DistanceBias(leaves[3])
            out = flash_attention(*leaves[:3], bias=bias, softmax_scale=0.125, backend=name, **documents)
            grads = torch.autograd.grad((out.float() * weights).sum(), leaves)
            results.append([x.double() for x in (out.detach(), *grads)])
        for got, want in zip(*results, strict=True):
            assert (got - want).norm() < 3e-2 * want.norm()
        held.append((leaves, documents, weights))


def test_host_arithmetic_is_triton_s():
    for a in range(1, 70):
        assert ceil_power_of_2(a) == triton.next_power_of_2(a)
        assert all(ceil_divide(a, b) == triton.cdiv(a, b) for b in range(1, 20))
