"""The fused form of AdamWScale in use: state dicts, copies, torch.compile, and what it refuses."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from fat5.optim import AdamWScale
from tests.optim.small_tensors import DEVICE, assert_close, everything, give_gradients, known, parameters_of

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("first", ["fused", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_dicts_are_interchangeable_and_leave_the_form_alone(first, dtype):
    forms = {"fused": {"fused": True}, "foreach": {"foreach": True}}
    parameters = parameters_of(dtype)
    optimizer = AdamWScale(parameters, lr=0.02, weight_decay=0.1, **forms[first])
    for seed in range(2):
        give_gradients(parameters, seed)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    results = []
    for form in forms.values():
        twins = copy.deepcopy(parameters)
        resumed = AdamWScale(twins, **form)
        resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        settings = {name: value for name, value in resumed.param_groups[0].items() if name in ("foreach", "fused")}
        assert settings == {"foreach": None, "fused": None} | form
        assert resumed.param_groups[0]["lr"] == 0.02
        for seed in range(2, 4):
            give_gradients(twins, seed)
            resumed.step()
        assert resumed.state[twins[0]]["step"] == 4
        results.append(known(twins, resumed))
    assert_close(*results, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_save_and_load_continues_bit_for_bit_with_the_types_kept(dtype):
    """Pitfall: loading a checkpoint casts optimizer state to the parameter type."""
    parameters = parameters_of(dtype, [(5, 7), (130,)])
    optimizer = AdamWScale(parameters, lr=0.01, weight_decay=0.1, fused=True)
    for seed in range(2):
        give_gradients(parameters, seed)
        optimizer.step()
    twins = copy.deepcopy(parameters)
    resumed = AdamWScale(twins, lr=1.0, fused=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, owner in ((parameters, optimizer), (twins, resumed)):
        give_gradients(own, 2)
        owner.step()
    for one, other in zip(everything(parameters, optimizer), everything(twins, resumed), strict=True):
        assert torch.equal(one, other)
    low = {"compensation": torch.float16} if dtype == torch.float16 else {}
    types = {name: value.dtype for name, value in resumed.state[twins[0]].items()}
    assert types == {"step": torch.float32, "exp_avg": dtype, "exp_avg_sq": torch.float32} | low


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_learning_rate_and_gradients_are_only_read(lr):
    """Pitfall: the scaled learning rate is written back into the group."""
    parameters = parameters_of(torch.float32, [(5, 7), (3,)], size=7.0)
    optimizer = AdamWScale(parameters, lr=lr, weight_decay=0.1, fused=True)
    give_gradients(parameters, 0)
    gradients = [p.grad.clone() for p in parameters]
    for _ in range(2):
        optimizer.clip_grad_norm(0.1)
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))


def test_a_copy_of_the_optimizer_has_tables_of_its_own():
    parameters = parameters_of(torch.float32, [(50,)])
    optimizer = AdamWScale(parameters, lr=0.05, fused=True)
    give_gradients(parameters, 0)
    optimizer.step()
    before = parameters[0].detach().clone()
    twin = copy.deepcopy(optimizer)
    (copied,) = twin.param_groups[0]["params"]
    give_gradients([copied], 1)
    twin.step()
    assert torch.equal(parameters[0], before)
    give_gradients(parameters, 1)
    optimizer.step()
    assert torch.equal(parameters[0], copied)
    assert not torch.equal(parameters[0], before)


def test_the_version_of_a_parameter_counts_its_updates():
    """Else a backward pass through a parameter that was changed since would pass without a word."""
    (parameter,) = parameters_of(torch.float32, [(4,)])
    optimizer = AdamWScale([parameter], fused=True)
    loss = parameter.square().sum()
    give_gradients([parameter], 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_step_compiles_once_more_for_its_state_and_then_no_more():
    """The kernels run as they are, outside of the graphs; what None takes under torch.compile is one graph."""
    from torch._dynamo.testing import CompileCounter

    results = []
    for form in ({"fused": True}, {"foreach": True}):
        parameters = parameters_of(torch.float32, [(50,), (7,)])
        optimizer = AdamWScale(parameters, torch.tensor(0.01, device=DEVICE), **form)
        counter = CompileCounter()

        def step(optimizer=optimizer):
            optimizer.clip_grad_norm(1.0)
            optimizer.step()

        compiled = torch.compile(step, backend=counter, fullgraph="foreach" in form)
        frames = []
        for seed in range(4):
            give_gradients(parameters, seed)
            optimizer.param_groups[0]["lr"].fill_(0.01 * (seed + 1))
            compiled()
            frames.append(counter.frame_count)
        assert frames[1:] == [frames[1]] * 3
        results.append(known(parameters, optimizer))
    assert_close(*results, torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3,), torch.float64, "take bfloat16, float16 and float32 parameters, not torch.float64"),
        ((3, 4), torch.float32, r"a parameter of shape \(4, 3\) is not contiguous"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_when_asked_for_and_else_done_otherwise(shape, dtype, message):
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=DEVICE).t())
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=f"got fused=True, which does not work here: .*{message}"):
        AdamWScale([parameter], fused=True).step()
    AdamWScale([parameter], lr=0.1).step()
    assert (parameter < 1).all()


def test_a_tensor_of_another_class_is_refused():
    """Its address says nothing of its values."""

    class Wrapped(torch.nn.Parameter):
        pass

    parameter = Wrapped(torch.ones(3, device=DEVICE))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="take plain tensors, and a parameter is a Wrapped"):
        AdamWScale([parameter], fused=True).step()


def test_a_parameter_that_changed_its_type_is_refused():
    """Its state would be read as another type than it is."""
    (parameter,) = parameters_of(torch.float32, [(4,)])
    optimizer = AdamWScale([parameter], fused=True)
    give_gradients([parameter], 0)
    optimizer.step()
    parameter.data = parameter.data.half()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"is \(4,\) torch.float16 on .* now, but its state \(4,\) torch.float32"):
        optimizer.step()


def test_both_forms_at_once_are_refused():
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="at most one of foreach and fused"):
        AdamWScale([parameter], fused=True, foreach=True)


def test_kernels_that_cannot_run_are_refused_before_the_first_step(monkeypatch):
    monkeypatch.setattr("fat5.optim.adamw_scale.unavailable", lambda: "there is no CUDA GPU")
    with pytest.raises(ValueError, match="got fused=True, which does not work here: there is no CUDA GPU"):
        AdamWScale([torch.nn.Parameter(torch.ones(3))], fused=True)
