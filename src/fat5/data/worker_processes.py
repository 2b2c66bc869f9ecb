"""How worker processes take signals and the end of their parent, and what their own death means."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from threading import Thread

from torch.utils.data import get_worker_info

from fat5.errors import DataError


def leave_signals_to_parent(_: int) -> None:
    """Make a worker deaf to Ctrl+C and SIGTERM, which reach the whole group, until the main process is at its end.

    The worker's data set must have the main process's `SlotPool` as `pool`.
    """
    pool = get_worker_info().dataset.pool  # type: ignore[union-attr]

    def end_with_parent(number: int, frame: object) -> None:
        if pool.closed:
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_with_parent)
    end_when_parent_is_gone()


def end_when_parent_is_gone() -> None:
    """End this process as soon as its parent has died, killed say; else it would wait for its next task for ever."""
    Thread(target=_end_after_parent, daemon=True).start()


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


WORKER_LOSS = (RuntimeError, EOFError, ConnectionError)
"""What a DataLoader raises when a worker has died: its own error, or that of the broken connection to the worker."""

_REPORT_SECONDS = 2.0


def explained(error: Exception) -> Exception:
    """Return a DataError in the place of a DataLoader's error (`WORKER_LOSS`) about a dead worker, else that error."""
    if isinstance(error, EOFError | ConnectionError):
        # The connection breaks a moment before the system reports the death, which PyTorch's signal handler turns into
        # an error wherever the main thread then is. It belongs here, and names the process.
        try:
            time.sleep(_REPORT_SECONDS)
        except RuntimeError as report:
            error = report
    if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker (pid"):
        return error
    reason = str(error) or "the connection to it broke off"
    return DataError(
        f"a process that prepares batches ended abruptly, often since memory ran out: use fewer workers ({reason})"
    )
