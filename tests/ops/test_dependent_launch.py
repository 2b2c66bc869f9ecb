"""Where kernels may overlap, and that an overlapped pair gives what it gives apart."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types

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
        monkeypatch.setattr(module, "capability", lambda device: capability)
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


def test_a_triton_without_the_calls_is_noticed(monkeypatch):
    """Importing works without them, and nothing overlaps."""
    monkeypatch.setitem(sys.modules, "triton.language.extra.cuda", types.ModuleType("triton.language.extra.cuda"))
    spec = importlib.util.spec_from_file_location("another_copy", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.gdc_wait is None
    assert not copy._triton_has_it()


def test_the_supported_triton_has_it():
    assert module._triton_has_it()


def test_a_follower_waits_before_it_reads_or_writes():
    """The assembly of the sum over the norm's programs, and of the kernel before it."""
    code = """
import re
from tests.ops.compilation import assemble
from tests.ops.compile_cases.norm import cases
found = {case.kernel: assemble(case.source(), 90, case.options).ptx for case in cases(False) if case.architecture == 90}
follower, leader = (re.findall(r"griddepcontrol.\\w+|(?:ld|st).global", found[name])
                    for name in ("rms_norm sum", "rms_norm backward"))
assert follower[0] == "griddepcontrol.wait" and "st.global" in follower, follower
assert "griddepcontrol.launch_dependents" in leader[:-1] and leader[0] == "ld.global", leader
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() < HOPPER, reason="needs Hopper or later")
def test_this_card_has_it():
    assert dependent_launch(torch.device("cuda", 0))
