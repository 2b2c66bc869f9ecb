"""The fused form looks at every tensor anew only where one lies elsewhere than at the step before."""

from __future__ import annotations

import weakref

import pytest
import torch

from fat5.optim import AdamWScale
from fat5.optim.fused_update import FusedUpdate
from tests.optim.small_tensors import assert_close, give_gradients, known, parameters_of

SHAPES = [(40,), (3, 3), (7, 5)]

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def looks(monkeypatch):
    """Count how often the tensors are sorted into launches."""
    made: list[int] = []
    original = FusedUpdate.plan
    monkeypatch.setattr(FusedUpdate, "plan", lambda self, work: made.append(len(work)) or original(self, work))
    return made


def groups_of(parameters) -> list[dict]:
    return [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]


def refill(parameters, seed: int) -> None:
    """New gradients in the memory of the old."""
    old = [parameter.grad for parameter in parameters]
    give_gradients(parameters, seed)
    if old[0] is not None:
        for parameter, grad in zip(parameters, old, strict=True):
            parameter.grad = grad.copy_(parameter.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_settings_count_where_the_tensors_stay(looks, dtype):
    results = []
    for form in ({"foreach": True}, {"fused": True}):
        parameters = parameters_of(dtype, SHAPES)
        optimizer = AdamWScale(groups_of(parameters), lr=0.01, **form)
        for seed in range(5):
            refill(parameters, seed)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.1
            optimizer.clip_grad_norm(1.0 + seed)
            optimizer.step()
        results.append(known(parameters, optimizer))
    assert looks == [2]
    assert_close(*results, dtype)


def change_betas(optimizer, parameters):
    optimizer.param_groups[1]["betas"] = (0.5, 0.9)


def drop_compensation(optimizer, parameters):
    optimizer.param_groups[0]["kahan"] = False


def move_state(optimizer, parameters):
    state = optimizer.state[parameters[1]]
    state["exp_avg_sq"] = state["exp_avg_sq"].clone()


def move_parameter(optimizer, parameters):
    parameters[2].data = parameters[2].data.clone()


def freeze(optimizer, parameters):
    parameters[0].grad = None


def add(optimizer, parameters):
    parameters += parameters_of(parameters[0].dtype, [(11,)])
    give_gradients(parameters[-1:], 9)
    optimizer.add_param_group({"params": parameters[-1:]})


def load(optimizer, parameters):
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("change", [change_betas, drop_compensation, move_state, move_parameter, freeze, add, load])
def test_any_other_change_is_noticed(looks, change):
    results = []
    for form in ({"foreach": True}, {"fused": True}):
        parameters = parameters_of(torch.float16, SHAPES)
        optimizer = AdamWScale(groups_of(parameters), lr=0.01, **form)
        for seed in range(2):
            refill(parameters, seed)
            optimizer.step()
        optimizer.clip_grad_norm(1.0)
        change(optimizer, parameters)  # between clipping and step, where the last look is freshest
        optimizer.step()
        optimizer.step()
        results.append(known(parameters, optimizer))
    assert len(looks) == 2
    assert_close(*results, torch.float16)


def test_a_dropped_gradient_gives_its_memory_back():
    parameters = parameters_of(torch.float32, SHAPES)
    optimizer = AdamWScale(parameters, fused=True)
    give_gradients(parameters, 0)
    gone = [weakref.ref(parameter.grad) for parameter in parameters]
    optimizer.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert all(reference() is None for reference in gone)


def test_strided_gradients_are_looked_at_each_time(looks):
    """What the kernels read is a copy, which is gone after the step."""
    (parameter,) = parameters_of(torch.float32, [(6, 4)])
    (twin,) = parameters_of(torch.float32, [(6, 4)])
    ours, theirs = AdamWScale([parameter], fused=True), AdamWScale([twin], foreach=True)
    for seed in range(3):
        for x in (parameter, twin):
            give_gradients([x], seed)
            x.grad = x.grad.t().contiguous().t()
        for optimizer in (ours, theirs):
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
    assert looks == [1] * 6
    assert_close(known([parameter], ours), known([twin], theirs), torch.float32)
