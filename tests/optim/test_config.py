"""The settings of optimizer and schedule, and what they build."""

from __future__ import annotations

import dataclasses

import jsonargparse
import pytest
import torch

from fat5.errors import ConfigError
from fat5.optim import AdamWScale, OptimizerConfig, ScheduleConfig, build_optimizer, build_schedule


def model() -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


def test_builds_adamw_scale_with_its_settings():
    config = OptimizerConfig(lr=0.02, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1, kahan=False, foreach=True)
    optimizer = build_optimizer(model(), config)
    assert isinstance(optimizer, AdamWScale)
    decayed, kept = optimizer.param_groups
    for group, decay in ((decayed, 0.1), (kept, 0.0)):
        settings = {key: value for key, value in group.items() if key != "params"}
        assert settings == {
            "lr": 0.02,
            "betas": (0.8, 0.95),
            "eps": 1e-7,
            "weight_decay": decay,
            "kahan": False,
            "foreach": True,
            "fused": None,
        }


def test_defaults_follow_the_optimizer():
    scaled = build_optimizer(model(), OptimizerConfig())
    assert (scaled.defaults["lr"], scaled.defaults["kahan"], scaled.defaults["foreach"]) == (5e-3, True, None)
    plain = build_optimizer(model(), OptimizerConfig(name="adamw"))
    assert type(plain) is torch.optim.AdamW
    assert (plain.defaults["lr"], plain.defaults["fused"], plain.defaults["foreach"]) == (1e-3, True, None)
    assert build_optimizer(model(), OptimizerConfig(name="adamw", foreach=True)).defaults["foreach"] is True


def test_fused_kernels_are_refused_where_they_cannot_run(monkeypatch):
    config = OptimizerConfig(fused=True)
    with pytest.raises(ConfigError, match=r"optimizer.fused is true, which does not work here: .*torch.float64"):
        build_optimizer(model().double(), config)
    monkeypatch.setattr("fat5.optim.config.unavailable", lambda: "there is no CUDA GPU")
    with pytest.raises(ConfigError, match=r"there is no CUDA GPU; leave it out"):
        build_optimizer(model(), config)


@pytest.mark.parametrize("name", ["adamw_scale", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_form_is_passed_on(name, fused):
    assert build_optimizer(model(), OptimizerConfig(name=name, fused=fused)).defaults["fused"] is fused


@pytest.mark.parametrize("name", ["adamw_scale", "adamw"])
def test_each_optimizer_learns(name):
    layer = model()
    optimizer = build_optimizer(layer, OptimizerConfig(name=name, lr=0.05))
    inputs = torch.randn(64, 4)
    targets = inputs @ torch.randn(4, 3)
    losses = []
    for _ in range(150):
        loss = (layer(inputs) - targets).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("config", "total", "zeros", "peak", "end"),
    [
        (ScheduleConfig(), 100, [0], [5], 100),
        (ScheduleConfig(warmup_steps=0), 100, [], [0], 100),
        (ScheduleConfig(warmup_ratio=0.2), 50, [0], [10], 50),
        (ScheduleConfig("wsd", warmup_ratio=0.5, decay_ratio=0.5), 7, [0], [3, 4], 7),
        (ScheduleConfig("wsd", warmup_steps=2, decay_steps=4), 10, [0], [2, 3, 4, 5, 6], 10),
    ],
)
def test_builds_the_schedule_in_steps_or_shares_of_the_run(config, total, zeros, peak, end):
    optimizer = build_optimizer(model(), OptimizerConfig(lr=1.0))
    schedule = build_schedule(optimizer, config, total)
    values = []
    for _ in range(total + 1):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [step for step, value in enumerate(values[:end]) if value == 0] == zeros
    assert [step for step, value in enumerate(values) if value == 1] == peak
    assert values[end] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamwscale"}, "adamw_scale, adamw, got 'adamwscale'; did you mean 'adamw_scale'"),
        ({"lr": -1.0}, "lr >= 0, got -1.0"),
        ({"betas": (0.9, 2.0)}, "betas"),
        ({"eps": 0.0}, "eps > 0"),
        ({"weight_decay": -1.0}, "weight_decay >= 0"),
        ({"name": "adamw", "kahan": True}, "kahan is for adamw_scale"),
        ({"fused": True, "foreach": True}, "optimizer: expected at most one of foreach and fused to be true, got both"),
    ],
)
def test_bad_optimizer_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "wds"}, "got 'wds'; did you mean 'wsd'"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_steps or warmup_ratio, got both"),
        ({"warmup_steps": -5}, "warmup_steps: expected 0 or more, got -5"),
        ({"warmup_ratio": 1.1}, r"warmup_ratio: expected a share in \[0, 1\], got 1.1"),
        ({"decay_ratio": 0.1}, "decay steps and shape are for wsd"),
        ({"name": "wsd", "min_lr_ratio": -0.1}, "min_lr_ratio"),
    ],
)
def test_bad_schedule_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(**settings)


def test_a_schedule_longer_than_the_run_is_an_error():
    optimizer = build_optimizer(model(), OptimizerConfig())
    with pytest.raises(ConfigError, match=r"num_warmup_steps in \[0, 10\].* got 20"):
        build_schedule(optimizer, ScheduleConfig(warmup_steps=20), 10)


@pytest.mark.parametrize("config", [OptimizerConfig, ScheduleConfig])
def test_every_field_is_explained_on_the_command_line(config):
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(config, "part")
    shown = parser.format_help().split("options:", 1)[1]
    for field in dataclasses.fields(config):
        lines = shown.split(f"--part.{field.name} ", 1)[1].split("--part.", 1)[0]
        assert len(lines.replace("\n", " ").split("(type:")[0].split()) > 4, lines
