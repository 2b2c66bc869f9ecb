"""Compiling a deep chain of custom ops takes no time for a message that nobody reads."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.exc import OperatorIssue

from fat5.ops.inductor_messages import operator_str, shorten

DEPTH = 40  # 2^40 paths lead from the last operator to the input


@pytest.fixture
def original(monkeypatch):
    """Put Inductor's own message back after the test."""
    monkeypatch.setattr(OperatorIssue, "operator_str", OperatorIssue.operator_str)


@pytest.mark.parametrize(("version", "shortened"), [("2.11.0+cu130", True), ("2.13.0+cpu", False), ("3.0.0a0", False)])
def test_only_before_the_release_that_needs_nothing(original, monkeypatch, version, shortened):
    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(str))
    shorten(version)
    assert (OperatorIssue.operator_str is operator_str) is shortened


def test_tensors_are_named_by_their_type_and_numbers_shown():
    class Node:
        def __str__(self):
            raise AssertionError("written out")

        __repr__ = __str__

    text = operator_str(
        "fat5.some_op.default", [Node(), [Node()], 0.5, None], {"dtype": torch.float16, "other": Node()}
    )
    assert text.splitlines() == [
        "  target: fat5.some_op.default", "  args[0]: Node", "  args[1]: list", "  args[2]: 0.5", "  args[3]: None",
        "  dtype: torch.float16", "  other: Node",
    ]  # fmt: skip


def test_a_deep_chain_of_custom_ops_compiles(original, caplog):
    @torch.library.custom_op("fat5_test::both", mutates_args=())
    def both(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @torch.library.custom_op("fat5_test::last", mutates_args=())
    def last(x: Tensor) -> Tensor:
        return 2 * x

    for op in (both, last):
        op.register_fake(lambda x, *_: torch.empty_like(x))

    def chain(x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = both(x, x)
        return last(x)

    shorten("2.11.0")
    torch._dynamo.reset()
    caplog.set_level(logging.INFO, "torch._inductor.graph")  # later releases write it for a reader alone
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph out of a cache is not written about
        got = torch.compile(chain, fullgraph=True)(torch.ones(4))
    assert torch.equal(got, torch.full((4,), 2.0 ** (DEPTH + 1)))
    messages = [record.getMessage() for record in caplog.records if "implicit fallback" in record.getMessage()]
    assert len(messages) == 2
    assert max(map(len, messages)) < 300
