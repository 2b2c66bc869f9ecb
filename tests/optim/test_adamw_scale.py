"""AdamWScale: the formula, what low precision costs, saving and loading, what it leaves alone."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch

from fat5.optim import AdamWScale, torch_updates

SHAPES = ((5, 7), (11,), (), (2, 3, 4), (0, 4))


def reference_steps(parameters, gradients, lr, betas, eps, weight_decay):
    """The formula, a number at a time."""
    parameters = [p.detach().flatten().tolist() for p in parameters]
    first = [[0.0] * len(p) for p in parameters]
    second = [[0.0] * len(p) for p in parameters]
    for t, grads in enumerate(gradients, start=1):
        for p, m, v, g in zip(parameters, first, second, grads, strict=True):
            scale = max(1e-3, math.sqrt(sum(x * x for x in p) / max(1, len(p))))
            for i, gradient in enumerate(g.flatten().tolist()):
                m[i] = betas[0] * m[i] + (1 - betas[0]) * gradient
                v[i] = betas[1] * v[i] + (1 - betas[1]) * gradient**2
                root = math.sqrt(v[i] / (1 - betas[1] ** t))
                p[i] = p[i] * (1 - lr * weight_decay) - lr * scale * (m[i] / (1 - betas[0] ** t)) / (root + eps)
    return parameters


def parameters_of(dtype: torch.dtype, shapes=SHAPES, size: float = 1.0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter((size * torch.randn(s, generator=generator)).to(dtype)) for s in shapes]


def give_gradients(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_equals_the_formula_in_float64(foreach, betas, weight_decay, size):
    parameters = parameters_of(torch.float64, size=size)
    start = copy.deepcopy(parameters)
    optimizer = AdamWScale(parameters, 0.02, betas, 1e-5, weight_decay, foreach=foreach)
    gradients = []
    for seed in range(6):
        give_gradients(parameters, seed)
        gradients.append([p.grad.clone() for p in parameters])
        optimizer.step()
    expected = reference_steps(start, gradients, 0.02, betas, 1e-5, weight_decay)
    for parameter, before, values in zip(parameters, start, expected, strict=True):
        torch.testing.assert_close(parameter.detach().flatten().tolist(), values, rtol=1e-11, atol=0)
        assert parameter.numel() == 0 or not torch.equal(parameter, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_foreach_equals_single_tensor(dtype, kahan, lr, monkeypatch):
    monkeypatch.setattr(torch_updates, "_BUCKET_ELEMENTS", 40)  # several buckets
    results = []
    for foreach in (False, True):
        parameters = parameters_of(dtype)
        optimizer = AdamWScale(parameters, lr, weight_decay=0.1, kahan=kahan, foreach=foreach)
        for seed in range(5):
            give_gradients(parameters, seed)
            optimizer.step()
        results.append([*parameters, *(value for p in parameters for value in optimizer.state[p].values())])
    for single, many in zip(*results, strict=True):
        torch.testing.assert_close(single, many, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
    assert len(results[0]) == len(SHAPES) * (5 if kahan and dtype != torch.float32 else 4)


def train(dtype: torch.dtype, steps: int = 300, **settings) -> float:
    """Return the final loss of a linear regression whose learning rate falls to 0."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 32, generator=generator)
    targets = inputs @ torch.randn(32, 8, generator=generator)
    weight = torch.nn.Parameter((0.5 * torch.randn(32, 8, generator=generator)).to(dtype))
    optimizer = AdamWScale([weight], lr=0.05, **settings)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / steps)
        loss = (inputs @ weight.float() - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # what the run knows of the weight, the compensation included
    known = weight.detach().double() + optimizer.state[weight].get("compensation", torch.zeros(())).double()
    return float((inputs.double() @ known - targets).square().mean())


@pytest.mark.parametrize("foreach", [False, True])
def test_bf16_with_kahan_trains_near_float32_and_beats_bf16_without(foreach):
    single = train(torch.float32, foreach=foreach)
    kahan = train(torch.bfloat16, foreach=foreach)
    plain = train(torch.bfloat16, kahan=False, foreach=foreach)
    assert single < 0.01
    assert kahan == pytest.approx(single, rel=0.1)
    assert plain > 10 * kahan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kahan_adds_up_updates_below_half_a_last_bit(dtype):
    """Each update is a tenth of the spacing between numbers; without compensation the parameter never moves."""
    ulp = torch.finfo(dtype).eps / 2  # the spacing of numbers just below 1
    moved = {}
    for kahan in (True, False):
        parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = AdamWScale([parameter], lr=0.1 * ulp, kahan=kahan)
        for _ in range(50):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[kahan] = 1.0 - parameter.detach().double().mean().item()
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(5 * ulp, rel=0.2)


def test_second_moment_of_a_bf16_parameter_decays():
    """In bf16 the second moment would stay where it is: 0.999 of it rounds back to itself."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamWScale([parameter])
    parameter.grad = torch.full_like(parameter, 8.0)
    optimizer.step()
    first = optimizer.state[parameter]["exp_avg_sq"].clone()
    for _ in range(1000):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], first * 0.999**1000, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("foreach", [False, True])
def test_save_and_load_continues_bit_for_bit_with_the_types_kept(dtype, foreach):
    """Pitfall: loading a checkpoint casts optimizer state to the parameter type."""
    parameters = parameters_of(dtype)
    optimizer = AdamWScale(parameters, lr=0.01, weight_decay=0.1, foreach=foreach)
    for seed in range(4):
        give_gradients(parameters, seed)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    twins = copy.deepcopy(parameters)
    resumed = AdamWScale(twins, lr=1.0, foreach=foreach)
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert resumed.param_groups[0]["lr"] == 0.01
    for seed in range(4, 8):
        for group, owner in ((parameters, optimizer), (twins, resumed)):
            give_gradients(group, seed)
            owner.step()
    low = dtype == torch.bfloat16
    types = {"step": torch.float32, "exp_avg": dtype, "exp_avg_sq": torch.float32} | (
        {"compensation": dtype} if low else {}
    )
    for parameter, twin in zip(parameters, twins, strict=True):
        assert torch.equal(parameter, twin)
        assert {name: value.dtype for name, value in resumed.state[twin].items()} == types
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(value, resumed.state[twin][name])
    assert optimizer.state[parameters[0]]["step"] == 8


def test_loading_respects_hooks_and_does_not_share_memory():
    (parameter,) = parameters_of(torch.bfloat16, [(3,)])
    optimizer = AdamWScale([parameter])
    give_gradients([parameter], 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    def doubled(_, state_dict):
        state_dict["state"] = {0: {**saved["state"][0], "exp_avg_sq": 2 * saved["state"][0]["exp_avg_sq"]}}
        return state_dict

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], 2 * saved["state"][0]["exp_avg_sq"])
    give_gradients([parameter], 1)
    before = saved["state"][0]["exp_avg"].clone()
    optimizer.step()
    assert torch.equal(saved["state"][0]["exp_avg"], before)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert not optimizer._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_learning_rate_and_gradients_are_only_read(foreach, lr):
    """Pitfall: the scaled learning rate is written back into the group."""
    parameters = parameters_of(torch.float32, size=7.0)
    optimizer = AdamWScale(parameters, lr=lr, weight_decay=0.1, foreach=foreach)
    give_gradients(parameters, 0)
    gradients = [p.grad.clone() for p in parameters]
    for _ in range(3):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_parameters_without_gradient_are_skipped_and_mixed_types_share_a_group(foreach):
    idle, low, single = parameters_of(torch.float32, [(3,), (4, 2), (5,)])
    low = torch.nn.Parameter(low.detach().bfloat16())
    before = idle.detach().clone()
    optimizer = AdamWScale([idle, low, single], lr=0.1, foreach=foreach)
    optimizer.step()  # no gradient at all
    give_gradients([low, single], 0)
    start = [p.detach().clone() for p in (low, single)]
    optimizer.step()
    assert torch.equal(idle, before)
    assert idle not in optimizer.state
    assert not any(torch.equal(p, s) for p, s in zip((low, single), start, strict=True))


def test_closure_runs_with_gradients_and_its_loss_comes_back():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamWScale([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert parameter.max() < 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr >= 0, got -1.0"),
        ({"lr": float("nan")}, "lr >= 0, got nan"),
        ({"lr": torch.ones(2)}, r"0-d tensor, got shape \(2,\)"),
        ({"betas": (0.9, 1.0)}, r"two betas in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": 0.0}, "eps > 0, got 0.0"),
        ({"weight_decay": -0.1}, "weight_decay >= 0, got -0.1"),
    ],
)
def test_bad_settings_are_named_in_the_defaults_and_in_a_group(settings, message):
    parameter = torch.nn.Parameter(torch.ones(3))
    for arguments in (([parameter], settings), ([{"params": [parameter], **settings}], {})):
        with pytest.raises(ValueError, match=message):
            AdamWScale(arguments[0], **arguments[1])


def test_complex_parameters_and_sparse_gradients_are_refused():
    with pytest.raises(ValueError, match=r"got torch\.complex64"):
        AdamWScale([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        AdamWScale(embedding.parameters()).step()


def test_shards_are_refused():
    """The RMS of a shard is not that of its tensor, and each rank would scale its part otherwise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match="got a DTensor; expected whole parameters, since the step is scaled by"):
            AdamWScale([torch.nn.Parameter(shard)])
    finally:
        torch.distributed.destroy_process_group()


def test_a_state_of_other_shapes_is_refused():
    """The kernels would read beyond its end."""
    optimizers = [AdamWScale([torch.nn.Parameter(torch.ones(size))]) for size in (3, 4)]
    for optimizer in optimizers:
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with pytest.raises(ValueError, match=r"expected exp_avg of shape \(4,\) for parameter 0, got \(3,\)"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
