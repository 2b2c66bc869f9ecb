"""The attention kernels against the formula in float64: through Triton's interpreter on a CPU, compiled on a GPU.

On a CPU the sizes are small and the type float32; a GPU adds bf16 and fp16 at real sizes.
"""

import dataclasses
import gc
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fat5.ops import DenseBias, RelativeBias, flash_attention
from fat5.ops.attention import backends, tile_launch
from fat5.ops.attention.backends import BACKENDS
from fat5.ops.attention.reference import attention_reference, packed_attention_reference
from fat5.ops.attention.tiles import Call, Tile, preferred_tile
from tests.ops.attention_comparison import (
    BIASES,
    CUDA,
    DEVICE,
    HEADS,
    KERNEL_BACKENDS,
    compare,
    gpu,
    make_bias,
    make_inputs,
    needs_gpu,
    reproducible,
    run,
)

pytestmark = pytest.mark.parametrize("backend", KERNEL_BACKENDS)


@pytest.fixture(autouse=True)
def available(backend):
    reason = BACKENDS[backend]()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dim"),
    [(64, 64, 16), (43, 43, 16), (33, 70, 24)] + ([(361, 704, 64), (704, 361, 80), (1024, 1024, 64)] if CUDA else []),
)
def test_outputs_and_gradients_equal_the_formula(backend, kind, causal, num_queries, num_keys, dim):
    """Pitfalls: tails at odd lengths; a mask anchored top-left; head dimensions that use part of the data."""
    compare(backend, kind, make_inputs(kind, 1, num_queries, num_keys, dim), causal, softmax_scale=0.4)


def test_more_queries_than_keys(backend):
    compare(backend, "relative", make_inputs("relative", 1, 70, 33, 16), causal=True, softmax_scale=0.4)


