"""Accounts of a run over its parts, and the prediction for a planned one."""

from __future__ import annotations

import json

import pytest

from fat5.cli.main import main
from fat5.errors import CheckpointError, ConfigError
from fat5.training import account_book
from fat5.training.account_book import AccountBook, describe_accounts, read_parts
from fat5.training.accounts import AccountsConfig, Energy
from fat5.training.cost import CostConfig, predict_cost
from fat5.training.pretrain import pretrain


class Meter:
    """Stands in for the meter: one kWh and 40 g a reading."""

    def __init__(self, country: str, gpus: list[int] | None) -> None:
        self.kwh = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> Energy:
        self.kwh += 1
        return Energy(self.kwh, 0.04 * self.kwh)


def test_accounts_add_up_over_the_parts_of_a_run(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(account_book, "EnergyMeter", Meter)
    settings = {"data__validation": None, "accounts__hourly_prices": {"rented": 3.0}, "accounts__energy": True}
    settings["schedule__name"] = "constant"
    pretrain(make_config(**settings, training__max_steps=3))
    path = tmp_path / "run" / "accounts.json"
    first = json.loads(path.read_text())
    # Another price and no meter: neither is what a step computes, so the run goes on.
    settings |= {"accounts__hourly_prices": {"rented": 4.0}, "accounts__energy": False}
    pretrain(make_config(**settings, training__max_steps=6))
    both = json.loads(path.read_text())
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert both["tokens"] == state["num_input_tokens_seen"] > first["tokens"] > 0
    assert both["parts"][0] == first["parts"][0]
    assert both["hours"] == sum(part["hours"] for part in both["parts"]) > first["hours"] > 0
    assert both["energy_kwh"] == first["energy_kwh"] >= 2
    assert both["co2_kg"] == pytest.approx(0.04 * both["energy_kwh"])
    assert both["energy_hours"] == first["hours"]
    assert both["cost"] == {"rented": pytest.approx(4 * both["hours"])}
    assert both["tokens_per_device_second"] == pytest.approx(both["tokens"] / both["hours"] / 3600)
    line = describe_accounts(both)
    for text in ("in 2 parts", "kg CO2eq (FRA)", "in which it was measured", "rented"):
        assert text in line


def test_a_new_run_in_an_old_folder_starts_a_new_book_and_a_damaged_one_is_named(tmp_path):
    book = {"device": "cpu", "devices": 1}
    (tmp_path / "accounts.json").write_text("{")
    with AccountBook(tmp_path, AccountsConfig(), **book) as fresh:
        fresh.write(10)
    assert len(read_parts(tmp_path / "accounts.json")) == 1
    (tmp_path / "accounts.json").write_text('{"parts": [{"hours": 1}]}')
    with pytest.raises(CheckpointError, match=r"accounts.json is damaged.*remove it"):
        AccountBook(tmp_path, AccountsConfig(), **book, resumed=True)


def test_devices_count_for_cost_and_machines_for_energy(tmp_path, monkeypatch):
    monkeypatch.setattr(account_book, "EnergyMeter", Meter)
    config = AccountsConfig(energy=True, hourly_prices={"rented": 2.0})
    with AccountBook(tmp_path, config, device="gpu", devices=16, machines=2) as book:
        accounts = book.write(1000)
    assert accounts["device_hours"] == pytest.approx(16 * accounts["hours"])
    assert accounts["cost"]["rented"] == pytest.approx(32 * accounts["hours"])
    assert accounts["energy_kwh"] == 2


def test_cost_gives_the_figures_of_the_original_run(capsys):
    """419.4 G tokens at 79.7 k tokens/s took 1,461 h; with an A100's 250 W and 37 g a kWh, 13.5 kg CO2eq."""
    cost = predict_cost(CostConfig(tokens=419.4e9, rate=79.74e3, watts=250, carbon_intensity=0.037))
    assert round(cost.hours) == 1461
    assert cost.co2_kg == pytest.approx(13.5, abs=0.05)
    plan = ["--tokens", "419.4e9", "--rate", "79740", "--watts", "250", "--carbon-intensity", "0.037"]
    assert main(["cost", *plan, "--devices", "2", "--prices", '{"rented": 1.5}']) == 0
    printed = capsys.readouterr().out.split()
    for figure in ("730.5", "1,461.0", "365.25", "13.51", "2,191.50"):
        assert figure in printed


def test_cost_takes_what_an_earlier_run_measured(tmp_path):
    with AccountBook(tmp_path, AccountsConfig(), device="gpu", devices=4) as book:
        pass
    part = {"started": "", "device": "gpu", "devices": 4, "hours": 0.5, "energy_kwh": 1.0, "co2_kg": 0.05}
    accounts = account_book.summarise([account_book.RunPart(**part)], 7_200_000, AccountsConfig())
    book.path.write_text(json.dumps(accounts))
    cost = predict_cost(CostConfig(tokens=3.6e9, accounts=str(book.path)))
    assert cost.hours == pytest.approx(1000)
    assert cost.energy_kwh == pytest.approx(500)
    assert cost.co2_kg == pytest.approx(25)
    book.path.write_text("{}")
    with pytest.raises(ConfigError, match="holds no accounts with a rate"):
        predict_cost(CostConfig(tokens=1e9, accounts=str(book.path)))
    with pytest.raises(ConfigError, match="expected a rate"):
        CostConfig(tokens=1e9)
    with pytest.raises(ConfigError, match="rate is -1"):
        CostConfig(tokens=1e9, rate=-1)


def test_a_price_that_is_none_is_refused_with_its_name(make_config):
    with pytest.raises(ConfigError, match=r"accounts.hourly_prices is {'rented': 'much'}, expected dict\[str, float\]"):
        make_config(accounts__hourly_prices={"rented": "much"})
