"""The fused form of AdamWScale on a GPU: bf16 at real sizes, no waiting host, CUDA graphs, streams."""

from __future__ import annotations

import copy

import pytest
import torch

from fat5.optim import AdamWScale, fused_update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPES = ((2048, 512), (16_384,), (16_385,), (77,), (), (0, 3), (3, 5, 7), (1_000, 333))


def parameters_of(dtype: torch.dtype = torch.bfloat16, shapes=SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to("cuda", dtype)) for s in shapes]


def give_gradients(parameters, seed: int) -> None:
    """New values, in the memory that is there."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        parameter.grad = grad if parameter.grad is None else parameter.grad.copy_(grad)


def known(parameter, optimizer) -> torch.Tensor:
    compensation = optimizer.state[parameter].get("compensation", torch.zeros((), device="cuda"))
    return parameter.detach().double() + compensation.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kahan", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_equals_foreach(dtype, kahan, aligned, monkeypatch):
    """The kernels are what None takes here, also for gradients that start anywhere."""
    results = []
    for form in ({"foreach": True}, {}):
        if not form:
            monkeypatch.setattr("fat5.optim.adamw_scale.update_many", lambda *_: pytest.fail("not the kernels"))
        parameters = parameters_of(dtype)
        optimizer = AdamWScale(parameters, lr=0.01, weight_decay=0.1, kahan=kahan, **form)
        for seed in range(5):
            give_gradients(parameters, seed)
            if not aligned:
                for parameter in parameters:
                    flat = torch.empty(parameter.numel() + 1, dtype=dtype, device="cuda")
                    parameter.grad = flat[1:].view(parameter.shape).copy_(parameter.grad)
            norm = optimizer.clip_grad_norm(20.0)
            optimizer.step()
        assert norm > 1000
        results.append((parameters, optimizer))
    (theirs, foreach), (ours, fused) = results
    eps = torch.finfo(dtype).eps
    # A parameter near zero may have come from as far as 5 steps of 0.01, where a rounding that falls the other way
    # weighs eps of where it was. Likewise a first moment near zero is a sum of terms of up to (1 - 0.9^5) of the
    # largest gradient, 5 times clipping's 20 / norm, each off by a few eps: the sums of the norm have another order.
    travel, largest = 0.05, (1 - 0.9**5) * 5 * 20.0 / float(norm)
    for one, other in zip(ours, theirs, strict=True):
        exact = kahan or dtype == torch.float32
        rtol, atol = (1e-6, 0.05 * eps + 1e-7) if exact else (2 * eps, travel * eps)
        torch.testing.assert_close(known(one, fused), known(other, foreach), rtol=rtol, atol=atol)
        for name, rtol, atol in (("exp_avg", 4 * eps, 4 * eps * largest), ("exp_avg_sq", 4e-6, 1e-8), ("step", 0, 0)):
            x, y = (o.state[p][name].double() for o, p in ((fused, one), (foreach, other)))
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_numbers_reach_the_device_whole():
    numbers = [torch.ones(3, device="cuda").data_ptr(), 2**53 + 1, 2**62 + 1, 0, 1] * 100
    assert fused_update._filled(numbers, torch.device("cuda")).tolist() == numbers


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01), "on the GPU"])
def test_host_never_waits(lr):
    lr = torch.tensor(0.01, device="cuda") if isinstance(lr, str) else lr
    parameters = parameters_of()
    optimizer = AdamWScale(parameters, lr=lr, weight_decay=0.1, fused=True)
    give_gradients(parameters, 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = parameter.grad.clone()  # new addresses: new tables
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_takes_no_memory_to_speak_of():
    parameters = parameters_of(shapes=[(4096, 4096)])
    optimizer = AdamWScale(parameters, fused=True)
    give_gradients(parameters, 0)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 0.01 * parameters[0].numel()


def test_two_runs_are_bit_equal():
    results = []
    for _ in range(2):
        parameters = parameters_of()
        optimizer = AdamWScale(parameters, lr=0.05, fused=True)
        for seed in range(3):
            give_gradients(parameters, seed)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        results.append([*parameters, *(value for p in parameters for value in optimizer.state[p].values())])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def train(optimizer, layer, inputs) -> None:
    layer(inputs).square().mean().backward()
    optimizer.clip_grad_norm(0.1)
    optimizer.step()


def test_a_captured_step_with_gradients_of_its_own_follows_the_learning_rate():
    """Backward, clipping and step as one graph, whose gradients are made in the capture."""
    lr = torch.tensor(0.02, device="cuda")
    layer = torch.nn.Linear(300, 77, device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    captured, eager = (AdamWScale(x.parameters(), lr=lr, weight_decay=0.1) for x in (layer, twin))
    inputs = torch.randn(64, 300, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(captured, layer, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    train(eager, twin, inputs)
    captured.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(captured, layer, inputs)
    schedule = torch.optim.lr_scheduler.LambdaLR(captured, lambda step: 1.0 / (1 + step))
    for _ in range(5):
        schedule.step()  # writes into the tensor that both read
        inputs.normal_()
        graph.replay()
        eager.zero_grad()
        train(eager, twin, inputs)
    assert float(lr) == pytest.approx(0.02 / 6)
    assert captured.state[layer.weight]["step"] == 6
    for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(known(ours, captured), known(theirs, eager), rtol=1e-6, atol=1e-6)


def test_the_tables_of_a_graph_outlive_other_steps():
    parameters = parameters_of(shapes=[(100, 100), (50,)])
    twins = copy.deepcopy(parameters)
    captured, eager = AdamWScale(parameters, lr=0.01), AdamWScale(twins, lr=0.01)
    for optimizer, own in ((captured, parameters), (eager, twins)):
        give_gradients(own, 0)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    static = [p.grad for p in parameters]
    for seed in range(1, 4):
        for optimizer, own in ((captured, parameters), (eager, twins)):
            for parameter in own:
                parameter.grad = None
            give_gradients(own[:1], seed)
            optimizer.step()  # other addresses, other tensors
        junk = [torch.full((100,), -1, dtype=torch.int64, device="cuda") for _ in range(20)]  # over freed tables
        for gradient, parameter, twin in zip(static, parameters, twins, strict=True):
            parameter.grad = gradient
            twin.grad = gradient.clone()
        graph.replay()
        eager.step()
        del junk
    for ours, theirs in zip(parameters, twins, strict=True):
        torch.testing.assert_close(known(ours, captured), known(theirs, eager), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_first_step_in_a_capture_is_refused(form):
    parameters = parameters_of(shapes=[(5,)])
    optimizer = AdamWScale(parameters, **form)
    give_gradients(parameters, 0)
    with (
        pytest.raises(RuntimeError, match="at least one step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    torch.cuda.synchronize()


def test_steps_on_several_streams_follow_each_other():
    parameters = parameters_of(shapes=[(700, 300), (50,)])
    twins = copy.deepcopy(parameters)
    ours, theirs = AdamWScale(parameters, lr=0.01, fused=True), AdamWScale(twins, lr=0.01, foreach=True)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2))]
    for seed in range(6):
        give_gradients(twins, seed)
        theirs.step()
        stream = streams[seed % 3]
        stream.wait_stream(streams[(seed - 1) % 3])
        with torch.cuda.stream(stream):
            give_gradients(parameters, seed)
            ours.step()
    torch.cuda.synchronize()
    for one, other in zip(parameters, twins, strict=True):
        torch.testing.assert_close(known(one, ours), known(other, theirs), rtol=1e-6, atol=5e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_on_two_gpus_share_norm_and_scale():
    first, second = (torch.nn.Parameter(torch.ones(3, device=f"cuda:{i}")) for i in range(2))
    first.grad, second.grad = torch.full_like(first, 2.0), torch.full_like(second, 4.0)
    optimizer = AdamWScale([first, second], fused=True)
    assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(60**0.5)
    optimizer.step()
    for parameter, gradient in ((first, 2.0), (second, 4.0)):
        torch.testing.assert_close(
            optimizer.state[parameter]["exp_avg"], torch.full_like(parameter, 0.1 * gradient / 60**0.5)
        )
