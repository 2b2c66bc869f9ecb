"""`fat5 sweep RUN TASK.yaml ...`: finetune every checkpoint of a run, draw the scores against the tokens seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fat5.cli.pretrain import show_progress
from fat5.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run, the tasks' settings, overrides for all of them, and where the results go."""
    parser.usage = "fat5 sweep RUN TASK.yaml [TASK.yaml ...] --output FOLDER [section.key=value ...]"
    parser.add_argument("run", type=str, help="folder of a pretraining run, with its checkpoints")
    parser.add_argument(
        "words", nargs="*", type=str, help="files of settings as `fat5 finetune` takes them, and overrides for all"
    )
    parser.add_argument("--output", type=str, required=True, metavar="FOLDER", help="folder of the results")


def run(args: Namespace) -> int:
    """Sweep and print a line a point; 0 when complete, 128 + the signal's number when a signal ended it early."""
    from fat5.tasks.settings import load_task_config
    from fat5.tasks.sweep import FIGURE_NAME, sweep

    files = [word for word in args.words if "=" not in word]
    names = [Path(file).stem for file in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"the names of the files are the tasks' names in the figure; got {', '.join(names)}")
    overrides = [word for word in args.words if "=" in word]
    show_progress()
    configs = {name: load_task_config(None, file, overrides) for name, file in zip(names, files, strict=True)}
    result = sweep(args.run, configs, args.output)
    for point in result.points:
        spread = "" if point["spread"] is None else f" ± {point['spread']:.2f}"
        print(
            f"{point['task']:<20} {point['checkpoint']:<20} {point['tokens_seen']:>15,} tokens  "
            f"{point['metric']} {point['mean']:.2f}{spread}"
        )
    if result.stopped_by is not None:
        print(f"stopped by {result.stopped_by.name}; the same command goes on with what is missing")
        return 128 + result.stopped_by
    print(f"{result.output_dir}: result.json, {FIGURE_NAME}")
    return 0
