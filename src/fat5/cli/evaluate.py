"""`fat5 evaluate TASK MODEL ...`: judge a model, simple baselines, or both, and print the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fat5.cli.pretrain import show_progress
from fat5.cli.task_settings import add_common_arguments, config_from

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add task, model, file of settings and overrides."""
    parser.usage = (
        "fat5 evaluate TASK [MODEL] --data SOURCE [CONFIG.yaml] [section.key=value ...] [--baseline] [--output FOLDER]"
    )
    parser.add_argument(
        "words", nargs="*", type=str, help="task, model (FAT5 or any of Transformers), a YAML file, overrides"
    )
    add_common_arguments(parser)
    parser.add_argument("--baseline", action="store_true", help="judge simple methods; MODEL may be left out")


def run(args: Namespace) -> int:
    """Evaluate and print the table."""
    config = config_from(args, [])
    from fat5.tasks.evaluate import evaluate

    show_progress()
    _, text = evaluate(config, baselines=args.baseline)
    print(text)
    return 0
