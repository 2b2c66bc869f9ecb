"""Attention of a few queries to many keys, as in decoding: the kernel that splits the keys, against the formula."""

import pytest
import torch

from fat5.ops import DistanceBias, flash_attention
from fat5.ops.attention import decode_launch
from fat5.ops.attention.backends import triton_attention
from fat5.ops.attention.reference import attention_reference
from fat5.ops.prepared_launch import PreparedLaunches
from tests.ops.attention_comparison import (
    BIASES,
    CUDA,
    DEVICE,
    HEADS,
    compare,
    gpu,
    make_bias,
    make_inputs,
    needs_gpu,
)

KEYS = 1024 if CUDA else 100


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    """Split short rows too."""
    monkeypatch.setattr(decode_launch, "_MIN_KEYS", KEYS // 3)


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize(("causal", "num_queries", "dim"), [(True, 1, 16), (False, 1, 24), (True, 5, 16)])
def test_equals_the_formula(kind, causal, num_queries, dim):
    q, k, v, *leaf = (x.detach() for x in make_inputs(kind, 2, num_queries, KEYS, dim))
    settings = {"causal": causal, "softmax_scale": 0.7}
    bias, exact = (make_bias(kind, x, causal) for x in ((leaf[0], leaf[0].double()) if leaf else (None, None)))
    got = flash_attention(q, k, v, bias=bias, backend="triton", **settings)
    want = attention_reference(q.double(), k.double(), v.double(), bias=exact, **settings)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_gradients_equal_the_formulas():
    """The kernels of the backward read what this one wrote."""
    compare("triton", "relative", make_inputs("relative", 1, 3, KEYS, 16), True, softmax_scale=0.7)


@pytest.mark.parametrize("kind", ["none", "relative", "dense"])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_cache_with_free_slots(kind, num_queries):
    """Offsets and bounds of each row are on the device; what lies in unused slots does not matter, be it NaN."""
    rows = 4
    q, k, v, *leaf = (x.detach() for x in make_inputs(kind, rows, num_queries, KEYS, 16))
    used = torch.tensor([KEYS // 2, 40, num_queries, KEYS], device=DEVICE)
    offset, starts = used - num_queries, torch.tensor([17, 0, 0, KEYS - num_queries + 1], device=DEVICE)
    for b in range(rows):
        k[b, used[b] :] = v[b, used[b] :] = k[b, : starts[b]] = v[b, : starts[b]] = torch.nan
    bias = make_bias(kind, leaf[0] if leaf else None, True)
    bounds = {"query_offset": offset, "key_starts": starts, "key_lengths": used - starts, "causal": True}
    got = flash_attention(q, k, v, bias=bias, backend="triton", **bounds)
    exact = make_bias(kind, leaf[0].double() if leaf else None, True)
    want = attention_reference(q.double(), k.double(), v.double(), bias=exact, **bounds)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert not got[3, 0].any(), "its first query sees no key"
    assert got[:3].any()


def test_cross_attention_of_beams_to_the_keys_of_one_row():
    """Strided views of one buffer of keys and values, rows of different lengths, and none of any."""
    q = torch.randn(3, 4, HEADS, 16, device=DEVICE)
    k, v = torch.randn(3, KEYS, 2, HEADS, 16, device=DEVICE).unbind(2)
    lengths = torch.tensor([KEYS, 61, 0], device=DEVICE)
    got = flash_attention(q, k, v, key_lengths=lengths, backend="triton")
    want = attention_reference(q.double(), k.double(), v.double(), key_lengths=lengths)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert not got[2].any()


def test_log_sum_exp_is_that_of_the_forward_kernel():
    """The backward kernels read it, whichever kernel wrote it."""
    q, k, v = (x.detach() for x in make_inputs("none", 2, 17, KEYS, 16))
    settings = (None, "none", KEYS - 17, None, None, None, None, None, 0.5, True, 0.0, None, None)
    many, lse = triton_attention(q, k, v, *settings)
    few, few_lse = triton_attention(q[:, :16], k, v, *settings)
    torch.testing.assert_close(few, many[:, :16], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(few_lse, lse[:, :, :16], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_growing_cache_takes_one_prepared_launch(monkeypatch):
    """Its keys lie elsewhere in each step, and are more; nothing is prepared anew for that."""
    monkeypatch.setattr(decode_launch, "_MIN_KEYS", 10 * KEYS)
    launches = PreparedLaunches()
    monkeypatch.setattr(decode_launch, "_decode_launches", launches)
    q = torch.randn(2, 1, HEADS, 16, device=DEVICE)
    bias = DistanceBias(torch.randn(HEADS, 41, device=DEVICE))
    for length in (KEYS, KEYS + 1, KEYS + 12, 1, 16):
        k, v = (torch.randn(2, HEADS, length, 16, device=DEVICE).transpose(1, 2) for _ in range(2))
        got = flash_attention(q, k, v, bias=bias, causal=True, query_offset=length - 1, backend="triton")
        want = attention_reference(q, k, v, bias=bias, causal=True, query_offset=length - 1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(launches._kept) == 1


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_any_number_of_shares(monkeypatch, splits):
    monkeypatch.setattr("fat5.ops.attention.launch.split_count", lambda problem, processors: splits)
    q, k, v, leaf = (x.detach() for x in make_inputs("relative", 1, 2, KEYS, 16))
    got = flash_attention(q, k, v, bias=make_bias("relative", leaf, True), causal=True, backend="triton")
    want = attention_reference(q, k, v, bias=make_bias("relative", leaf, True), causal=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_shares_fill_the_card(monkeypatch):
    """One share where the heads are enough programs, more where rows are long and few."""
    monkeypatch.setattr(decode_launch, "_MIN_KEYS", 512)
    problem = type("Problem", (), {"batch": 16, "heads": 8, "num_keys": 512})
    assert decode_launch.split_count(problem, 132) == 1
    problem.num_keys = 32768
    assert decode_launch.split_count(problem, 132) == 4
    problem.batch = 1
    assert decode_launch.split_count(problem, 132) == 64


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 72, 256])
@pytest.mark.parametrize(
    ("batch", "num_queries", "num_keys"), [(16, 1, 512), (16, 4, 8192), (1, 1, 32768), (2, 16, 129)]
)
def test_real_sizes(monkeypatch, dtype, dim, batch, num_queries, num_keys):
    monkeypatch.setattr(decode_launch, "_MIN_KEYS", 512)
    for kind, causal in (("none", False), ("relative", True)):
        leaves = make_inputs(kind, batch, num_queries, num_keys, dim, dtype, heads=8)
        compare("triton", kind, leaves, causal, softmax_scale=dim**-0.5)
        again = [flash_attention(*leaves[:3], causal=causal, backend="triton") for _ in range(2)]
        assert torch.equal(*again)


@gpu
@needs_gpu
def test_cuda_graph_follows_the_offset_on_the_device(monkeypatch):
    monkeypatch.setattr(decode_launch, "_MIN_KEYS", 512)
    q, k, v, leaf = (x.detach() for x in make_inputs("relative", 2, 1, 2048, 64, torch.bfloat16))
    offset, bias = torch.full((2,), 7, device="cuda"), make_bias("relative", leaf, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flash_attention(q, k, v, bias=bias, causal=True, query_offset=offset)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = flash_attention(q, k, v, bias=bias, causal=True, query_offset=offset)
    torch.cuda.synchronize()
    for position in (0, 700, 2047):
        offset.fill_(position)
        graph.replay()
        alone = flash_attention(q, k, v, bias=bias, causal=True, query_offset=offset)
        assert torch.equal(captured, alone)
