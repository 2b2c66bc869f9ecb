"""Rows beside the tiles of a ragged batch: the map of padded rows, and rows of no sequence."""

import functools
import math

import pytest
import torch

from fat5.ops import DistanceBias, flash_attention, plan_attention
from fat5.ops.attention.backends import BACKENDS
from fat5.ops.attention.hopper.records import KEY_TILES, make_records
from fat5.ops.attention.hopper.rows import prepare_kernel
from fat5.ops.attention.tile_scores import END_OFFSET
from tests.ops.kernel_checks import DEVICE, relative_error

HEADS, DIM = 3, 64


def arguments_of(kind, **given):
    found = {
        "CuQ": None, "CuK": None, "KeyStarts": None, "KeyLengths": None, "Offsets": None, "offset": 0, "row_slots": 8,
        "pitch": 64, "KIND": kind.value, "PADDED": False, "OFFSET": END_OFFSET.value,
    }  # fmt: skip
    found |= given
    return found | {
        "VARLEN": found["CuQ"] is not None,
        "HAS_STARTS": found["KeyStarts"] is not None,
        "HAS_LENGTHS": found["KeyLengths"] is not None,
    }


def documents(lengths, room, dtype=torch.int32):
    """Offsets, with an empty document at the end, and the rows of the batch."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:]]).to(DEVICE, dtype), int(ends[-1]) + room


def results(*shape, strided):
    """Two results full of ones, one beside the other in memory or each for itself."""
    if strided:
        return torch.ones(*shape[:-2], 2, *shape[-2:], device=DEVICE, dtype=torch.bfloat16).unbind(-3)
    return tuple(torch.ones(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("room", [0, 1, 130])
@pytest.mark.parametrize("lengths", [[5, 0, 300, 1, 129, 128], [64, 64], [0], [1] * 40])
def test_map_of_padded_rows(lengths, room, dtype):
    """Each row of each document once, in blocks of its own, and each row of none in a block without rows."""
    cu, total = documents(lengths, room, dtype)
    blocks = math.ceil(total / 64) + len(lengths) + 1
    tiles = torch.full((blocks, 2), -1, dtype=torch.int32, device=DEVICE)
    arguments = arguments_of(KEY_TILES, CuQ=cu, CuK=cu, M=total, N=total, sequences=len(lengths) + 1)
    records = torch.empty(blocks, 5, 16, dtype=torch.int32, device=DEVICE)
    make_records(records, arguments, HEADS, False, row_map=tiles)
    expected = [
        (int(begin) + row, min(64, length - row))
        for begin, length in zip(cu.tolist(), lengths, strict=False)
        for row in range(0, length, 64)
    ]
    assert tiles[: len(expected)].tolist() == [list(x) for x in expected]
    rest = tiles[len(expected) :]
    assert not rest[:, 1].any()
    assert sorted(rest[:, 0].tolist()) == rest[:, 0].tolist()
    covered = {row for first in rest[:, 0].tolist() for row in range(first, min(first + 64, total))}
    assert covered == set(range(sum(lengths), total))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("length", [100, 128])
@pytest.mark.parametrize("given", ["both", "starts", "lengths"])
def test_keys_around_the_real_ones_are_cleared_and_no_others(length, given, strided):
    starts, lengths = (torch.tensor(x, device=DEVICE) for x in ([0, 30, 3, 99, 64], [100, 34, 0, 50, 200]))
    if given == "lengths":
        starts.zero_()
    if given == "starts":
        lengths.fill_(length)
    first, second = results(5, length, HEADS, DIM, strided=strided)
    given_starts = starts if given in ("both", "starts") else None
    given_lengths = lengths if given in ("both", "lengths") else None
    queries = 200  # whose programs share the keys, be they more or fewer
    blocks = math.ceil(queries / 64)
    out = torch.zeros(5, queries, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    padded = [torch.empty(5 * HEADS * 64 * blocks, device=DEVICE) for _ in range(2)]
    lse = torch.zeros(5, HEADS, queries, device=DEVICE)
    prepare_kernel[(5 * HEADS * blocks,)](
        out, out, lse, *padded, padded[0], padded[0], padded[0], None, 0, 0, 0, 0, *out.stride()[:3], *out.stride()[:3],
        HEADS, queries, blocks, first, second, *first.stride()[:3], given_starts, given_lengths, length, D=DIM,
        VARLEN=False, CLEAR=False, HAS_STARTS=given_starts is not None, HAS_LENGTHS=given_lengths is not None,
        REVERSED=True, CHAIN=False,
    )  # fmt: skip
    for row, (start, count) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        key = torch.arange(length, device=DEVICE)
        real = ((key >= start) & (key < start + count))[:, None, None].expand(-1, HEADS, DIM)
        assert torch.equal(first[row], real.to(first.dtype))
        assert torch.equal(second[row], real.to(second.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_that_is_replayed_with_shorter_documents_clears_their_rows(deterministic, causal, planned):
    """Rows that held results in the replay before; the offsets change on the device alone."""
    if BACKENDS["hopper"]() is not None:
        pytest.skip(BACKENDS["hopper"]())
    long, short = ([0, 900, 900, 3000, 4096], [0, 70, 700, 701, 1100])
    documents = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    q, k, v, weights = (torch.randn(4096, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(4, 183, device=DEVICE))]

    def step(offsets):
        options = {
            "bias": DistanceBias(leaves[3]), "causal": causal, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
            "max_seqlen_q": 4096, "max_seqlen_k": 4096, "softmax_scale": 0.125, "backend": "hopper",
        }  # fmt: skip
        plan = plan_attention(*leaves[:2], **options) if planned else None
        out = flash_attention(*leaves[:3], plan=plan, **options)
        return [out, *torch.autograd.grad(out, leaves, weights)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        with torch.cuda.stream(stream):
            leaves = [x.detach().clone().requires_grad_() for x in leaves]
            want = step(documents(short))
            offsets = documents(long)
            step(offsets)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                got = step(offsets)
            graph.replay()
            assert all(x[-1].any() for x in got[:4])
            offsets.copy_(documents(short))
            graph.replay()
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, expected in zip(got, want, strict=True):
        assert relative_error(ours.detach(), expected.detach()) < (1e-12 if deterministic else 1e-2)
    for ours in got[:4]:
        assert torch.equal(ours[1100:], torch.zeros_like(ours[1100:]))
