"""Shared fixtures: a fixed seed, and memory from `torch.empty` that shows when nobody wrote it."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side, and their tensors are small

if not torch.cuda.is_available():
    # Triton decides when it decorates a kernel, so this comes before any import of the package.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if (
        tensor.is_floating_point()
        and tensor.device.type != "meta"
        and not isinstance(tensor, torch._subclasses.FakeTensor)
    ):
        with torch.no_grad():  # a leaf that requires its gradient, too
            tensor.fill_(torch.nan)
    return tensor


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its kin return with NaN, so that an element nobody wrote is seen."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **kwargs):
            return _poison(_original(*args, **kwargs))

        monkeypatch.setattr(owner, name, poisoned)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start each test from the same seed."""
    torch.manual_seed(0)
