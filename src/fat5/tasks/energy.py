"""Energy and CO2 of a piece of work, through codecarbon without its web services."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from fat5.errors import ConfigError, nearest
from fat5.tasks.extras import require

logger = logging.getLogger(__name__)


@contextmanager
def measured_energy(country: str | None) -> Iterator[dict[str, float]]:
    """Yield a dict that holds `energy_kwh` and `co2_kg` after the block, or nothing where neither can be measured.

    Args:
        country: Three-letter code of the country whose electricity is used; None to measure nothing.

    Raises:
        ConfigError: codecarbon knows no such country.
    """
    figures: dict[str, float] = {}
    tracker = None if country is None else _tracker(country)
    if tracker is None:
        yield figures
        return
    tracker.start()
    try:
        yield figures
    finally:
        emissions = tracker.stop()
        data = tracker.final_emissions_data
        if emissions is not None and data is not None:
            figures |= {"energy_kwh": float(data.energy_consumed), "co2_kg": float(emissions)}


def _tracker(country: str) -> Any:
    if find_spec("codecarbon") is None:
        logger.info("energy is not measured: codecarbon is not installed (`pip install 'fat5[accounts]'`)")
        return None
    codecarbon: Any = require("codecarbon", "accounts", "the measurement of energy")
    # Its own setting takes effect only after the first messages.
    logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
    sources: Any = require("codecarbon.input", "accounts", "the measurement of energy")
    known = sources.DataSource().get_global_energy_mix_data()
    if country not in known:  # it would go on with the mean of the world
        raise ConfigError(f"training.country is {country!r}, expected a code such as FRA{nearest(country, known)}")
    return codecarbon.OfflineEmissionsTracker(
        country_iso_code=country, save_to_file=False, log_level="critical", allow_multiple_runs=True
    )
