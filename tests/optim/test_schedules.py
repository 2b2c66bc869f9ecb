"""Learning rate schedules: their curves, resuming, errors."""

from __future__ import annotations

import math

import pytest
import torch

from fat5.optim import AdamWScale, get_schedule

PEAK = 0.2


def optimizer_of(lr: float | torch.Tensor = PEAK) -> AdamWScale:
    return AdamWScale([torch.nn.Parameter(torch.ones(2))], lr=lr)


def curve(name: str, total: int, **settings) -> list[float]:
    """Return the share of the peak at steps 0 to `total`, the last being the one after the run."""
    optimizer = optimizer_of()
    schedule = get_schedule(name, optimizer, num_training_steps=total, **settings)
    values = []
    for _ in range(total + 1):
        values.append(optimizer.param_groups[0]["lr"] / PEAK)
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.parametrize("name", ["cosine", "wsd", "inverse_sqrt", "constant"])
def test_warm_up_is_linear_from_zero_to_the_peak(name):
    values = curve(name, 50, num_warmup_steps=20)
    assert values[:21] == pytest.approx([step / 20 for step in range(21)])


def test_cosine_ends_at_the_floor():
    values = curve("cosine", 40, num_warmup_steps=10, min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * t / 30)) / 2 for t in range(31)]
    assert values[10:] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "formula"),
    [
        (None, lambda t: 1 - math.sqrt(t)),
        ("1-sqrt", lambda t: 1 - math.sqrt(t)),
        ("linear", lambda t: 1 - t),
        ("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
    ],
)
@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_wsd_stays_then_decays_to_the_floor(shape, formula, floor):
    values = curve("wsd", 60, num_warmup_steps=10, num_decay_steps=20, decay_shape=shape, min_lr_ratio=floor)
    assert values[10:41] == pytest.approx([1.0] * 31)
    assert values[40:] == pytest.approx([floor + (1 - floor) * formula(t / 20) for t in range(21)])


def test_wsd_decays_over_a_tenth_of_the_run_by_default():
    values = curve("wsd", 30, num_warmup_steps=2, decay_shape="linear")
    assert values[27:] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert curve("wsd", 10, num_warmup_steps=10)[-1] == 0


def test_inverse_square_root_and_constant():
    assert curve("inverse_sqrt", 100, num_warmup_steps=25)[100] == pytest.approx(0.5)
    assert curve("inverse_sqrt", 100, num_warmup_steps=0)[100] == pytest.approx((10_000 / 10_100) ** 0.5)
    assert curve("constant", 9, num_warmup_steps=3)[3:] == [1.0] * 7


@pytest.mark.parametrize("name", ["cosine", "wsd", "inverse_sqrt", "constant"])
def test_resumes_where_it_was_with_the_optimizer(name):
    whole = curve(name, 30, num_warmup_steps=4)
    optimizer = optimizer_of()
    schedule = get_schedule(name, optimizer, num_warmup_steps=4, num_training_steps=30)
    for _ in range(13):
        optimizer.step()
        schedule.step()
    resumed_optimizer = optimizer_of(1.0)
    resumed = get_schedule(name, resumed_optimizer, num_warmup_steps=4, num_training_steps=30)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    values = []
    for _ in range(13, 31):
        values.append(resumed_optimizer.param_groups[0]["lr"] / PEAK)
        resumed_optimizer.step()
        resumed.step()
    assert values == whole[13:]


def test_a_tensor_learning_rate_is_scheduled_in_place():
    optimizer = optimizer_of(torch.tensor(PEAK))
    schedule = get_schedule("constant", optimizer, num_warmup_steps=4, num_training_steps=10)
    optimizer.step()
    schedule.step()
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    torch.testing.assert_close(lr, torch.tensor(PEAK / 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "cosin"}, "cosine, wsd, inverse_sqrt, constant, got 'cosin'; did you mean 'cosine'"),
        ({"num_training_steps": 0}, "num_training_steps >= 1, got 0"),
        ({"num_warmup_steps": 11}, r"num_warmup_steps in \[0, 10\].* got 11"),
        ({"num_warmup_steps": -1}, "got -1"),
        ({"min_lr_ratio": 1.5}, r"min_lr_ratio in \[0, 1\], got 1.5"),
        ({"name": "constant", "min_lr_ratio": 0.1}, "constant has no floor"),
        ({"name": "inverse_sqrt", "min_lr_ratio": 0.1}, "inverse_sqrt has no floor"),
        ({"num_decay_steps": 3}, "cosine has no decay phase"),
        ({"decay_shape": "linear"}, "cosine has no decay phase"),
        ({"name": "wsd", "decay_shape": "1-sqr"}, "1-sqrt, linear, cosine, got '1-sqr'; did you mean '1-sqrt'"),
        (
            {"name": "wsd", "num_decay_steps": 9},
            r"num_decay_steps in \[0, 8\], the 10 training steps less 2 of warm-up",
        ),
    ],
)
def test_bad_arguments_are_named(changes, message):
    settings = {"name": "cosine", "num_warmup_steps": 2, "num_training_steps": 10, **changes}
    with pytest.raises(ValueError, match=message):
        get_schedule(settings.pop("name"), optimizer_of(), **settings)
