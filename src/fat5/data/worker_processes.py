"""How worker processes of a data loader take signals, and what their death means."""

from __future__ import annotations

import os
import signal

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


def explained(error: RuntimeError) -> Exception:
    """Return a DataError in the place of a DataLoader's error about a dead worker, else the error itself."""
    if not str(error).startswith("DataLoader worker (pid"):
        return error
    return DataError(
        f"a process that prepares batches ended abruptly, often since memory ran out: use fewer workers ({error})"
    )
