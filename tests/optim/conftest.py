"""Blocks small enough for Triton's interpreter."""

from __future__ import annotations

import pytest

from fat5.optim import fused_update
from fat5.optim.fused_update import Launch


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tensors into blocks of 64 and chunks of 128 elements."""
    monkeypatch.setattr(fused_update, "LAUNCH", Launch(block=64, blocks_a_chunk=2, warps=2))
