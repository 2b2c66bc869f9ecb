"""The operators of a step of decoding: their kernels against the operators that they stand for."""

import pytest
import torch
import torch.nn.functional as F

from fat5.ops import RelativeBias, add_rms_norm, flash_attention, gated_gelu, rms_norm
from fat5.ops.step import choose_next, step_attention, step_linear
from fat5.ops.step.choice import Rows

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BACKENDS = ["torch", "triton"]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")]
TYPES = [torch.float32, pytest.param(torch.float16), pytest.param(torch.bfloat16, marks=gpu)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(got, want, dtype):
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width", "columns"), [(3, 40, 24), (17, 64, 50), (1, 24, 16)])
def test_linear_equals_its_parts(backend, dtype, rows, width, columns):
    x, residual, weight = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype), normal(columns, width)
    weight = (weight * width**-0.5).to(dtype)
    gain = (1 + 0.3 * normal(width)).to(dtype)
    out, total = step_linear(x, weight, residual=residual, norm=gain, eps=1e-3, backend=backend)
    normed, want_total = add_rms_norm(x, residual, gain, 1e-3, backend="torch")
    close(total, want_total, dtype)
    close(out, F.linear(normed.float(), weight.float()), dtype)
    out, total = step_linear(x, weight, norm=gain, backend=backend)
    assert total is x
    close(out, F.linear(rms_norm(x, gain, backend="torch").float(), weight.float()), dtype)
    close(step_linear(x, weight, backend=backend)[0], F.linear(x.float(), weight.float()), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_linear_with_a_gate(backend, dtype, approximate):
    x, residual = normal(5, 40, dtype=dtype), normal(5, 40, dtype=dtype)
    weight, gain = (normal(2 * 24, 40) * 40**-0.5).to(dtype), normal(40, dtype=dtype)
    settings = {"residual": residual, "norm": gain, "approximate": approximate, "backend": backend}
    normed, want_total = add_rms_norm(x, residual, gain, backend="torch")
    gate, up = F.linear(normed.float(), weight.float()).to(dtype).chunk(2, -1)
    out, total = step_linear(x, weight, **settings)
    close(out, gated_gelu(gate.float(), up.float(), approximate=approximate), dtype)
    close(total, want_total, dtype)
    if dtype == torch.float16:
        large = step_linear(20 * x, 20 * weight, approximate=approximate, backend=backend)[0]
        assert large.isfinite().all()
        assert large.abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_of_the_rows_of_a_table(backend):
    table, tokens = normal(30, 40), torch.tensor([3, 29, 3, 0], device=DEVICE)
    weight, gain = normal(24, 40), normal(40)
    out, total = step_linear(table, weight, tokens=tokens, norm=gain, backend=backend)
    assert torch.equal(total, table[tokens])
    close(out, F.linear(rms_norm(table[tokens], gain, backend="torch"), weight), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("num_keys", "dim", "biased"), [(40, 16, True), (100, 24, False), (7, 16, True)])
def test_attention_stores_and_attends(backend, dtype, bounded, num_keys, dim, biased):
    """Rows at an empty cache, inside and at its last slot; free slots and padding may hold NaN."""
    rows, heads = 4, 2
    q, k, v = normal(rows, 3, heads, dim, dtype=dtype).unbind(1)  # as the slices of one projection
    keys, values = normal(2, rows, num_keys, heads, dim, dtype=dtype)
    positions = torch.tensor([0, 3, num_keys // 2, num_keys - 1], device=DEVICE)
    starts = torch.tensor([0, 2, 1, num_keys - 1], device=DEVICE)
    bounds = {"key_starts": starts, "key_lengths": num_keys - starts} if bounded else {}
    for row, position in enumerate(positions.tolist()):
        keys[row, position:] = values[row, position:] = torch.nan
        if bounded:
            keys[row, : starts[row]] = values[row, : starts[row]] = torch.nan
    bias = RelativeBias(normal(8, heads), bidirectional=False, max_distance=16).by_distance() if biased else None
    want_keys, want_values = keys.clone(), values.clone()
    everyone = torch.arange(rows, device=DEVICE)
    want_keys[everyone, positions], want_values[everyone, positions] = k, v
    want = flash_attention(
        q[:, None].double(), want_keys.double(), want_values.double(), bias=bias, causal=True, query_offset=positions,
        softmax_scale=0.7, **bounds,
    )  # fmt: skip
    got = step_attention(
        q, keys, values, new=(k, v), positions=positions, table=None if bias is None else bias.table,
        softmax_scale=0.7, backend=backend, **bounds,
    )  # fmt: skip
    close(got, want[:, 0], dtype)
    assert torch.equal(keys.nan_to_num(7), want_keys.nan_to_num(7))
    assert torch.equal(values.nan_to_num(7), want_values.nan_to_num(7))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_keys", [9, 100])
def test_attention_to_the_encoder(backend, num_keys):
    q = normal(3, 2, 16)
    keys, values = normal(3, num_keys, 2, 2, 16).unbind(2)
    lengths = torch.tensor([num_keys, 5, 0], device=DEVICE)
    starts = torch.tensor([0, 2, 0], device=DEVICE)
    keys[1, 7:] = values[1, :2] = torch.nan
    bounds = {"key_starts": starts, "key_lengths": lengths}
    got = step_attention(q, keys, values, backend=backend, **bounds)
    want = flash_attention(q[:, None].double(), keys.double(), values.double(), **bounds)[:, 0]
    close(got, want, torch.float32)
    assert not got[2].any()
    got = step_attention(q[:1], keys[:1], values[:1], backend=backend)
    close(got, flash_attention(q[:1, None].double(), keys[:1].double(), values[:1].double())[:, 0], torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eos", [[], [5], [5, 11, 2]])
def test_choice(backend, eos):
    """Ties, infinities and NaN as `argmax` has them; rows that have ended get padding and count no more."""
    count, vocabulary = 5, 37
    rows = Rows(
        tokens=torch.zeros(count, 1, dtype=torch.int64, device=DEVICE),
        sequences=torch.zeros(count, 9, dtype=torch.int64, device=DEVICE),
        places=torch.full((count,), 2, device=DEVICE),
        lengths=torch.zeros(count, dtype=torch.int64, device=DEVICE),
        ended=torch.zeros(count, dtype=torch.bool, device=DEVICE),
    )
    want = [[] for _ in range(count)]
    lengths, ended = [0] * count, [False] * count
    for step in range(4):
        logits = normal(count, vocabulary).round()
        logits[0, 11] = logits[0, 5] = 9.0
        logits[1] = -torch.inf
        logits[2, 30] = torch.nan
        logits[3, 5 if step == 2 else 6] = torch.inf
        for row, best in enumerate(logits.argmax(-1).tolist()):
            lengths[row] += not ended[row]
            want[row].append(36 if ended[row] else best)
            ended[row] = ended[row] or best in eos
        choose_next(logits, rows, torch.tensor(eos, dtype=torch.int64, device=DEVICE), 36, backend=backend)
        assert rows.tokens.flatten().tolist() == [tokens[-1] for tokens in want]
    assert rows.sequences[:, 2:6].tolist() == want
    assert not rows.sequences[:, :2].any()
    assert not rows.sequences[:, 6:].any()
    assert rows.places.tolist() == [6] * count
    assert rows.lengths.tolist() == lengths
    assert rows.ended.tolist() == ended


def test_what_does_not_fit_is_named():
    x, weight = normal(3, 8), normal(6, 8)
    with pytest.raises(ValueError, match=r"expected x \[rows, K\] and weight \[N, K\]"):
        step_linear(x, normal(6, 7))
    with pytest.raises(ValueError, match="one floating type"):
        step_linear(x, weight.half())
    with pytest.raises(ValueError, match="no tokens with it"):
        step_linear(x, weight, residual=x, tokens=torch.zeros(3, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="got approximate='fast'"):
        step_linear(x, weight, approximate="fast")
    with pytest.raises(ValueError, match="up to 2,048 columns, not 4096"):
        step_linear(normal(1, 4096), normal(2, 4096), backend="triton")
    keys = normal(3, 5, 2, 16)
    with pytest.raises(ValueError, match="new, positions and table together"):
        step_attention(normal(3, 2, 16), keys, keys, new=(normal(3, 2, 16),) * 2)
    with pytest.raises(ValueError, match=r"expected \[rows, vocabulary\]"):
        choose_next(normal(3), Rows(*[torch.zeros(3, 1, device=DEVICE)] * 5), torch.zeros(0, device=DEVICE), 0)


@pytest.fixture
def newer_name():
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    yield
    matmul.fp32_precision = before


@pytest.mark.usefixtures("newer_name")
def test_kernels_run_whichever_name_set_tf32():
    """Once PyTorch's newer name was used its older one, `allow_tf32`, cannot be read."""
    q, x = normal(1, 3, 2, 16), normal(3, 32)
    exact = flash_attention(q, q, q, backend="torch")
    torch.testing.assert_close(flash_attention(q, q, q, backend="triton"), exact, rtol=1e-2, atol=1e-2)
    out, _ = step_linear(x, x, backend="triton")
    torch.testing.assert_close(out, x @ x.T, rtol=1e-2, atol=2e-2)
