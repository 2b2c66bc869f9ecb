"""AdamWScale.clip_grad_norm: the norm, and a step that counts the gradients scaled."""

from __future__ import annotations

import math

import pytest
import torch

from fat5.optim import AdamWScale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


def parameters_of(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 9), (), (70,)]
    parameters = [torch.nn.Parameter(torch.randn(s, generator=generator).to(DEVICE, dtype)) for s in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE, dtype)
    return parameters


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("max_norm", [0.5, 1e3, math.inf])
def test_the_step_is_that_of_clipped_gradients_and_the_gradients_stay(form, dtype, max_norm):
    parameters, twins = parameters_of(dtype), [torch.nn.Parameter(p.detach().double()) for p in parameters_of(dtype)]
    for parameter, twin in zip(parameters, twins, strict=True):
        twin.grad = parameter.grad.double()
    gradients = [p.grad.clone() for p in parameters]
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    optimizer, exact = AdamWScale(parameters, lr=0.05, **form), AdamWScale(twins, lr=0.05)
    norm = optimizer.clip_grad_norm(max_norm)
    optimizer.step()
    exact.step()
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    torch.testing.assert_close(norm.item(), expected.item(), rtol=1e-6, atol=0)
    for parameter, twin, gradient in zip(parameters, twins, gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
        first, exact_first = optimizer.state[parameter]["exp_avg"], exact.state[twin]["exp_avg"]
        torch.testing.assert_close(first.double(), exact_first, rtol=torch.finfo(dtype).eps, atol=1e-7)
        torch.testing.assert_close(parameter.double(), twin, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_scale_is_for_one_step_and_the_gradients_it_was_made_of(form):
    parameters = parameters_of()
    optimizer = AdamWScale(parameters, **form)
    moments = []
    for clip, drop in ((True, False), (False, False), (True, True)):
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
        if clip:
            optimizer.clip_grad_norm(0.5)
        if drop:
            kept = [p.grad for p in parameters]
            optimizer.zero_grad()
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
        optimizer.step()
        moments.append(optimizer.state[parameters[0]]["exp_avg"].norm().item())
    assert moments[0] < 0.2 * moments[1]
    assert moments[2] == pytest.approx(moments[1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_does_what_it_does_in_pytorch(form, value):
    parameters, twins = parameters_of(), parameters_of()
    parameters[2].grad[3] = twins[2].grad[3] = value
    optimizer, plain = AdamWScale(parameters, **form), AdamWScale(twins)
    norm = optimizer.clip_grad_norm(1.0)
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    optimizer.step()
    plain.step()
    assert not norm.isfinite()
    for parameter, twin in zip(parameters, twins, strict=True):
        torch.testing.assert_close(parameter, twin, equal_nan=True)
    assert parameters[2].isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_groups_and_types_count_together_and_those_without_gradient_not(form):
    low = torch.nn.Parameter(torch.ones(3, dtype=torch.float16, device=DEVICE))
    high, idle = (torch.nn.Parameter(torch.ones(2, device=DEVICE)) for _ in range(2))
    low.grad, high.grad = torch.full_like(low, 2.0), torch.full_like(high, 3.0)
    optimizer = AdamWScale([{"params": [low, idle]}, {"params": [high], "weight_decay": 0.1}], **form)
    assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(math.sqrt(3 * 4 + 2 * 9))
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm(1.0) == 0.0


def test_forms_of_different_groups_count_together():
    first, second = (torch.nn.Parameter(torch.ones(2, device=DEVICE)) for _ in range(2))
    first.grad, second.grad = torch.full_like(first, 2.0), torch.full_like(second, 4.0)
    optimizer = AdamWScale([{"params": [first], "fused": True}, {"params": [second], "foreach": True}])
    assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(math.sqrt(2 * 4 + 2 * 16))
    optimizer.step()
    for parameter, gradient in ((first, 2.0), (second, 4.0)):
        expected = torch.full((2,), 0.1 * gradient / math.sqrt(40), device=DEVICE)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_norm_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(ValueError, match=f"expected max_norm > 0, got {max_norm}"):
        AdamWScale(parameters_of()).clip_grad_norm(max_norm)
