"""Launches on a second stream wait for what came before them, and what comes after waits for them."""

import pytest
import torch

pytest.importorskip("triton")

from fat5.ops.attention import side_stream
from fat5.ops.attention.side_stream import SideStream
from tests.ops.kernel_checks import needs_gpu

gpu = pytest.mark.gpu
_CYCLES = 50_000_000  # long enough that an order which nothing enforces would show


def test_without_a_gpu_there_is_one_stream():
    with SideStream(torch.device("cpu")) as side, side.launches(torch.zeros(1), None):
        x = torch.ones(2) + 1
    assert x.sum() == 4


@gpu
@needs_gpu
def test_both_ends_wait():
    device = torch.device("cuda", torch.cuda.current_device())
    x, y, z = (torch.zeros(1024, device=device) for _ in range(3))
    current = torch.cuda.current_stream()
    torch.cuda._sleep(_CYCLES)
    x.fill_(1)
    with SideStream(device) as side:
        with side.launches(x):
            assert torch.cuda.current_stream() != current
            torch.cuda._sleep(_CYCLES)
            y.copy_(x)
        assert torch.cuda.current_stream() == current
    z.copy_(y)
    assert z.sum() == 1024


@gpu
@needs_gpu
def test_waits_also_after_an_error():
    device = torch.device("cuda", torch.cuda.current_device())
    x, y = (torch.zeros(1024, device=device) for _ in range(2))

    def fail() -> None:
        with SideStream(device) as side:
            with side.launches():
                torch.cuda._sleep(_CYCLES)
                x.fill_(1)
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    y.copy_(x)
    assert y.sum() == 1024


@gpu
@needs_gpu
def test_a_graph_captures_both_streams():
    device = torch.device("cuda", torch.cuda.current_device())
    x, y, z = (torch.zeros(1024, device=device) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with SideStream(device) as side, side.launches(x):
            torch.add(x, 1, out=y)
        torch.add(y, 1, out=z)
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        assert z.sum() == 1024 * (value + 2)


@gpu
@needs_gpu
def test_kernels_that_are_timed_run_alone(monkeypatch):
    monkeypatch.setenv("FAT5_AUTOTUNE", "1")
    with SideStream(torch.device("cuda")) as side, side.launches():
        assert torch.cuda.current_stream() != side_stream._second_stream(torch.device("cuda"))
