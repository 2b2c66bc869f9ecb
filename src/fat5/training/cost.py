"""What a planned run will take, from a measured rate: hours, energy, CO2 and cost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fat5.errors import ConfigError


@dataclass(frozen=True)
class CostConfig:
    """A planned run.

    Attributes:
        tokens: Tokens to train on, of both sides, without padding; 419.4e9 is understood.
        rate: Measured tokens per second of one device; tokens_per_second in the log of a run on one device.
        devices: Devices, taken to share the work without loss.
        watts: Mean power of one device, in watts; null leaves energy and CO2 out.
        carbon_intensity: CO2 equivalent of the electricity, in kg per kWh.
        prices: JSON object of names and prices of one device for an hour, such as '{"rented": 2.5}'.
        accounts: An accounts.json of an earlier run, which gives rate, watts and carbon_intensity as it measured them;
            those named beside it count instead.
    """

    tokens: float
    rate: float | None = None
    devices: int = 1
    watts: float | None = None
    carbon_intensity: float | None = None
    prices: dict[str, float] | None = None
    accounts: str | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "rate", "devices", "watts", "carbon_intensity"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}, expected more than 0")
        if self.rate is None and self.accounts is None:
            raise ConfigError(
                "expected a rate (tokens per second) or accounts (the accounts.json of an earlier run), got neither"
            )


@dataclass(frozen=True)
class Cost:
    """What a run takes.

    Attributes:
        hours: Hours of the clock.
        device_hours: Hours of all devices together.
        energy_kwh: Energy of the devices, None if their power was not given.
        co2_kg: CO2 equivalent in kg, None if power or carbon intensity was not given.
        prices: Cost by the name of the price.
    """

    hours: float
    device_hours: float
    energy_kwh: float | None
    co2_kg: float | None
    prices: dict[str, float]


def predict_cost(config: CostConfig) -> Cost:
    """Return what a run of `config.tokens` takes.

        hours = tokens / (rate devices 3600)    kWh = watts / 1000 hours devices    kg = kWh carbon_intensity

    Raises:
        ConfigError: The accounts hold no rate.
        FileNotFoundError: There are no such accounts.
    """
    measured = _measured(config.accounts) if config.accounts is not None else {}
    rate = config.rate or measured["rate"]
    watts = config.watts or measured.get("watts")
    intensity = config.carbon_intensity or measured.get("carbon_intensity")
    device_hours = config.tokens / rate / 3600
    energy = None if watts is None else watts / 1000 * device_hours
    return Cost(
        hours=device_hours / config.devices,
        device_hours=device_hours,
        energy_kwh=energy,
        co2_kg=None if energy is None or intensity is None else energy * intensity,
        prices={name: price * device_hours for name, price in (config.prices or {}).items()},
    )


def _measured(path: str) -> dict[str, float]:
    """Return rate, watts and carbon intensity of an accounts.json, as far as it measured them."""
    try:
        accounts: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        found = {"rate": float(accounts["tokens_per_device_second"])}
        if accounts["energy_kwh"]:
            measured = [part for part in accounts["parts"] if part["energy_kwh"] is not None]
            device_hours = sum(part["hours"] * part["devices"] for part in measured)
            found["watts"] = accounts["energy_kwh"] * 1000 / device_hours
            found["carbon_intensity"] = accounts["co2_kg"] / accounts["energy_kwh"]
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} holds no accounts with a rate; expected the accounts.json of a run") from error
    return found


def describe_cost(cost: Cost) -> str:
    """Return a cost as lines for people."""
    lines = [f"hours          {cost.hours:>12,.1f}"]
    if cost.device_hours != cost.hours:
        lines.append(f"device hours   {cost.device_hours:>12,.1f}")
    if cost.energy_kwh is not None:
        lines.append(f"energy         {cost.energy_kwh:>12,.2f} kWh")
    if cost.co2_kg is not None:
        lines.append(f"CO2            {cost.co2_kg:>12,.2f} kg CO2eq")
    return "\n".join([*lines, *(f"{name:<15}{price:>12,.2f}" for name, price in cost.prices.items())])
