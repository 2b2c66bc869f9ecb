"""What the death of a process that prepares batches looks like to the user."""

from __future__ import annotations

import signal
import time

import pytest

from fat5.data import worker_processes
from fat5.data.worker_processes import WORKER_LOSS, explained
from fat5.errors import DataError

REPORT = "DataLoader worker (pid 12) is killed by signal: Killed."


def test_the_loaders_own_report_becomes_one_clear_error():
    error = explained(RuntimeError(REPORT))
    assert isinstance(error, DataError)
    assert "ended abruptly" in str(error)
    assert "use fewer workers" in str(error)
    assert REPORT in str(error)


def test_other_errors_stay_what_they_are():
    error = RuntimeError("CUDA error: out of memory")
    assert explained(error) is error


def test_a_broken_connection_waits_for_the_report_which_would_come_anywhere_else():
    """Pitfall: the connection breaks before PyTorch's signal handler raises, in whatever code then runs."""

    def report(*_):
        raise RuntimeError(REPORT)

    before = signal.signal(signal.SIGALRM, report)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        error = explained(ConnectionResetError(104, "Connection reset by peer"))
        time.sleep(0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert isinstance(error, DataError)
    assert REPORT in str(error)


@pytest.mark.parametrize("error", [EOFError(), ConnectionRefusedError(111, "Connection refused")])
def test_a_broken_connection_without_a_report_is_explained_too(monkeypatch, error):
    monkeypatch.setattr(worker_processes, "_REPORT_SECONDS", 0.01)
    assert isinstance(error, WORKER_LOSS)
    explanation = explained(error)
    assert isinstance(explanation, DataError)
    assert (str(error) or "the connection to it broke off") in str(explanation)