@pytest.mark.parametrize("kind", ["none", "relative", "dense"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_and_offsets_of_each_row(backend, kind, causal):
    """Left and right padding, a row without keys, and a position of its own for each row's first query."""
    options = {
        "query_offset": torch.tensor([3, -5, 0], device=DEVICE),
        "key_starts": torch.tensor([0, 7, 2], device=DEVICE),
        "key_lengths": torch.tensor([40, 20, 0], device=DEVICE),
    }
    ours = compare(backend, kind, make_inputs(kind, 3, 37, 40, 16), causal, softmax_scale=0.4, **options)
    assert not ours[0][2].any()


def test_an_offset_that_is_no_multiple_of_a_tile(backend):
    """The band of the table gradient and the far sums meet without gap or overlap."""
    for offset in (17, -9):
        compare(backend, "relative", make_inputs("relative", 1, 50, 70, 16), softmax_scale=0.4, query_offset=offset)


def test_nan_in_unused_slots_does_not_matter(backend):
    leaves = make_inputs("relative", 2, 20, 30, 16)
    lengths = torch.tensor([13, 0], device=DEVICE)
    weights = torch.randn_like(leaves[0])
    clean = run(flash_attention, "relative", leaves, weights, backend=backend, key_lengths=lengths)
    with torch.no_grad():
        for x in leaves[1:3]:
            x[0, 13:] = x[1] = torch.nan
    for a, b in zip(
        run(flash_attention, "relative", leaves, weights, backend=backend, key_lengths=lengths), clean, strict=True
    ):
        assert torch.equal(a, b)
    assert clean[0][0].any()
    assert not clean[0][1].any()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_inputs(backend, lengths):
    leaves = make_inputs("relative", 2, *lengths, 16)
    out, *grads = run(flash_attention, "relative", leaves, torch.ones_like(leaves[0]), backend=backend)
    assert out.shape == leaves[0].shape
    assert not out.any()
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("kind", ["none", "relative", "alibi"])
@pytest.mark.parametrize(("case", "causal"), [("self", False), ("self", True), ("cross", False)])
def test_packed_documents_equal_each_document_alone(backend, kind, case, causal):
    """Pitfall: packed documents see each other. Unused rows give 0 and take no gradient."""
    cu_q = torch.tensor([0, 7, 8, 8, 60, 70, 70, 70], device=DEVICE, dtype=torch.int32)
    cross = torch.tensor([0, 5, 30, 33, 33, 70, 70, 70], device=DEVICE, dtype=torch.int32)
    cu_k = cu_q if case == "self" else cross
    leaves = [x.detach()[0].requires_grad_() if x.ndim == 4 else x for x in make_inputs(kind, 1, 75, 75, 16)]
    ours = compare(
        backend, kind, leaves, causal, reference=packed_attention_reference, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        max_seqlen_q=60, max_seqlen_k=60, softmax_scale=0.4,
    )  # fmt: skip
    assert all(not x[70:].any() for x in ours[:4])


def test_no_documents_at_all(backend):
    leaves = [x.detach()[0].requires_grad_() for x in make_inputs("none", 1, 20, 20, 16)]
    cu = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    out, *grads = run(
        flash_attention, "none", leaves, torch.ones_like(leaves[0]), backend=backend,
        cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=8, max_seqlen_k=8,
    )  # fmt: skip
    assert not any(x.any() for x in (out, *grads))


@pytest.mark.parametrize("shape", [(2, 2, 20, 24), (1, 2, 20, 24), (2, 1, 20, 24), (1, 1, 1, 24), (2, 1, 1, 24)])
def test_dense_bias_of_any_broadcast_shape(backend, shape):
    """Pitfall: the gradient of a broadcast bias summed over the wrong axes; also with q, k and v frozen."""
    leaves = make_inputs("dense", 2, 20, 24, 16, dense_shape=shape)
    ours = compare(backend, "dense", leaves, softmax_scale=0.4)
    weights = torch.ones_like(leaves[0])
    frozen = [x.detach() for x in leaves[:3]]
    out = flash_attention(*frozen, bias=DenseBias(leaves[3]), softmax_scale=0.4, backend=backend)
    (grad,) = torch.autograd.grad(out, leaves[3], weights)
    assert grad.shape == shape
    assert grad.any()
    assert len(ours) == 5


@pytest.mark.parametrize("place", ["before", "start", "turned"])
@pytest.mark.parametrize("shape", [(2, 2, 64, 64), (1, 2, 64, 64), (2, 1, 33, 70)])
def test_every_place_of_a_dense_bias(backend, monkeypatch, place, shape):
    """Whole tiles and tails; a hidden key, and a scale too small for a product to start from the bias over it."""
    if backend != "triton":
        pytest.skip("the tiles of the triton backend")

    def preferred(call: Call) -> Tile:
        known = place == "before" or call.kernel == "key_value"
        return dataclasses.replace(preferred_tile(call), bias=place if known else "after", settled=True)

    monkeypatch.setattr(tile_launch, "preferred_tile", preferred)
    monkeypatch.setattr(tile_launch, "_fitting", {})
    monkeypatch.setattr(tile_launch, "_last", {})
    leaves = make_inputs("dense", 2, *shape[2:], 16, dense_shape=shape)
    with torch.no_grad():
        leaves[3][..., 1] = -torch.inf
    compare(backend, "dense", leaves, causal=shape[0] == 1, softmax_scale=0.4)
    if shape[0] == 1:
        compare(backend, "dense", leaves, softmax_scale=1e-12)


def test_dense_mask_of_infinities(backend):
    q, k, v = make_inputs("none", 1, 17, 20, 16)
    mask = torch.zeros(1, 1, 17, 20, device=DEVICE)
    mask[..., 3, :] = mask[..., 0, 2] = -torch.inf
    out = flash_attention(q, k, v, bias=DenseBias(mask), backend=backend)
    assert not out[:, 3].any()
    for grad in torch.autograd.grad(out.sum(), [q, k, v]):
        assert grad.isfinite().all()
        assert grad.any()


@pytest.mark.parametrize("dim", [16, 72, 128] + ([32, 64, 96, 160, 256] if CUDA else []))
def test_head_dimensions(backend, dim):
    compare(backend, "relative", make_inputs("relative", 1, 33, 33, dim, heads=1), softmax_scale=dim**-0.5)


@pytest.mark.parametrize("dim", [8, 257])
def test_head_dimensions_that_no_kernel_takes_are_named(backend, dim):
    leaves = make_inputs("none", 1, 4, 4, dim)
    with pytest.raises(ValueError, match=f"not {dim}"):
        flash_attention(*leaves, backend=backend)


def test_strided_and_expanded_inputs(backend):
    joint = torch.randn(2, HEADS, 30, 48, device=DEVICE)
    q, k, v = joint.transpose(1, 2).chunk(3, dim=-1)
    v = v[:, :1].expand_as(v)
    got = flash_attention(q, k, v, backend=backend)
    torch.testing.assert_close(got, attention_reference(q, k, v), rtol=1e-4, atol=1e-5)


def test_negative_and_zero_scales(backend):
    leaves = make_inputs("relative", 1, 20, 20, 16)
    for scale in (-0.5, 0.0):
        out = flash_attention(
            *leaves[:3], bias=make_bias("relative", leaves[3], False), softmax_scale=scale, backend=backend
        )
        want = attention_reference(*leaves[:3], bias=make_bias("relative", leaves[3], False), softmax_scale=scale)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_low_precision_holds_the_tolerance_rule(backend):
    """The interpreter truncates bf16 where a GPU rounds, so a CPU tries fp16 alone."""
    for dtype in (torch.float16, torch.bfloat16) if CUDA else (torch.float16,):
        for causal in (False, True):
            ours = compare(
                backend, "relative", make_inputs("relative", 1, 61, 61, 16, dtype), causal, softmax_scale=0.25
            )
            assert ours[0].dtype == ours[1].dtype == dtype
            assert ours[4].dtype == torch.float32


def test_dropout_equals_that_of_the_torch_backend(backend):
    leaves = make_inputs("relative", 2, 40, 40, 16)
    results = []
    for name in ("torch", backend):
        torch.manual_seed(3)
        results.append(run(flash_attention, "relative", leaves, leaves[0].detach(), dropout_p=0.3, backend=name))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
    plain = flash_attention(*leaves[:3], bias=make_bias("relative", leaves[3], False), backend=backend)
    assert not torch.allclose(results[1][0], plain, atol=1e-2)


def test_opcheck(backend):
    attention, attention_backward = (getattr(backends, f"{backend}_attention{end}") for end in ("", "_backward"))
    dim, dtype = (64, torch.bfloat16) if backend == "hopper" else (16, torch.float32)
    leaves = make_inputs("none", 2, 20, 24, dim, dtype)
    table = torch.randn(HEADS, 9, device=DEVICE, requires_grad=True)
    bounds = (torch.tensor([0, 1], device=DEVICE), torch.tensor([24, 3], device=DEVICE))
    rest = (table, "distance", 4, None, *bounds, None, None, 0.5, True, 0.0, None, None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(attention, (*leaves, *rest), test_utils=checks)
    with torch.no_grad():
        plain = [x.detach() if isinstance(x, Tensor) else x for x in (*leaves, *rest)]
        out, lse = attention(*plain)
        for bias_grad in (True, False):
            inputs = (torch.randn_like(out), out, lse, bias_grad, *plain)
            torch.library.opcheck(attention_backward, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole_with_dynamic_lengths(backend, packed):
    def attend(q, k, v, table, offsets):
        bias = RelativeBias(table, bidirectional=True, max_distance=20)
        if packed:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            return flash_attention(
                q, k, v, bias=bias, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=64, max_seqlen_k=64,
                backend=backend,
            )  # fmt: skip
        return flash_attention(q, k, v, bias=bias, key_lengths=offsets, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="inductor" if CUDA else "aot_eager")
    for length in (17, 25):
        leaves = make_inputs("relative", 2, length, length, 16)
        offsets = torch.tensor([0, 5, 2 * length - 1] if packed else [length, 3], device=DEVICE)
        for a, b in zip(
            torch.autograd.grad(compiled(*leaves, offsets).square().sum(), leaves),
            torch.autograd.grad(attend(*leaves, offsets).square().sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            assert a.any()


def test_a_backend_that_does_not_work_here_says_why(backend, monkeypatch):
    from fat5.ops.attention import backends

    monkeypatch.setitem(backends._reasons, backend, "there is no CUDA GPU")
    with pytest.raises(ValueError, match="there is no CUDA GPU; use 'auto'"):
        flash_attention(*make_inputs("none", 1, 4, 4, 16), backend=backend)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [1, 361, 704, 1024, 2048])
def test_real_sizes(backend, dtype, causal, dim, length):
    leaves = make_inputs("none", 2, length, length, dim, dtype)
    leaves.append(torch.randn(32, HEADS, device=DEVICE, requires_grad=True))
    compare(backend, "relative", leaves, causal, softmax_scale=dim**-0.5)


@gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["relative", "alibi", "dense"])
def test_backward_gives_equal_bits_from_run_to_run(backend, kind):
    leaves = make_inputs(kind, 4, 500, 500, 64, torch.bfloat16)
    weights = torch.randn_like(leaves[0])
    with reproducible(backend):
        first, *others = (
            run(flash_attention, kind, leaves, weights, backend=backend, softmax_scale=0.125) for _ in range(4)
        )
    for other in others:
        for a, b in zip(other, first, strict=True):
            assert torch.equal(a, b)


@gpu
@needs_gpu
def test_assembly_and_plain_loads_agree(backend, monkeypatch):
    """The table is read by inline assembly on a GPU, which the interpreter cannot run."""
    if backend == "hopper":
        pytest.skip("it has no plain loads")
    from fat5.ops.attention import launch
    from fat5.ops.prepared_launch import PreparedLaunches

    leaves = make_inputs("relative", 1, 300, 300, 64, torch.bfloat16)
    weights = torch.randn_like(leaves[0])
    fast = run(flash_attention, "relative", leaves, weights, backend=backend, softmax_scale=0.125)
    original = launch.any_bias_arguments
    monkeypatch.setattr(launch, "any_bias_arguments", lambda problem: original(problem) | {"ASM": False})
    monkeypatch.setattr(launch, "_forward_launches", PreparedLaunches())  # which else remember the first call
    for a, b in zip(
        fast, run(flash_attention, "relative", leaves, weights, backend=backend, softmax_scale=0.125), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert original(launch.Problem(*leaves[:3], None, "none", 0, *[None] * 5, 1.0, False, 0.0, None))["ASM"]


@gpu
@needs_gpu
def test_cuda_graphs(backend):
    stream = torch.cuda.Stream()
    with (
        torch.cuda.stream(stream),
        reproducible(backend),
    ):  # leaves made on the default stream would draw it into the capture
        leaves = make_inputs("relative", 2, 300, 300, 64, torch.bfloat16)
        weights = torch.randn_like(leaves[0])
        expected = run(flash_attention, "relative", leaves, weights, backend=backend, softmax_scale=0.125)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(flash_attention, "relative", leaves, weights, backend=backend, softmax_scale=0.125)
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, expected, strict=True):
        assert torch.equal(a, b)


@gpu
@needs_gpu
def test_memory_is_linear_in_the_length(backend):
    peaks = []
    for length in (8192, 16384):
        leaves = make_inputs("relative", 1, length, length, 64, torch.bfloat16)
        gc.collect()  # what other tests left must not be freed in the middle
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(flash_attention, "relative", leaves, leaves[0].detach(), backend=backend)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0], peaks


@pytest.mark.skipif(CUDA, reason="a GPU compiles the kernels in the other tests")
def test_compile_gate(backend):
    """Every row of the tile table compiles for its card, offline, without spills and in the memory the card has."""
    command = [sys.executable, "-m", "tests.ops.compile_gate", "--jobs", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " 0 failed" in done.stdout
