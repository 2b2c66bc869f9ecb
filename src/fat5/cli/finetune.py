"""`fat5 finetune TASK CHECKPOINT ...`: read the settings, train once a seed, print the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fat5.cli.pretrain import show_progress
from fat5.cli.task_settings import add_common_arguments, config_from
from fat5.training.config_file import to_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add task, checkpoint, file of settings and overrides, and short forms of the usual settings."""
    parser.usage = (
        "fat5 finetune TASK CHECKPOINT --data SOURCE --output FOLDER [CONFIG.yaml] [section.key=value ...] "
        "[--seeds N] [--lora] [--baseline]"
    )
    parser.add_argument(
        "words", nargs="*", type=str, help="task, checkpoint, a YAML file, overrides such as training.epochs=5"
    )
    add_common_arguments(parser)
    parser.add_argument("--seeds", type=int, metavar="N", help="training.seeds: repeat with so many seeds")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters, not all weights (lora.rank)")
    parser.add_argument("--baseline", action="store_true", help="judge simple methods on the same rows, too")
    parser.add_argument("--print-config", action="store_true", help="print the merged settings as YAML and stop")


def run(args: Namespace) -> int:
    """Finetune and print the table; 0 when complete, 128 + the signal's number when a signal ended it early."""
    shortcuts = [] if args.seeds is None else [f"training.seeds={args.seeds}"]
    config = config_from(args, [*shortcuts, *(["lora={}"] if args.lora else [])])
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    from fat5.tasks.finetune import finetune

    show_progress()
    result = finetune(config, with_baselines=args.baseline)
    if result.text:
        print(f"{result.text}\n\n{result.output_dir}: models, result.json, result.md")
    if result.stopped_by is None:
        return 0
    print(f"stopped by {result.stopped_by.name}; the same command goes on with the seeds that are missing")
    return 128 + result.stopped_by
