"""The fused form of AdamWScale against the others, through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from fat5.optim import AdamWScale, fused_update
from tests.optim.small_tensors import DEVICE, assert_close, everything, give_gradients, known, parameters_of

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.5])
def test_equals_foreach(dtype, kahan, max_norm):
    results = []
    for form in ({"fused": True}, {"foreach": True}):
        parameters = parameters_of(dtype)
        groups = [{"params": parameters[:5], "weight_decay": 0.1}, {"params": parameters[5:], "lr": 0.03}]
        optimizer = AdamWScale(groups, lr=0.02, kahan=kahan, **form)
        for seed in range(3):
            give_gradients(parameters, seed)
            if max_norm is not None:
                norm = optimizer.clip_grad_norm(max_norm)
                assert norm > 4 * max_norm
            optimizer.step()
        results.append(known(parameters, optimizer))
        assert not torch.equal(parameters[0], parameters_of(dtype)[0])
    assert_close(*results, dtype, kahan)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95), (0.9, 0.0)])
@pytest.mark.parametrize("size", [1.0, 1e-5, 0.0])
def test_equals_the_exact_step(betas, size):
    """Against float64, with zeros and other tensors below the least scale; the 0-d tensor has steps of its own."""
    single, exact = parameters_of(torch.float32, size=size), parameters_of(torch.float32, size=size)
    exact = [torch.nn.Parameter(p.detach().double()) for p in exact]
    optimizers = [AdamWScale(p, 0.02, betas, 1e-5, 0.3, **f) for p, f in ((single, {"fused": True}), (exact, {}))]
    for seed in range(3):
        give_gradients(single, seed)
        for parameter, twin in zip(single, exact, strict=True):
            twin.grad = parameter.grad.double()
        if seed == 1:
            single[1].grad = exact[1].grad = None
        for optimizer in optimizers:
            optimizer.step()
    for parameter, twin in zip(single, exact, strict=True):
        torch.testing.assert_close(parameter.double(), twin, rtol=2e-6, atol=1e-7 * max(size, 1e-3))
        assert parameter.numel() == 0 or parameter.any()
    assert optimizers[0].state[single[1]]["step"] == 2


def test_gradients_may_move_change_their_strides_and_stay_away():
    """Tables hold addresses: every kind of new gradient must be seen."""
    results = []
    for form in ({"fused": True}, {"foreach": False}):
        parameters = parameters_of(torch.float32, [(3, 30), (70,), (5, 3), (7,)])
        optimizer = AdamWScale(parameters, lr=0.05, **form)
        kept = []
        for seed in range(6):
            give_gradients(parameters, seed)
            if seed % 3 == 1:
                parameters[0].grad = parameters[0].grad.t().contiguous().t()
                flat = torch.zeros(71, device=DEVICE)  # as in a bucket of DistributedDataParallel
                parameters[1].grad = flat[1:].copy_(parameters[1].grad)
            if seed == 2:
                parameters[2].grad = None
            parameters[3].requires_grad_(seed != 4)
            if seed == 4:
                parameters[3].grad = None
            kept.append([p.grad for p in parameters])  # so that addresses are new
            optimizer.step()
        results.append(known(parameters, optimizer))
        assert [int(optimizer.state[p]["step"]) for p in parameters] == [6, 6, 5, 5]
    assert_close(*results, torch.float32)


def test_tables_are_made_again_only_where_addresses_change(monkeypatch):
    sizes = []
    filled = fused_update._filled
    monkeypatch.setattr(fused_update, "_filled", lambda numbers, device: sizes.append(1) or filled(numbers, device))
    parameters = parameters_of(torch.float32, [(40,), (3, 3)])
    optimizer = AdamWScale(parameters, fused=True)
    for seed, made in ((0, 2), (1, 2), (2, 3)):
        old = [p.grad for p in parameters]
        if seed == 1:
            for gradient in old:
                gradient.mul_(-1.0)
        else:
            give_gradients(parameters, seed)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert len(sizes) == made


def test_a_step_is_a_handful_of_launches(monkeypatch):
    launched = []

    class Counted:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(fused_update.kernels, name)

        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(self.name) or self.kernel[grid](*args, **options)

    for name in ("square_sums_kernel", "clip_kernel", "scalars_kernel", "update_kernel"):
        monkeypatch.setattr(fused_update.kernels, name, Counted(name))
    parameters = parameters_of(torch.float32, [(5,)] * 20)
    groups = [{"params": parameters[:9], "weight_decay": 0.1}, {"params": parameters[9:]}]
    optimizer = AdamWScale(groups, fused=True)
    give_gradients(parameters, 0)
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    clip, step = ["square_sums_kernel", "clip_kernel"], ["square_sums_kernel", *["scalars_kernel"] * 2, "update_kernel"]
    assert launched == clip + step


def test_two_runs_are_bit_equal():
    results = []
    for _ in range(2):
        parameters = parameters_of(torch.float32, [(7, 31), (70,)])
        optimizer = AdamWScale(parameters, lr=0.05, fused=True)
        for seed in range(3):
            give_gradients(parameters, seed)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        results.append(everything(parameters, optimizer))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("lr", [0.04, torch.tensor(0.04), torch.tensor(0.04, dtype=torch.float64)])
def test_schedules_set_the_learning_rate(lr):
    """In the group, or in the tensor that is there; the optimizer only reads it."""
    results = []
    for form in ({"fused": True}, {"foreach": True}):
        parameters = parameters_of(torch.float32, [(50,)])
        optimizer = AdamWScale(parameters, copy.deepcopy(lr), weight_decay=0.1, **form)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        for seed in range(3):
            assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.04 / (1 + seed))
            give_gradients(parameters, seed)
            optimizer.step()
            schedule.step()
        results.append(known(parameters, optimizer))
    assert_close(*results, torch.float32)


def test_bias_correction_keeps_its_digits():
    """After one step of a beta near 1, and after so many that nothing is left of it."""
    for steps, beta in ((1, 0.9999), (400, 0.999), (700, 0.999), (100_000, 0.9)):
        parameter = torch.nn.Parameter(torch.ones(1, device=DEVICE))
        optimizer = AdamWScale([parameter], lr=0.1, betas=(0.0, beta), eps=1e-30, fused=True)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.state[parameter]["step"].fill_(steps - 1)
        optimizer.state[parameter]["exp_avg_sq"].fill_(0.0)
        before = parameter.detach().clone()
        parameter.grad.fill_(1.0)
        optimizer.step()
        step = 0.1 / math.sqrt((1 - beta) / -math.expm1(steps * math.log(beta)))
        torch.testing.assert_close((before - parameter).item(), step, rtol=1e-5, atol=1e-6)
