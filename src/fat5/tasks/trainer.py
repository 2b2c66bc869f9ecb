"""Hugging Face's Trainer for a task: its loss, its scores at each evaluation, and the best weights kept in memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from tqdm import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from fat5.data.table_files import Row
from fat5.errors import FAT5Error
from fat5.tasks.encoding import cuts_known
from fat5.tasks.task import Feature, Inference, Scores, Task

logger = logging.getLogger(__name__)


class TaskTrainer(Trainer):
    """Trainer over features of a task.

    Differences from `transformers.Trainer`: the loss is the task's; rows of like length share a batch; `evaluate` gives
    the task's scores of the validation rows, from predictions that are made row by row and never hold the logits of
    all; the weights of the best evaluation stay in host memory and are put back at the end, so that no checkpoint is
    written.

    Args:
        task: The task, its labels known.
        validation: Rows to be scored at each evaluation.
        inference: How predictions are made.
        patience: End after so many evaluations in a row that were no better; None for never.
        max_seconds: End after so many seconds, the learning rate's schedule with them; None for no limit.
        **kwargs: Those of `transformers.Trainer`; `train_dataset` is a list of features, `optimizers` has a `LambdaLR`.
    """

    def __init__(
        self,
        *,
        task: Task,
        validation: Sequence[Row],
        inference: Inference,
        patience: int | None,
        max_seconds: float | None,
        **kwargs: Any,
    ) -> None:
        tokenizer = kwargs["processing_class"]
        super().__init__(data_collator=lambda features: task.collate(features, tokenizer), **kwargs)
        self.task = task
        self.validation = validation
        self.inference = inference
        self.best = BestWeights(patience)
        for own in (PrinterCallback, ProgressCallback):
            self.remove_callback(own)
        self.add_callback(_Progress())
        if max_seconds is not None:
            limit = TimeLimit(max_seconds)
            self.add_callback(limit)
            limit.hasten(cast(LambdaLR, self.lr_scheduler), self.args.max_steps)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        features = cast("Sequence[Feature]", self.train_dataset)
        generator = torch.Generator().manual_seed(self.args.seed)
        lengths = [len(feature["input_ids"]) for feature in features]
        return LengthGroupedSampler(self.args.train_batch_size, lengths=lengths, generator=generator)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the task's loss of a batch."""
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        return self.task.loss(model, cast(dict[str, Tensor], inputs))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return and log the scores of the validation rows, and keep the weights if they are the best so far."""
        with nullcontext() if self.best.score is None else cuts_known():
            scores = self.scores(self.validation)
        leading = self.task.leading(scores)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items() if "/" not in name}
        self.log(metrics)
        if self.best.offer(scores[leading], self.state.global_step, cast(nn.Module, self.model)):
            self.control.should_training_stop = True
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def scores(self, rows: Sequence[Row]) -> Scores:
        """Return the scores of the model as it is on some rows."""
        model: Any = self.model
        training = model.training
        model.eval()
        tokenizer = cast(Any, self.processing_class)
        scores = self.task.score(rows, self.task.predict(model, tokenizer, rows, self.inference))
        model.train(training)
        return scores

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write nothing, also where a signal asks for a checkpoint: a seed that is cut short starts again."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, and stop a training that has diverged.

        Raises:
            FAT5Error: The training loss is not finite.
        """
        super().log(logs, start_time)
        loss = logs.get("loss", logs.get("train_loss", 0.0))  # the latter at the end, for what no log has shown
        if loss != loss or abs(loss) == float("inf"):
            raise FAT5Error(
                f"the training loss is {loss} at step {self.state.global_step}: training has diverged; lower "
                "optimizer.lr, or train with training.precision=fp32"
            )


class BestWeights:
    """The trainable weights of the best evaluation, on the host.

    Args:
        patience: Evaluations in a row without a better score before `offer` says to stop; None for never.

    Attributes:
        score: The best score, None so far.
        step: Its step.
    """

    def __init__(self, patience: int | None) -> None:
        self.score: float | None = None
        self.step = 0
        self._patience = patience
        self._since = 0
        self._weights: dict[str, Tensor] = {}

    def offer(self, score: float, step: int, model: nn.Module) -> bool:
        """Keep the weights if `score` is the best so far; return whether patience has run out."""
        if self.score is None or score > self.score:
            self.score, self.step, self._since = score, step, 0
            self._weights = {
                name: weight.detach().to("cpu", copy=True)
                for name, weight in model.named_parameters()
                if weight.requires_grad
            }
        else:
            self._since += 1
        return self._patience is not None and self._since >= self._patience

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Put the kept weights back; nothing happens where no evaluation came."""
        parameters = dict(model.named_parameters())
        for name, weight in self._weights.items():
            parameters[name].copy_(weight)


class TimeLimit(TrainerCallback):
    """Ends training when its time is up, with a last evaluation.

    Args:
        max_seconds: From the beginning of the training, evaluations included.
    """

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self.started: float | None = None

    @property
    def share(self) -> float:
        """The share of the time that has passed."""
        return 0.0 if self.started is None else (time.perf_counter() - self.started) / self.max_seconds

    def hasten(self, schedule: LambdaLR, max_steps: int) -> None:
        """Have a schedule of so many steps end with the time, if that is up first.

        A training that is cut off at a high learning rate loses what the schedule's end would have won. So each step
        takes the place in the schedule that the time's share says, if the steps' share is behind it.
        """

        def hastened(curve: Callable[[int], float]) -> Callable[[int], float]:
            return lambda step: curve(max(step, min(max_steps, int(self.share * max_steps))))

        schedule.lr_lambdas = [hastened(curve) for curve in schedule.lr_lambdas]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ask for an evaluation and the end when the time is up."""
        if self.share > 1:
            control.should_evaluate = control.should_training_stop = True


class _Progress(ProgressCallback):
    """The Trainer's bar, with one line an evaluation in the place of a dictionary."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.current_step = state.global_step
        self.training_bar = tqdm(
            desc="finetuning", total=state.max_steps, dynamic_ncols=True, leave=False, disable=None
        )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or self.training_bar is None:
            return
        if "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
        scores = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
        if scores:
            text = "  ".join(f"{name} {value:.2f}" for name, value in scores.items())
            self.training_bar.clear()
            logger.info("step %s  %s", f"{state.global_step:,}", text)
