"""What a run costs in energy and CO2, measured on the machine by codecarbon without a network."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fat5.errors import ConfigError, nearest

INTERVAL_S = 15.0


@dataclass(frozen=True)
class AccountsConfig:
    """What to account for besides tokens and hours.

    Attributes:
        energy: Measure energy and CO2 with codecarbon (`pip install 'fat5[accounts]'`).
        country: Three-letter ISO code of the country whose electricity the machine runs on.
        hourly_prices: Name to price of one device for an hour, such as {rented: 2.5}; the cost is given for each.
    """

    energy: bool = False
    country: str = "FRA"
    hourly_prices: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.country) != 3 or not self.country.isupper():
            raise ConfigError(f"accounts.country is {self.country!r}, expected a three-letter ISO code such as FRA")
        for name, price in self.hourly_prices.items():
            if not price >= 0:
                raise ConfigError(f"accounts.hourly_prices has {name}: {price}, expected at least 0")


class Energy(NamedTuple):
    """Energy in kWh and the CO2 equivalent, in kg, of making it."""

    kwh: float
    co2_kg: float


class EnergyMeter:
    """Context that measures the energy of this machine: its CPU, its memory and the GPUs that the process may use.

        with EnergyMeter(country="FRA") as meter:
            ...
            meter.read()  # so far
        meter.read()  # of the whole block

    GPUs report their energy; for CPUs without a counter codecarbon estimates it from the model's rated power. Several
    processes of one machine need one meter alone. Nothing is sent or downloaded: the carbon intensity of the country's
    electricity is codecarbon's yearly average.

    Args:
        country: Three-letter ISO code.
        gpus: Indices of the GPUs to count; None for those of `CUDA_VISIBLE_DEVICES`, or all.

    Raises:
        ConfigError: codecarbon is not installed, does not know the country or cannot measure here.
    """

    def __init__(self, country: str = "FRA", gpus: list[int] | None = None) -> None:
        try:
            import codecarbon
            from codecarbon.input import DataSource
        except ImportError as error:
            raise ConfigError(
                "measuring energy needs the package codecarbon, which is not installed; "
                "pip install 'fat5[accounts]', or leave it unmeasured (accounts.energy=false; in a finetuning "
                "training.country=null)"
            ) from error
        known = DataSource().get_global_energy_mix_data()
        if country not in known:
            raise ConfigError(
                f"codecarbon knows no country {country!r}, expected a three-letter ISO code such as FRA"
                f"{nearest(country, known)}"
            )
        self._class = codecarbon.OfflineEmissionsTracker
        self._settings: dict[str, Any] = {"country_iso_code": country}
        if gpus is not None and not os.environ.get("CUDA_VISIBLE_DEVICES"):
            self._settings["gpu_ids"] = gpus
        self._tracker: Any = None
        self._latest = _Latest()

    def __enter__(self) -> EnergyMeter:
        self._latest = _Latest()
        logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            # The name of the setting that writes no file differs between releases; this one all have.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._tracker = self._class(
                measure_power_secs=INTERVAL_S,
                save_to_file=False,
                output_handlers=[self._latest],
                tracking_mode="machine",
                allow_multiple_runs=True,
                log_level=logging.CRITICAL,
                **self._settings,
            )
        self._tracker.start()
        self._tracker.flush()
        if not self._latest.written:
            # codecarbon keeps its own errors to itself, and a meter that stands at 0 would look like one.
            raise ConfigError("codecarbon could not start measuring on this machine; set accounts.energy=false")
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracker is not None:
            self._tracker.stop()
            self._tracker = None

    def read(self) -> Energy:
        """Return the energy since the block was entered; behind it, that of the whole block."""
        if self._tracker is not None:
            self._tracker.flush()
        return self._latest.energy


class _Latest:
    """The output that codecarbon is given: it keeps the newest totals."""

    def __init__(self) -> None:
        self.energy = Energy(0.0, 0.0)
        self.written = False

    def out(self, total: Any, delta: Any) -> None:
        self.written = True
        self.energy = Energy(float(total.energy_consumed), float(total.emissions))

    def live_out(self, total: Any, delta: Any) -> None:
        self.out(total, delta)

    def task_out(self, data: Any, experiment_name: str) -> None:
        """Tasks are not used."""

    def exit(self) -> None:
        """Nothing to close."""
