"""The accounts of a run over all its parts: tokens, hours, energy, CO2 and cost, in `accounts.json`."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fat5.errors import CheckpointError
from fat5.files import atomic_file
from fat5.training.accounts import AccountsConfig, Energy, EnergyMeter

ACCOUNTS_NAME = "accounts.json"
_WRITE_EVERY_S = 60.0


@dataclass(frozen=True)
class RunPart:
    """What one process, or the processes of one `torchrun`, spent on a run.

    Attributes:
        started: UTC.
        device: Name of the device.
        devices: Their number.
        hours: From before the first step to the last entry, evaluation, saving and compilation included.
        energy_kwh: Energy of all machines; null where it was not measured.
        co2_kg: CO2 equivalent of that energy.
    """

    started: str
    device: str
    devices: int
    hours: float
    energy_kwh: float | None = None
    co2_kg: float | None = None


class AccountBook:
    """Context around the training of a run: writes what it and the parts before it spent into `accounts.json`.

    Work that a kill undid was paid for: its hours and energy stay in the book, to within a minute. Tokens are those the
    model has seen.

    Args:
        folder: Folder of the run.
        config: What to account for.
        device: Name of the device.
        devices: Devices of all machines.
        machines: Machines; the energy is measured on this one, and the others are taken to use as much.
        resumed: Go on with the book that lies in the folder.

    Raises:
        CheckpointError: The book in the folder is damaged.
        ConfigError: Energy is asked for and cannot be measured.
    """

    def __init__(
        self,
        folder: Path,
        config: AccountsConfig,
        *,
        device: str,
        devices: int,
        machines: int = 1,
        resumed: bool = False,
    ) -> None:
        self.path = folder / ACCOUNTS_NAME
        self._config = config
        self._device, self._devices, self._machines = device, devices, machines
        self._earlier = read_parts(self.path) if resumed and self.path.is_file() else []
        gpus = list(range(devices // machines)) if device != "cpu" else None
        self._meter = EnergyMeter(config.country, gpus) if config.energy else None
        self._stack = ExitStack()
        self._began = 0.0
        self._written = 0.0
        self._started = ""

    def __enter__(self) -> AccountBook:
        if self._meter is not None:
            self._stack.enter_context(self._meter)
        self._began = time.perf_counter()
        self._started = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def due(self) -> bool:
        """True once a minute has passed since the file was written."""
        return time.perf_counter() - self._written > _WRITE_EVERY_S

    def write(self, tokens: int) -> dict[str, Any]:
        """Bring the file up to date and return its content.

        Args:
            tokens: Tokens the model has seen, of both sides, without padding.
        """
        now = self._written = time.perf_counter()
        energy = self._meter.read() if self._meter is not None else None
        part = RunPart(
            started=self._started,
            device=self._device,
            devices=self._devices,
            hours=(now - self._began) / 3600,
            energy_kwh=None if energy is None else energy.kwh * self._machines,
            co2_kg=None if energy is None else energy.co2_kg * self._machines,
        )
        accounts = summarise([*self._earlier, part], tokens, self._config)
        with atomic_file(self.path) as staging:
            staging.write_text(json.dumps(accounts, indent=1) + "\n", encoding="utf-8")
        return accounts


class AccountsCallback(TrainerCallback):
    """Keeps an `AccountBook` up to date while the Trainer runs; for the first process alone."""

    def __init__(self, book: AccountBook) -> None:
        self.book = book

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write once a minute."""
        if self.book.due:
            self.book.write(state.num_input_tokens_seen)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write beside each checkpoint."""
        self.book.write(state.num_input_tokens_seen)


def read_parts(path: Path) -> list[RunPart]:
    """Return the parts in an `accounts.json`.

    Raises:
        CheckpointError: The file is none.
    """
    try:
        return [RunPart(**part) for part in json.loads(path.read_text(encoding="utf-8"))["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged, expected the accounts of the run; remove it to go on without what it counted"
        ) from error


def summarise(parts: list[RunPart], tokens: int, config: AccountsConfig) -> dict[str, Any]:
    """Return the content of `accounts.json`: sums over the parts, and the parts.

    Energy is the sum over the parts that measured it, null if none did; `energy_hours` says how many hours that was.
    """
    hours = sum(part.hours for part in parts)
    device_hours = sum(part.hours * part.devices for part in parts)
    measured = [(part, Energy(part.energy_kwh, part.co2_kg or 0.0)) for part in parts if part.energy_kwh is not None]
    return {
        "tokens": tokens,
        "hours": hours,
        "device_hours": device_hours,
        "tokens_per_device_second": tokens / (device_hours * 3600) if device_hours else None,
        "energy_kwh": sum(energy.kwh for _, energy in measured) if measured else None,
        "energy_hours": sum(part.hours for part, _ in measured),
        "co2_kg": sum(energy.co2_kg for _, energy in measured) if measured else None,
        "country": config.country if measured else None,
        "cost": {name: price * device_hours for name, price in config.hourly_prices.items()},
        "parts": [asdict(part) for part in parts],
    }


def describe_accounts(accounts: dict[str, Any]) -> str:
    """Return the accounts as one line for people."""
    parts = f" in {len(accounts['parts'])} parts" if len(accounts["parts"]) > 1 else ""
    text = f"{accounts['tokens'] / 1e6:,.1f} M tokens in {accounts['hours']:,.2f} h{parts}"
    if accounts["device_hours"] != accounts["hours"]:
        text += f" ({accounts['device_hours']:,.2f} device hours)"
    if accounts["energy_kwh"] is not None:
        text += f"; {accounts['energy_kwh']:,.3f} kWh, {accounts['co2_kg']:,.3f} kg CO2eq ({accounts['country']})"
        if accounts["energy_hours"] < accounts["hours"] * 0.999:
            text += f" over the {accounts['energy_hours']:,.2f} h in which it was measured"
    text += "".join(f"; {name}: {cost:,.2f}" for name, cost in accounts["cost"].items())
    return text
