"""Signals: the first is remembered, the second acts, and data workers leave them alone."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fat5.training.interruption import StopRequest


@pytest.fixture(autouse=True)
def interruptible():
    """Python's own handling of SIGINT, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_and_wait() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def test_the_first_signal_is_noted_and_the_second_acts():
    with StopRequest() as request:
        assert request.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            interrupt_and_wait()


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_another_thread_leaves_the_handlers_as_they_are():
    seen = []

    def work() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
