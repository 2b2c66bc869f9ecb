"""The Hopper forward where queries that see half of their last tile of keys multiply that half alone."""

import itertools

import pytest
import torch

from fat5.ops.attention.hopper import configuration
from fat5.ops.attention.hopper.configuration import ForwardShape
from fat5.ops.attention.reference import packed_attention_reference
from tests.ops import test_hopper_kernels
from tests.ops.attention_comparison import DEVICE, compare, make_inputs
from tests.ops.gluon_emulator import kernel_function

BF16 = torch.bfloat16
launches = test_hopper_kernels.launches  # without a GPU the kernels run on the emulator


@pytest.fixture(autouse=True)
def shape(monkeypatch):
    chosen = ForwardShape(2, 2, ahead=False, halves=True)
    monkeypatch.setattr(configuration, "forward_shape", lambda *_: chosen)


@pytest.mark.parametrize("causal", [False, True])
def test_a_half_is_left_out_where_no_query_sees_it(causal):
    """Against each query's own last key, in tiles of 128 keys and rows of 64 queries."""
    tiles, whole, taken = kernel_function("key_tiles"), kernel_function("whole_tiles"), set()
    for first, keys, shift in itertools.product((0, 128), (1, 63, 64, 65, 128, 129, 192, 300), range(-200, 201)):
        n = tiles(first, keys, shift, 128, 128, causal)
        for q0 in (first, first + 64):
            seen = max(min(keys, q + shift + 1) if causal else keys for q in range(q0, q0 + 64))
            half = n > 1 and seen <= (n - 1) * 128 + 64
            assert whole(n, -(q0 + shift), keys, 128, causal) == n - half, (first, keys, shift, q0)
            taken.add((q0 - first, half))
    assert taken == set(itertools.product((0, 64), (False, True)))


@pytest.mark.parametrize(
    ("dim", "lengths", "offset"), [(64, (200, 330), 130), (64, (150, 280), 37), (128, (140, 290), 96)]
)
def test_causal_with_any_offset(dim, lengths, offset, launches):
    """The upper, the lower or neither half of a tile's queries see no more than half of their last keys."""
    leaves = make_inputs("relative", 1, *lengths, dim, torch.float16)
    compare("hopper", "relative", leaves, True, softmax_scale=0.125, query_offset=offset)
    assert launches[0] == "forward_kernel"


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_their_own_lengths_and_offsets(causal, launches):
    options = {
        "query_offset": torch.tensor([3, -150, 190], device=DEVICE),
        "key_starts": torch.tensor([0, 7, 2], device=DEVICE),
        "key_lengths": torch.tensor([150, 60, 331], device=DEVICE),
    }
    compare(
        "hopper", "relative", make_inputs("relative", 3, 140, 340, 64, BF16), causal, softmax_scale=0.125, **options
    )
    assert launches[0] == "forward_kernel"


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents(causal, launches):
    offsets = torch.tensor([0, 7, 8, 8, 199, 380, 380], dtype=torch.int32, device=DEVICE)
    leaves = make_inputs("relative", 1, 400, 400, 64, BF16)
    leaves = [x.detach()[0].requires_grad_() if x.ndim == 4 else x for x in leaves]
    ours = compare(
        "hopper", "relative", leaves, causal, reference=packed_attention_reference, cu_seqlens_q=offsets,
        cu_seqlens_k=offsets, max_seqlen_q=191, max_seqlen_k=191, softmax_scale=0.125,
    )  # fmt: skip
    assert all(not x[380:].any() for x in ours[:4])
    assert launches == ["forward_kernel", "backward_kernel"]


def test_it_goes_with_two_consumers_that_do_not_begin_ahead():
    with pytest.raises(ValueError, match="got halves with 2 consumers and ahead=True"):
        ForwardShape(halves=True)
    with pytest.raises(ValueError, match="got halves with 3 consumers"):
        ForwardShape(3, ahead=False, halves=True)
