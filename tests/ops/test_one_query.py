"""Attention of one query a row on a CPU, without gradients: PyTorch's own, and what is left to the other path."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fat5.ops import DenseBias, DistanceBias, flash_attention
from fat5.ops.attention import api
from fat5.ops.attention.reference import attention_reference

HEADS = 3


def inputs(num_keys, dim=12, dtype=torch.float32, num_queries=1):
    """Queries, and keys and values as a cache of Transformers has them, [B, H, L, D]."""
    q = torch.randn(2, num_queries, HEADS, dim, dtype=dtype)
    k, v = (torch.randn(2, HEADS, num_keys, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    return q, k, v


def dense(kind, num_keys, dtype=torch.float32):
    if kind == "none":
        return None
    bias = torch.randn(*{"heads": (1, HEADS), "rows": (2, 1), "both": (2, HEADS)}[kind], 1, num_keys, dtype=dtype)
    if kind != "heads":
        bias[0, :, :, 1:] = -torch.inf
        bias[1] = -torch.inf  # a row that sees nothing
    return DenseBias(bias)


@pytest.fixture
def no_operator(monkeypatch):
    """Fail where the custom operator is called."""

    def called(*arguments):
        raise AssertionError("the operator was called")

    monkeypatch.setattr(api, "call", called)


@pytest.mark.parametrize("kind", ["none", "heads", "rows", "both"])
@pytest.mark.parametrize(("num_keys", "dim"), [(1, 16), (43, 5), (361, 12)])
@torch.no_grad()
def test_equals_the_formula(no_operator, kind, num_keys, dim):
    q, k, v = inputs(num_keys, dim)
    bias = dense(kind, num_keys)
    got = flash_attention(q, k, v, bias=bias, causal=True, softmax_scale=0.7, query_offset=num_keys - 1)
    want = attention_reference(q.double(), k.double(), v.double(), bias=bias, softmax_scale=0.7)
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    assert want[0].abs().min() > 0
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_types_accumulate_as_the_operator_does(monkeypatch, dtype):
    q, k, v = inputs(64, dtype=dtype)
    bias = dense("heads", 64, torch.float64)
    got = flash_attention(q, k, v, bias=bias)
    monkeypatch.setattr(api, "plain_calls", lambda: False)
    torch.testing.assert_close(got, flash_attention(q, k, v, bias=bias), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"key_starts": torch.tensor([0, 4]), "key_lengths": torch.tensor([7, 9])},
        {"causal": True, "query_offset": 7},  # the free slots of a static cache
        {"causal": True, "query_offset": torch.tensor([9, 19])},
        {"bias": DistanceBias(torch.randn(HEADS, 9))},
    ],
    ids=["padding", "free slots", "offsets", "distance"],
)
@torch.no_grad()
def test_other_problems_take_the_operator(monkeypatch, options):
    q, k, v = inputs(20)
    if "key_lengths" in options:
        k[0, 7:] = v[0, 7:] = torch.nan  # what unused slots hold does not matter
    got = flash_attention(q, k, v, **options)
    monkeypatch.setattr(api, "plain_calls", lambda: False)
    assert torch.equal(got, flash_attention(q, k, v, **options))
    assert got.isfinite().all()
    assert got.abs().max() > 0


def test_gradients_take_the_operator():
    q, k, v = (x.requires_grad_() for x in inputs(20))
    out = flash_attention(q, k, v)
    out.square().sum().backward()
    assert "torch_attention" in type(out.grad_fn).__name__
    assert k.grad.abs().min() > 0


@torch.no_grad()
def test_a_compiled_call_is_one_graph_around_the_operator():
    q, k, v = inputs(20)
    graphs = []
    compiled = torch.compile(flash_attention, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    torch.testing.assert_close(compiled(q, k, v), flash_attention(q, k, v))
    assert "torch_attention" in graphs[0].code


@torch.no_grad()
def test_fake_tensors():
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs(20)]
        assert flash_attention(*fakes).shape == fakes[0].shape
    assert flash_attention(*fakes).shape == fakes[0].shape
