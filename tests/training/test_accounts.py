"""The energy meter with codecarbon, where it is installed, and with what stands in for it."""

from __future__ import annotations

import sys
import time

import pytest

from fat5.errors import ConfigError
from fat5.training.accounts import AccountsConfig, EnergyMeter


def test_energy_needs_codecarbon_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    with pytest.raises(ConfigError, match=r"pip install 'fat5\[accounts\]'"):
        EnergyMeter()


def test_meter_grows_inside_its_block_and_keeps_the_total():
    pytest.importorskip("codecarbon")
    with EnergyMeter("FRA") as meter:
        first = meter.read()
        stop = time.monotonic() + 0.5
        while time.monotonic() < stop:
            sum(range(1000))
        second = meter.read()
    assert 0 <= first.kwh < second.kwh <= meter.read().kwh
    # Any machine takes between a watt and some kilowatts; French electricity is between 10 and 100 g a kWh.
    assert 1 / 3.6e6 / 2 < meter.read().kwh < 10_000 / 3.6e6 * 10
    assert 0.01 < meter.read().co2_kg / meter.read().kwh < 0.1


def test_an_unknown_country_is_named_with_the_nearest():
    pytest.importorskip("codecarbon")
    with pytest.raises(ConfigError, match=r"no country 'FRX'.*did you mean"):
        EnergyMeter("FRX")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"country": "France"}, "three-letter ISO code such as FRA"),
        ({"hourly_prices": {"mine": -1.0}}, "mine: -1.0, expected at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AccountsConfig(**settings)
