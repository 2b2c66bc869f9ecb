"""A clean stop: SIGTERM or Ctrl+C ends the run after the current step, with a checkpoint, on all ranks at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context that turns the first SIGTERM or SIGINT into a note; a second one acts as it did before.

    Attributes:
        signal: the signal received, None so far.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread alone; a run started from another one keeps its caller's handling.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}


class StopCallback(TrainerCallback):
    """Ends training with a checkpoint once a `StopRequest` has its signal, on all ranks at the same step.

    Signals reach the ranks at different moments. Each step starts an all-reduce of "stop?" on the host and reads the
    one of the step before, so that the ranks agree without waiting for the GPU.
    """

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self.stopped_by: signal.Signals | None = None
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Open the host-side group when there are several ranks."""
        if args.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Ask for a checkpoint and the end of training when a signal has come."""
        number = self._agree(int(self.request.signal or 0))
        if number:
            self.stopped_by = signal.Signals(number)
            control.should_save = True
            control.should_training_stop = True

    def _agree(self, number: int) -> int:
        if self._group is None:
            return number
        agreed = 0
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            agreed = int(flag.item())
        flag = torch.tensor([number])
        self._pending = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return agreed
