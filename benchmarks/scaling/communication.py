"""How much of a step the GPUs spend on each other."""

from __future__ import annotations

from collections.abc import Iterable

from fat5.training.profiling import Kernel, kind_of


def communication_shares(kernels: Iterable[Kernel]) -> tuple[float, float] | None:
    """Return the share of the time in which NCCL's kernels run alone, and in which they run at all.

    The first is what communication costs; the rest of the second is hidden behind other kernels. A kernel that waits
    for another process counts as one that communicates. The time is that between the first kernel and the last; None
    where there is none.
    """
    edges = []
    for kernel in kernels:
        communicates = kind_of(kernel.op, kernel.name) == "communication"
        edges += [(kernel.start, 1, communicates), (kernel.start + kernel.duration, -1, communicates)]
    edges.sort()
    if not edges or edges[-1][0] == edges[0][0]:
        return None
    running = {True: 0, False: 0}
    alone = busy = 0.0
    last = edges[0][0]
    for time, change, communicates in edges:
        if running[True]:
            busy += time - last
            alone += 0.0 if running[False] else time - last
        running[communicates] += change
        last = time
    total = last - edges[0][0]
    return alone / total, busy / total
