"""Comparing many configurations of the Hopper kernels at once: most of the time is the compiler's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from fat5.ops.attention.hopper import dispatch
from fat5.ops.attention.hopper.configuration import Configuration


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def examine_all(
    configurations: Iterable[Configuration], device: torch.device, workers: int
) -> Iterator[tuple[Configuration, str | None]]:
    """Yield each configuration with what is wrong with it, or None, in their order; see `dispatch.examine`.

    Args:
        configurations: Each is compared once.
        device: Where.
        workers: Processes; 1 for this one. The compiled kernels stay in Triton's cache on the disk.
    """
    todo = list(dict.fromkeys(configurations))
    workers = min(workers, len(todo))
    if workers <= 1:
        yield from ((one, dispatch.examine(one, device)) for one in todo)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from zip(todo, pool.map(partial(_examine, device=device), todo), strict=True)


def _examine(configuration: Configuration, device: torch.device) -> str | None:
    return dispatch.examine(configuration, device)
