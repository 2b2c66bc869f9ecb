"""Launching kernels that are bound by memory: the device, its size, and tiles from a table or by measurement.

With `FAT5_AUTOTUNE=1` the first launch of each configuration times every candidate and prints the row that the table
would hold, as attention does; with `FAT5_AUTOTUNE=all` the times of all candidates too.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from fat5.ops.attention.autotune import autotuning, every_time_is_asked_for

T = TypeVar("T")

_INTERPRETED_PROCESSORS = 4
_REPETITIONS, _SLEEP_CYCLES = 20, 400_000
_chosen: dict[Hashable, Any] = {}
_nothing = nullcontext()


def on_device(x: Tensor) -> Any:
    """Return a context in which launches go to the tensor's own device, which for most is the current one."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _nothing
    return torch.cuda.device(x.device)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    kernel: str, size: Hashable, device: torch.device, preferred: T, candidates: Iterable[T], run: Callable[[T], Any]
) -> Any:
    """Run a kernel with the table's tile, or where the environment asks for it the fastest, and return its result.

    Args:
        kernel: Its name.
        size: What a row of its table depends on.
        device: Where it runs.
        preferred: The table's tile.
        candidates: What to try instead.
        run: Launches with a tile; may be called any number of times.
    """
    # A capture cannot be timed.
    if not autotuning() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return run(preferred)
    place = (kernel, size, device)
    if place not in _chosen:
        _chosen[place] = _fastest(kernel, size, preferred, candidates, run)
    return run(_chosen[place])


def _fastest(kernel: str, size: Hashable, preferred: T, candidates: Iterable[T], run: Callable[[T], Any]) -> T:
    times: dict[T, float] = {}
    for tile in dict.fromkeys([preferred, *candidates]):
        try:
            times[tile] = _median_ms(functools.partial(run, tile))
        except (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError):
            continue
    best = min(times, key=times.__getitem__, default=preferred)
    ahead = f"{times[best]:.4f} ms, {times[preferred]:.4f} with {preferred}" if preferred in times else "no tile runs"
    print(f"{kernel} {size}: {best}  # {ahead}", file=sys.stderr)
    if every_time_is_asked_for():
        for tile in sorted(times, key=times.__getitem__):
            print(f"  {times[tile]:.4f} ms  {tile}", file=sys.stderr)
    return best


def _median_ms(run: Callable[[], Any]) -> float:
    """Time launches of some microseconds: with a cold L2 cache, behind a sleep that hides the host's share."""
    run()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(_REPETITIONS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
