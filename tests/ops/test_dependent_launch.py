"""Where kernels may overlap, and that an overlapped pair gives what it gives apart."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from fat5.ops import dependent_launch as module
from fat5.ops.dependent_launch import dependent_launch, follower_options
from tests.ops.kernel_checks import CUDA, needs_gpu

HOPPER, AMPERE = (9, 0), (8, 9)


@pytest.fixture
def card(monkeypatch):
    """Pretend that there is a card of a capability, and that kernels are compiled."""

    def pretend(capability):
        monkeypatch.setattr(module.triton.knobs.runtime, "interpret", False)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda", 0)

    return pretend


@pytest.mark.parametrize(
    ("capability", "expected"), [(AMPERE, False), (HOPPER, True), ((10, 0), True), ((12, 0), True)]
)
def test_needs_hopper(card, capability, expected):
    device = card(capability)
    assert dependent_launch(device) is expected
    assert follower_options(device) == ({"launch_pdl": True} if expected else {})


def test_needs_a_cuda_tensor(card):
    card(HOPPER)
    assert not dependent_launch(torch.device("cpu"))
    assert follower_options(torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (module.triton.knobs.runtime, "interpret", True),
        (torch.version, "hip", "6.4"),
        (module, "_triton_has_it", lambda: False),
    ],
    ids=["interpreted", "rocm", "older triton"],
)
def test_off_where_it_does_not_exist(card, monkeypatch, owner, name, value):
    device = card(HOPPER)
    monkeypatch.setattr(owner, name, value)
    assert not dependent_launch(device)


def test_a_triton_without_the_calls_is_noticed():
    """Importing works without them, and nothing overlaps."""
    code = """
import sys, types
import triton.language.extra.cuda as cuda
sys.modules["triton.language.extra.cuda"] = types.ModuleType("triton.language.extra.cuda")
from fat5.ops import dependent_launch as module
assert module.gdc_wait is None and not module._triton_has_it()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_supported_triton_has_it():
    assert module._triton_has_it()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() < HOPPER, reason="needs Hopper or later")
def test_this_card_has_it():
    assert dependent_launch(torch.device("cuda", 0))
