"""Which program of a Hopper kernel takes which tile: each exactly once, evenly, whatever the lengths."""

import inspect
import math

import pytest
import torch
import triton

from fat5.ops.attention.hopper.finish import finish_kernel
from fat5.ops.attention.hopper.records import BEYOND, KEY_TILES, QUERY_TILES, make_records, record_kernel
from fat5.ops.attention.hopper.rows import prepare_kernel
from fat5.ops.attention.hopper.setup import ALIBI, DISTANCE, NONE, setup_kernel
from fat5.ops.attention.hopper.table_gradient import table_kernel
from fat5.ops.attention.tile_scores import END_OFFSET, OWN_OFFSET
from tests.ops.gluon_emulator import kernel_function

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these kernels in the tests of attention")
HEADS = 3


def deal(blocks, sequences, programs, falling, turns_a_chunk):
    """Return the causal tiles [turns, programs], -1 for none."""
    tiles = blocks * sequences
    programs = min(programs, tiles)
    dealt_tile = kernel_function("dealt_tile")
    schedule = [
        [
            int(dealt_tile(turn, program, programs, tiles, blocks, turns_a_chunk * programs, falling))
            for program in range(programs)
        ]
        for turn in range(triton.cdiv(tiles, programs))
    ]
    schedule = torch.tensor(schedule)
    return torch.where(schedule < tiles, schedule, -1)


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize(
    ("blocks", "sequences", "programs", "turns_a_chunk"),
    [(8, 192, 132, 4), (32, 6, 11, 4), (3, 50, 20, 4), (7, 3, 132, 4), (64, 3, 4, 4), (22, 48, 20, 8)],
)
def test_causal_tiles_are_dealt_once_and_evenly(blocks, sequences, programs, turns_a_chunk, falling):
    schedule = deal(blocks, sequences, programs, falling, turns_a_chunk)
    assert sorted(schedule[schedule >= 0].tolist()) == list(range(blocks * sequences))
    assert int(schedule.min()) >= -1
    work = blocks - schedule % blocks if falling else schedule % blocks + 1
    loads = torch.where(schedule >= 0, work, 0).sum(0)
    assert int(loads.max()) <= max(blocks, 1.06 * float(loads.float().mean()) + 1)


@pytest.mark.parametrize("kernel", [record_kernel, setup_kernel, prepare_kernel, finish_kernel, table_kernel])
def test_a_kernel_launched_early_waits_before_it_stores(kernel):
    """Under deterministic algorithms PyTorch fills new memory, by a kernel that may still be writing until then."""
    lines = [line.strip() for line in inspect.getsource(kernel.fn).splitlines()]
    storing = ("tl.store(", "write_records(", "map_rows(", "clear_keys(", "_clear(", "sum_diagonals(", "finish_rows(")
    stores = [number for number, line in enumerate(lines) if line.startswith(storing)]
    assert lines.index("gdc_wait()") < min(stores)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [NONE, DISTANCE, ALIBI])
def test_table_holds_the_bias_by_distance_in_pairs(kind, causal, reverse):
    radius, span, scale = 4, 30, 0.5
    bias = {0: None, 1: torch.randn(HEADS, 2 * radius + 1), 2: torch.rand(HEADS)}[kind.value]
    table = torch.full((HEADS, 2 * span, 2), torch.nan)
    programs = triton.cdiv(2 * span, 16)
    setup_kernel[(programs, HEADS)](
        bias, table, scale, span, RADIUS=radius, BIAS=kind.value, CAUSAL=causal, REVERSED=reverse, BLOCK=16,
        CHAIN=False,
    )  # fmt: skip
    distance = torch.arange(-span, span + 1) * (-1 if reverse else 1)
    want = {
        0: lambda: torch.zeros(HEADS, len(distance)),
        1: lambda: bias[:, distance.clamp(-radius, radius) + radius] / scale,
        2: lambda: bias[:, None] * -distance.abs() / scale,
    }[kind.value]()
    if causal:
        want = want.masked_fill(distance > 0, -torch.inf)
    assert torch.equal(table[..., 0], want[:, :-1])
    assert torch.equal(table[..., 1], want[:, 1:])


