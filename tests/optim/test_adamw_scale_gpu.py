"""AdamWScale on a GPU: its forms against the CPU, no waiting host, CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch

from fat5.optim import AdamWScale

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPES = ((512, 100), (77,), (), (0, 3), (3, 5, 7))


def parameters_on(device: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]


def give_gradients(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        parameter.grad = grad if parameter.grad is None else parameter.grad.copy_(grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_equals_the_cpu(dtype, foreach):
    sets = [parameters_on(device, dtype) for device in ("cpu", "cuda")]
    for parameters in sets:
        optimizer = AdamWScale(parameters, lr=0.01, weight_decay=0.1, foreach=foreach)
        for seed in range(5):
            give_gradients(parameters, seed)
            optimizer.step()
    for on_cpu, on_gpu in zip(*sets, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_host_never_waits(lr, foreach):
    parameters = parameters_on("cuda", torch.bfloat16)
    optimizer = AdamWScale(parameters, lr=lr, weight_decay=0.1, foreach=foreach)
    give_gradients(parameters, 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_counts_on_and_follows_the_learning_rate():
    parameters = parameters_on("cuda", torch.bfloat16)
    twins = copy.deepcopy(parameters)
    lr = torch.tensor(0.01, device="cuda")
    captured, eager = AdamWScale(parameters, lr=lr), AdamWScale(twins, lr=lr)
    give_gradients(parameters, 0)
    give_gradients(twins, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for seed in range(1, 5):
        lr.fill_(0.01 * seed)
        give_gradients(parameters, seed)
        give_gradients(twins, seed)
        graph.replay()
        eager.step()
    assert captured.state[parameters[0]]["step"] == 5
    for parameter, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(parameter, twin)
