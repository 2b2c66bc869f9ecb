"""The fused form of AdamWScale against the others, through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch

from fat5.optim import AdamWScale, fused_update
from fat5.optim.fused_update import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Numbers of elements around the edges of a block of 64 and a chunk of 128, and several chunks.
SHAPES = ((5, 7), (), (0, 4), (64,), (128,), (3, 43), (0,), (1,))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fused_update, "LAUNCH", Launch(block=64, blocks_a_chunk=2, warps=2))


def parameters_of(dtype: torch.dtype, shapes=SHAPES, size: float = 1.0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter((size * torch.randn(s, generator=generator)).to(DEVICE, dtype)) for s in shapes]


def give_gradients(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE, parameter.dtype)


def everything(parameters, optimizer) -> list[torch.Tensor]:
    return [*parameters, *(value for p in parameters for value in optimizer.state[p].values())]


def known(parameters, optimizer) -> list[dict[str, torch.Tensor]]:
    """State and values, the compensation added: by itself it says nothing where a value is between two numbers."""
    found = []
    for parameter in parameters:
        state = dict(optimizer.state[parameter])
        compensation = state.pop("compensation", None)
        value = parameter.detach().double() if compensation is None else parameter.detach().double() + compensation
        found.append(state | {"value": value})
    return found


def assert_close(got, expected, dtype, kahan: bool = True) -> None:
    """Equal within the rounding of a few steps: of a few moments in `dtype`, times the learning rate, and of values."""
    eps = torch.finfo(dtype).eps
    for x, y in zip(got, expected, strict=True):
        assert x.keys() == y.keys()
        for name, value in x.items():
            assert value.dtype == y[name].dtype
            low = name == "exp_avg" or (name == "value" and not kahan)
            rtol = eps if low else 5e-7
            atol = max(0.1 * eps, 1e-7)
            torch.testing.assert_close(value, y[name], rtol=2 * rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


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