def offsets(lengths):
    """Offsets of documents of these lengths, and an empty one at the end."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0), sum(lengths)], dtype=torch.int32)


UNUSED = {QUERY_TILES: 37, KEY_TILES: 150}


def empty_records(tiles, programs):
    return torch.zeros(triton.cdiv(tiles * HEADS, programs), programs, 16, dtype=torch.int32)


def records_of(kind, queries, keys, causal, programs, group=None):
    cu_q, cu_k = offsets(queries), offsets(keys)
    total_q, total_k = sum(queries) + UNUSED[QUERY_TILES], sum(keys) + UNUSED[KEY_TILES]
    tiles = triton.cdiv(total_k if kind is KEY_TILES else total_q, 128) + len(queries) + 1
    arguments = {
        "CuQ": cu_q, "CuK": cu_k, "KeyStarts": None, "KeyLengths": None, "Offsets": None, "offset": 0, "M": total_q,
        "N": total_k, "sequences": len(queries) + 1, "row_slots": 0, "pitch": total_q,
        "KIND": kind.value, "PADDED": kind is KEY_TILES,
        "VARLEN": True, "OFFSET": END_OFFSET.value, "HAS_STARTS": False, "HAS_LENGTHS": False,
    }  # fmt: skip
    records = empty_records(tiles, programs)
    make_records(records, arguments, HEADS, causal, group=group)
    return records


def cost_of(record, kind, causal):
    """Tiles of the other side that a tile has to do with."""
    _, first, _, _, _, _, queries, keys, shift = record[:9]
    if kind is KEY_TILES:
        return max(0, math.ceil(queries / 64) - (max(0, first - shift) // 64 if causal else 0))
    seen = min(keys, first + 128 + shift) if causal else keys
    return max(1, math.ceil(seen / 128))


CASES = [
    ([5, 0, 300, 1, 129, 128], None, 5),
    ([64] * 9, None, 132),
    ([700, 3], [20, 650], 4),
    ([0, 0, 7], [9, 0, 300], 1),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [QUERY_TILES, KEY_TILES])
@pytest.mark.parametrize(("queries", "keys", "programs"), CASES)
def test_records_of_documents(queries, keys, programs, kind, causal):
    """Every tile of every document and head once, longest first, with its document's place and lengths.

    Rows behind the last document are queries without keys, or keys without queries.
    """
    keys = keys or queries
    records = records_of(kind, queries, keys, causal, programs)
    if kind is KEY_TILES:
        keys, queries = [*keys, 0, UNUSED[kind]], [*queries, 0, 0]
    else:
        keys, queries = [*keys, 0, 0], [*queries, 0, UNUSED[kind]]
    lengths = keys if kind is KEY_TILES else queries
    starts_q, starts_k = offsets(queries).tolist(), offsets(keys).tolist()
    blocks = [(d, b) for d, n in enumerate(lengths) for b in range(math.ceil(n / 128))]
    expected = {(head, slot): blocks[slot] for head in range(HEADS) for slot in range(len(blocks))}
    padded = [64 * sum(math.ceil(n / 64) for n in queries[:d]) for d in range(len(queries))]
    costs = []
    for turn, row in enumerate(records.tolist()):
        for record in row if turn % 2 == 0 else reversed(row):  # dealt forth and back
            if record[0] < 0:
                continue
            document, block = expected.pop((record[0], record[10]))
            assert record[1] == 128 * block
            shift = keys[document] - queries[document] if document < len(queries) - 1 else 0
            assert record[6:9] == [queries[document], keys[document], shift]
            assert record[2] + record[3] - BEYOND.value == starts_q[document]
            assert record[4] + record[5] - BEYOND.value == starts_k[document]
            assert record[9] == (padded[document] if kind is KEY_TILES else starts_q[document])
            costs.append(cost_of(record, kind, causal))
    assert not expected
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("kind", [QUERY_TILES, KEY_TILES])
@pytest.mark.parametrize("group", [1, 2])
def test_tiles_of_a_few_heads_come_together(kind, group):
    """Those of the last group fall in work, of every other one before it they rise: the same tiles, elsewhere."""
    case = (kind, [5, 0, 300, 1, 129, 128], [5, 0, 300, 1, 129, 128], True, 5)
    records = records_of(*case, group=group)
    dealt = [r for turn, row in enumerate(records.tolist()) for r in (row if turn % 2 == 0 else row[::-1])]
    dealt = [record for record in dealt if record[0] >= 0]
    groups = [record[0] // group for record in dealt]
    assert groups == sorted(groups)
    for own in set(groups):
        costs = [cost_of(record, kind, True) for record in dealt if record[0] // group == own]
        assert costs == sorted(costs, reverse=(max(groups) - own) % 2 == 0)
    together = [r for r in records_of(*case).flatten(0, 1).tolist() if r[0] >= 0]
    assert sorted(dealt) == sorted(together)


def test_records_of_padded_rows_move_positions_to_the_first_real_key():
    starts, lengths, own = torch.tensor([0, 30, 90]), torch.tensor([100, 60, 50]), torch.tensor([4, -2, 7])
    arguments = {
        "CuQ": None, "CuK": None, "KeyStarts": starts, "KeyLengths": lengths, "Offsets": own, "offset": 0, "M": 200,
        "N": 100, "sequences": 3, "row_slots": 8, "pitch": 200,
        "KIND": QUERY_TILES.value, "PADDED": False, "VARLEN": False,
        "OFFSET": OWN_OFFSET.value, "HAS_STARTS": True, "HAS_LENGTHS": True,
    }  # fmt: skip
    records = empty_records(6, 18)
    make_records(records, arguments, HEADS, False)
    records = records.view(-1, 16)
    records = records[records[:, 0] >= 0]
    assert len(records) == 2 * 3 * HEADS
    for row, (keys, shift) in enumerate([(100, 4), (60, -32), (10, -83)]):  # the last row's keys end with the tensor
        of_row = records[records[:, 9] == row * HEADS * 200]
        assert set(of_row[:, 10].tolist()) == {8 * row, 8 * row + 1}
        assert len(of_row) == 2 * HEADS
        assert of_row[:, 6:9].unique(dim=0).tolist() == [[200, keys, shift]]
        assert set((of_row[:, 2] + of_row[:, 3] - BEYOND.value).tolist()) == {200 * row}
        assert set((of_row[:, 4] + of_row[:, 5] - BEYOND.value).tolist()) == {100 * row + int(starts[row])}


@pytest.mark.parametrize("ragged", [False, True])
def test_descriptors_pass_the_checks_that_they_leave_out(ragged):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fat5.ops.attention.hopper.descriptors import matrix_descriptor, rows_descriptor

    rows = torch.zeros((100, 3, 192) if ragged else (2, 100, 3, 192), dtype=torch.bfloat16)[..., 64:128]
    for made in (rows_descriptor(rows, 64, 64, ragged), rows_descriptor(rows, 128, 32, ragged)):
        checked = TensorDescriptor(rows, made.shape, made.strides, made.block_shape, made.layout)
        assert (made.padding, made.base) == (checked.padding, rows)
        assert made.strides[-3:] == [rows.stride(-2), rows.stride(-3), 1]
    assert made.kind != rows_descriptor(rows, 64, 64, ragged).kind
    matrix = torch.zeros(128, 64)
    made = matrix_descriptor(matrix, 64, 32)
    checked = TensorDescriptor(matrix, [128, 64], [64, 1], [64, 32], made.layout)
    assert (made.shape, made.strides, made.block_shape) == (checked.shape, checked.strides, checked.block_shape)
    assert made.kind != matrix_descriptor(matrix.bfloat16(), 64, 32).kind
