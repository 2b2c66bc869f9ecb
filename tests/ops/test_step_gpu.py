"""The operators of a step of decoding at real sizes, and overlapped in a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F

from fat5.ops import RelativeBias, add_rms_norm, flash_attention, gated_gelu
from fat5.ops.step import choose_next, step_attention, step_linear
from fat5.ops.step.choice import Rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HALVES = [torch.bfloat16, torch.float16]


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def error(x, exact):
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "width", "columns"), [(16, 512, 1536), (1, 2048, 512), (64, 768, 768), (5, 1024, 24)])
def test_linear(dtype, rows, width, columns):
    """At most twice the error of the operators one after the other."""
    x, residual, gain = (normal(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    weight = (normal(2 * columns, width) * width**-0.5).to(dtype)
    normed, want_total = add_rms_norm(x, residual, gain, backend="torch")
    product = normed.double() @ weight.double().T
    gate, up = product.chunk(2, -1)
    gated = F.gelu(gate, approximate="tanh") * up
    for approximate, exact in ((None, product), ("tanh", gated)):
        got, total = step_linear(x, weight, residual=residual, norm=gain, approximate=approximate, backend="triton")
        plain = F.linear(normed, weight)
        if approximate is not None:
            plain = gated_gelu(*plain.chunk(2, -1), backend="torch")
        assert torch.equal(total, want_total)
        assert error(got, exact) <= 2 * error(plain, exact), approximate
        again = step_linear(x, weight, residual=residual, norm=gain, approximate=approximate, backend="triton")[0]
        assert torch.equal(got, again)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize("num_keys", [192, 512, 8192])
def test_attention(dtype, dim, num_keys):
    rows, heads = 16, 8
    q, k, v = normal(rows, 3, heads, dim, dtype=dtype).unbind(1)
    q = q * dim**-0.5
    keys, values = normal(2, rows, num_keys, heads, dim, dtype=dtype)
    positions = torch.randint(0, num_keys, (rows,), device="cuda")
    bias = RelativeBias(normal(32, heads, dtype=torch.float32), bidirectional=False).by_distance()
    filled = keys.clone(), values.clone()
    for kept, new in zip(filled, (k, v), strict=True):
        kept[torch.arange(rows, device="cuda"), positions] = new
    settings = {"bias": bias, "causal": True, "query_offset": positions}
    exact = flash_attention(q[:, None].double(), *(x.double() for x in filled), **settings)[:, 0]
    plain = flash_attention(q[:, None], *filled, **settings, backend="torch")[:, 0]
    got = step_attention(q, keys, values, new=(k, v), positions=positions, table=bias.table, backend="triton")
    assert error(got, exact) <= 2 * error(plain, exact)
    assert torch.equal(keys, filled[0])
    assert torch.equal(values, filled[1])
    lengths = torch.randint(1, num_keys + 1, (rows,), device="cuda")
    exact = flash_attention(q[:, None].double(), *(x.double() for x in filled), key_lengths=lengths)[:, 0]
    plain = flash_attention(q[:, None], *filled, key_lengths=lengths, backend="torch")[:, 0]
    got = step_attention(q, keys, values, key_lengths=lengths, backend="triton")
    assert error(got, exact) <= 2 * error(plain, exact)


def test_kernels_that_overlap_see_what_the_ones_before_them_wrote():
    """A chain as a decoder has it: replayed as a graph, bit by bit what it is with a wait behind each kernel."""
    rows, heads, dim, width, layers, room = 16, 8, 64, 512, 6, 128
    weights = [
        [normal(n, k) * k**-0.5 for n, k in ((1536, 512), (512, 512), (512, 512), (512, 512), (4096, 512), (512, 2048))]
        for _ in range(layers)
    ]
    gain, embedding = normal(width), normal(1000, width)
    cross = normal(layers, 2, rows, 512, heads, dim)
    own = torch.zeros(layers, 2, rows, room, heads, dim, device="cuda", dtype=torch.bfloat16)
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    tokens = torch.arange(rows, device="cuda")
    eos = torch.zeros(0, dtype=torch.int64, device="cuda")

    def chain(wait):
        x, more = embedding, {"tokens": tokens}
        for layer, (qkv, o, cross_q, cross_o, wi, wo) in enumerate(weights):
            projected, states = step_linear(x, qkv, norm=gain, **more)
            wait()
            q, k, v = projected.view(rows, 3, heads, dim).unbind(1)
            attended = step_attention(q, *own[layer], new=(k, v), positions=positions, softmax_scale=0.1)
            wait()
            update, _ = step_linear(attended.flatten(1), o)
            wait()
            q, states = step_linear(update, cross_q, residual=states, norm=gain)
            wait()
            attended = step_attention(q.view(rows, heads, dim), *cross[layer], softmax_scale=0.1)
            wait()
            update, _ = step_linear(attended.flatten(1), cross_o)
            wait()
            inner, states = step_linear(update, wi, residual=states, norm=gain, approximate="tanh")
            wait()
            x, more = step_linear(inner, wo)[0], {"residual": states}
            wait()
        states = add_rms_norm(x, states, gain)[0]
        choose_next(F.linear(states, embedding), state, eos, 0)
        positions.add_(1)
        return states

    def restart():
        own.zero_()
        positions.zero_()
        tokens.copy_(torch.arange(rows, device="cuda"))
        state.places.zero_()

    state = Rows(
        tokens=tokens[:, None],
        sequences=torch.zeros(rows, room, dtype=torch.int64, device="cuda"),
        places=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        lengths=torch.zeros(rows, dtype=torch.int64, device="cuda"),
        ended=torch.zeros(rows, dtype=torch.bool, device="cuda"),
    )
    want = [chain(torch.cuda.synchronize).clone() for _ in range(room)]
    tokens_wanted = state.sequences.clone()
    assert len(tokens_wanted.unique()) > 10
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    restart()
    with torch.cuda.stream(stream):
        chain(lambda: None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = chain(lambda: None)
    torch.cuda.synchronize()
    for _ in range(3):
        restart()
        for step in range(room):
            graph.replay()
            assert torch.equal(captured, want[step]), step
        restart()
        for _ in range(room):  # none waits for the host
            graph.replay()
        assert torch.equal(state.sequences, tokens_wanted)


@pytest.mark.parametrize("vocabulary", [32_768, 32_100, 250_112])
def test_choice(vocabulary):
    rows = Rows(
        tokens=torch.zeros(16, 1, dtype=torch.int64, device="cuda"),
        sequences=torch.zeros(16, 4, dtype=torch.int64, device="cuda"),
        places=torch.zeros(16, dtype=torch.int64, device="cuda"),
        lengths=torch.zeros(16, dtype=torch.int64, device="cuda"),
        ended=torch.zeros(16, dtype=torch.bool, device="cuda"),
    )
    for step in range(4):
        logits = normal(16, vocabulary)  # bfloat16 has many ties
        want = torch.where(rows.ended, 0, logits.float().argmax(-1))
        choose_next(logits, rows, torch.tensor([7], device="cuda"), 0, backend="triton")
        assert torch.equal(rows.sequences[:, step], want)
