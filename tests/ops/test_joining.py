"""`join_matrices`: what `torch.cat` makes of each group, with its gradients, in one go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fat5.ops.joining import join_matrices
from tests.ops.kernel_checks import DEVICE, leaf

SHAPES = [[(3, 4), (2, 4)], [(1, 4)], [(5, 6), (5, 6), (2, 6)]]
COUNTS = [len(group) for group in SHAPES]


def matrices(dtype=torch.float32) -> list[Tensor]:
    return [leaf(*shape, dtype=dtype) for group in SHAPES for shape in group]


def joined_apart(given: list[Tensor]) -> list[Tensor]:
    return [torch.cat(group) for group in (given[:2], given[2:3], given[3:])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("unused", [None, 0, 2])
def test_equals_cat_with_gradients(unused, compiled):
    def squares(given: list[Tensor], join) -> Tensor:
        return sum((n + 1) * x.square().sum() for n, x in enumerate(join(given)) if n != unused)

    given = matrices()
    function = torch.compile(squares, fullgraph=True, backend="aot_eager") if compiled else squares
    results = [
        torch.autograd.grad(one(given, join), given, allow_unused=True)
        for one, join in ((function, lambda x: join_matrices(x, COUNTS)), (squares, joined_apart))
    ]
    for ours, theirs in zip(*results, strict=True):
        assert ours is None or ours.any()
        torch.testing.assert_close(
            torch.zeros(1) if ours is None else ours, torch.zeros(1) if theirs is None else theirs
        )
    for ours, theirs in zip(join_matrices(given, COUNTS), joined_apart(given), strict=True):
        assert torch.equal(ours, theirs)


def test_frozen_matrices_stay_so():
    given = [x.detach() for x in matrices()]
    assert not any(x.requires_grad for x in join_matrices(given, COUNTS))


def test_opcheck():
    torch.library.opcheck(join_matrices, (matrices(), COUNTS))
    torch.library.opcheck(join_matrices, ([x.detach().to(DEVICE) for x in matrices(torch.float16)], COUNTS))
