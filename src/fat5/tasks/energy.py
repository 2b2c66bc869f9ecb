"""Energy and CO2 of a finetuning, through codecarbon without its web services."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from fat5.training.accounts import EnergyMeter

logger = logging.getLogger(__name__)


@contextmanager
def measured_energy(country: str | None) -> Iterator[dict[str, float]]:
    """Yield a dict that holds `energy_kwh` and `co2_kg` after the block, or nothing where neither can be measured.

    Args:
        country: Three-letter code of the country whose electricity is used; None to measure nothing.

    Raises:
        ConfigError: codecarbon knows no such country, or cannot measure here.
    """
    figures: dict[str, float] = {}
    if country is None or find_spec("codecarbon") is None:
        if country is not None:
            logger.info("energy is not measured: codecarbon is not installed (`pip install 'fat5[accounts]'`)")
        yield figures
        return
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    with EnergyMeter(country, gpus) as meter:
        yield figures
    energy = meter.read()
    figures |= {"energy_kwh": energy.kwh, "co2_kg": energy.co2_kg}
