"""How long a function takes, and how much memory: on a GPU with events, on a CPU with the wall clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_CYCLES_A_SECOND = 2e9  # of torch.cuda._sleep, at the highest clock
_MIN_REPETITIONS, _MAX_REPETITIONS = 5, 200
_MAX_SLEEP_S = 0.02
_MIB = 2**20


@dataclass(frozen=True)
class Budget:
    """How much time one measurement may take.

    Attributes:
        warm_up_ms: Runs before the clock counts, after a first one that compiles.
        measured_ms: Runs whose time counts; never fewer than 5 runs, never more than 200.
    """

    warm_up_ms: float = 25.0
    measured_ms: float = 150.0


QUICK = Budget(warm_up_ms=10.0, measured_ms=40.0)


@dataclass(frozen=True)
class Timing:
    """Percentiles over the repetitions, in milliseconds.

    `host_ms` is the median time that the host needs to enqueue the work. Where it is longer than the work itself, eager
    code waits for the host, and only a CUDA graph reaches `p50_ms`.
    """

    p20_ms: float
    p50_ms: float
    p80_ms: float
    host_ms: float
    repetitions: int


def measure_time(function: Callable[[], object], device: torch.device, budget: Budget) -> Timing:
    """Time a function that enqueues its work on `device`.

    On a GPU each repetition starts with a cold L2 cache, and with a device that sleeps until the host has enqueued
    everything: the events then see the kernels and no launch gaps, which differ between implementations for reasons
    that a CUDA graph removes.
    """
    return _time_on_gpu(function, device, budget) if device.type == "cuda" else _time_on_host(function, budget)


def measure_peak(function: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak of the memory that `function` takes beyond what is allocated before, in MiB; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / _MIB


def release_memory() -> None:
    """Give the GPU's memory back that nothing holds any more."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _summary(times_ms: list[float], host_ms: list[float]) -> Timing:
    p20, _, _, p80 = statistics.quantiles(times_ms, n=5, method="inclusive")
    return Timing(p20, statistics.median(times_ms), p80, statistics.median(host_ms), len(times_ms))


def _repetitions(budget_ms: float, estimate_ms: float) -> int:
    return min(max(int(budget_ms / max(estimate_ms, 1e-3)), _MIN_REPETITIONS), _MAX_REPETITIONS)


def _time_on_host(function: Callable[[], object], budget: Budget) -> Timing:
    def once() -> float:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3

    once()
    estimate = once()
    for _ in range(int(budget.warm_up_ms / max(estimate, 1e-3))):
        once()
    times = [once() for _ in range(_repetitions(budget.measured_ms, estimate))]
    return _summary(times, times)


def _time_on_gpu(function: Callable[[], object], device: torch.device, budget: Budget) -> Timing:
    with torch.cuda.device(device):
        function()
        torch.cuda.synchronize()
        estimate, host = _timed_call(function)
        for _ in range(min(int(budget.warm_up_ms / max(estimate, 1e-3)), _MAX_REPETITIONS)):
            estimate, host = _timed_call(function)
        flush = torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
        sleep = int(_CYCLES_A_SECOND * min(2 * host / 1e3 + 1e-4, _MAX_SLEEP_S))
        times, hosts = [], []
        for _ in range(_repetitions(budget.measured_ms, estimate)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(sleep)
            start.record()
            enqueued = time.perf_counter()
            function()
            hosts.append((time.perf_counter() - enqueued) * 1e3)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return _summary(times, hosts)


def _timed_call(function: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time of a call with the device's work, and the host's share of it, in ms."""
    start = time.perf_counter()
    function()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, (enqueued - start) * 1e3
