"""The progress bar of a run: the loss beside it, one short line a log, a table by denoiser at an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)


class RunProgress(ProgressCallback):
    """The Trainer's progress bar, with one readable line a log in the place of a dictionary."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar at the step that a resumed run starts from; in a log file there is none, only the lines."""
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                desc="pretraining", total=state.max_steps, initial=state.global_step, dynamic_ncols=True, disable=None
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print the log above the bar."""
        if not state.is_world_process_zero or not logs:
            return
        text = describe_log(state.global_step, logs)
        if text is None:
            return
        if self.training_bar is None:
            logger.info(text)
            return
        if "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
        self.training_bar.write(text)


@contextmanager
def library_bars_hidden() -> Iterator[None]:
    """Hide the bars that Transformers draws while it writes weights, which would tear the run's own."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def describe_log(step: int, logs: dict[str, Any]) -> str | None:
    """Return a log entry as text for people, or None if it holds neither a training nor an evaluation loss."""
    if "loss" in logs:
        return (
            f"step {step:>7,}  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.3f}  "
            f"grad norm {logs.get('grad_norm', float('nan')):.2f}  lr {logs['learning_rate']:.2e}  "
            + (f"{logs['tokens_per_second']:,.0f} tokens/s  " if "tokens_per_second" in logs else "")
            + (f"warm-up {logs['warm_up_seconds']:.1f} s  " if "warm_up_seconds" in logs else "")
            + f"{logs['fill']:.0%} of slots filled"
            + (f"  epoch {logs['epoch']:.2f}" if "epoch" in logs else "")
        )
    if "eval_loss" not in logs:
        return None
    lines = [
        f"step {step:>7,}  evaluation: loss {logs['eval_loss']:.4f}  perplexity {logs['eval_perplexity']:.2f}  "
        f"accuracy {logs['eval_accuracy']:.3f} ({logs['eval_accuracy_text']:.3f} without sentinels and EOS)"
    ]
    prefix = "eval_loss/"
    for name in (key.removeprefix(prefix) for key in logs if key.startswith(prefix)):
        lines.append(
            f"{'':14}{name:<16} loss {logs[prefix + name]:.4f}  accuracy {logs[f'eval_accuracy/{name}']:.3f} "
            f"({logs[f'eval_accuracy_text/{name}']:.3f})"
        )
    return "\n".join(lines)
