"""`fat5 pretrain CONFIG.yaml key=value ...`: read the settings, train, say how it ended."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings, to_yaml
from fat5.training.config_help import describe_settings

if TYPE_CHECKING:
    from fat5.training.pretrain import PretrainResult


def add_arguments(parser: ArgumentParser) -> None:
    """Add the configuration file with its overrides, and a help text that lists every setting."""
    parser.usage = "fat5 pretrain [CONFIG.yaml] [section.key=value ...] [--print-config]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "settings, `section.key=value` on the command line and nested in YAML (in brackets: type, default):\n"
        f"{describe_settings(PretrainConfig)}\n\n"
        "Several GPUs of one machine: torchrun --nproc-per-node N -m fat5 pretrain CONFIG.yaml ..."
    )
    parser.add_argument(
        "settings", nargs="*", type=str, help="a YAML file, then overrides such as training.max_steps=1000"
    )
    parser.add_argument("--print-config", action="store_true", help="print the merged settings as YAML and stop")


def run(args: Namespace) -> int:
    """Train; 0 when the run is complete, 128 + the signal's number when a signal ended it early."""
    settings = list(args.settings)
    path = settings.pop(0) if settings and "=" not in settings[0] else None
    config = load_settings(PretrainConfig, path, settings)
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    from fat5.training.pretrain import pretrain

    show_progress()
    return report_end(pretrain(config))


def show_progress() -> None:
    """Let the package's own messages through, as plain lines on stderr."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("fat5").setLevel(logging.INFO)


def report_end(result: PretrainResult) -> int:
    """Say how a run ended and return the exit code: 0, or 128 + the number of the signal that ended it early."""
    if result.stopped_by is None:
        text = f"done: {result.step:,} steps; the model is in {result.output_dir}"
    else:
        text = (
            f"stopped by {result.stopped_by.name} after step {result.step:,} of {result.max_steps:,}; "
            f"saved {result.checkpoint}. The same `fat5 pretrain` command goes on from there (training.resume=auto)."
        )
    if os.environ.get("RANK", "0") == "0":  # one of the processes that torchrun started
        print(text)
    return 0 if result.stopped_by is None else 128 + result.stopped_by
