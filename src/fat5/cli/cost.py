"""`fat5 cost --tokens N --rate TOKENS_PER_SECOND`: hours, energy, CO2 and cost of a planned run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fat5.cli.settings import add_settings, settings_from
from fat5.training.cost import CostConfig, describe_cost, predict_cost

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the plan's settings."""
    add_settings(parser, CostConfig)


def run(args: Namespace) -> int:
    """Print the prediction."""
    print(describe_cost(predict_cost(settings_from(args, CostConfig))))
    return 0
