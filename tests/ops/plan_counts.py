"""Counting what calls of Hopper attention make for themselves, and what a plan saves them."""

from collections import Counter

import pytest

from fat5.ops.attention.hopper import plan, work


def count_making(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Return a counter of tables and lists of records that are made from now on."""
    counts: Counter = Counter()
    for name in ("write_table", "write_records"):
        original = getattr(plan, name)

        def counting(*arguments, _name=name, _original=original, **options):
            counts[_name] += 1
            return _original(*arguments, **options)

        for module in (plan, work):
            monkeypatch.setattr(module, name, counting)
    return counts
