"""A training step by each implementation, and how long it takes, what it holds and where its time goes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.pretraining.models import make_fat5, make_t5, packed
from benchmarks.pretraining.workload import Workload
from benchmarks.timing import release_memory
from fat5.optim import OptimizerConfig, build_optimizer
from fat5.training.compilation import compile_model, uses_cuda_graphs
from fat5.training.profiling import profile_of, read_kernels

PEAK_TFLOPS = 990.0
"""bf16 without sparsity, as NVIDIA's data sheets give it for an H100 or H200."""
_GIB = 2**30
_PROFILED = 3
"""Steps that are profiled."""


@dataclass(frozen=True)
class Implementation:
    """Who trains.

    Attributes:
        name: Its name.
        fat5: FAT5's model with AdamWScale and Kahan compensation; else Transformers' T5 with PyTorch's fused AdamW.
        mode: torch.compile's mode, None for eager; CUDA graphs are what `training.compile_mode=auto` takes on a GPU.
    """

    name: str
    fat5: bool
    mode: str | None = None

    @property
    def cuda_graphs(self) -> bool:
        """Whether it replays CUDA graphs."""
        return self.mode is not None and uses_cuda_graphs(self.mode)

    @property
    def warm_up_steps(self) -> int:
        """Steps that compile, and record CUDA graphs."""
        return 2 if self.cuda_graphs else 1


IMPLEMENTATIONS = {
    one.name: one
    for one in (
        Implementation("transformers-compiled", fat5=False, mode="default"),
        Implementation("fat5-compiled", fat5=True, mode="default"),
        Implementation("fat5-cuda-graphs", fat5=True, mode="reduce-overhead"),
        Implementation("fat5-eager", fat5=True),
        Implementation("transformers-eager", fat5=False),
    )
}


class Step:
    """One implementation with its model, optimiser and step; nothing in a step waits for the device.

    Args:
        implementation: Who trains.
        workload: Model and batch.
        device: Where.
        dtype: Type of the weights.
    """

    def __init__(
        self, implementation: Implementation, workload: Workload, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.implementation = implementation
        self.model: nn.Module = (make_fat5 if implementation.fat5 else make_t5)(workload, device).to(dtype)
        config = OptimizerConfig() if implementation.fat5 else OptimizerConfig(name="adamw", lr=1e-4)
        self.optimizer = build_optimizer(self.model, config)
        # Gives back the memory of an earlier implementation's CUDA graphs.
        torch._dynamo.reset()
        if implementation.mode is not None:
            backend = "inductor" if device.type == "cuda" else "aot_eager"
            if implementation.fat5:
                compile_model(self.model, implementation.mode, backend=backend)
            else:  # Transformers does not promise a whole graph
                self.model.compile(dynamic=False, backend=backend)

    def synthetic(self, workload: Workload, device: torch.device) -> Iterable[dict[str, Any]]:
        """Return the same rows again and again, in the form the model takes."""
        batch = workload.draw(device)
        return cycle([packed(batch) if self.implementation.fat5 else batch])

    def backward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Compute the gradients and return the loss, not yet on the host; both are good until the next call."""
        if self.implementation.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.model(**batch).loss
        loss.backward()
        return loss.detach()

    def run(self, batch: dict[str, Any]) -> torch.Tensor:
        """Take one step and return the loss, likewise."""
        loss = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def measure(
    step: Step, batches: Iterator[dict[str, Any]], workload: Workload, device: torch.device, *, steps: int, rounds: int
) -> dict[str, Any]:
    """Return the columns of one implementation: the first step (with CUDA graphs two), time, rates, memory, shares.

    Args:
        step: What to run.
        batches: Without end; each may have `num_tokens`, its real tokens, which the model does not get; operations are
            then not counted.
        workload: For its tokens and operations.
        device: Where.
        steps: Steps of a round, enqueued without waiting.
        rounds: Rounds; the percentiles are over them.
    """
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    rate_is_full = True

    def take(count: int) -> tuple[float, int]:
        nonlocal rate_is_full
        tokens = 0
        started = time.perf_counter()
        for _ in range(count):
            batch = dict(next(batches))
            rate_is_full &= "num_tokens" not in batch
            tokens += batch.pop("num_tokens", workload.tokens)
            step.run(batch)
        synchronize()
        return time.perf_counter() - started, tokens

    first, _ = take(step.implementation.warm_up_steps)
    take(3)
    taken = [take(steps) for _ in range(rounds)]
    times = [seconds * 1e3 / steps for seconds, _ in taken]
    p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive")
    median = statistics.median(times)
    rate = sum(tokens for _, tokens in taken) / sum(seconds for seconds, _ in taken)
    tflops = workload.flops / median / 1e9 if rate_is_full else None
    return {
        "phase": "step",
        "first_step_s": first,
        "repetitions": rounds * steps,
        "p20_ms": p20,
        "p50_ms": median,
        "p80_ms": p80,
        "tokens_per_s": rate,
        "tflops": tflops,
        "utilisation": None if tflops is None else tflops / PEAK_TFLOPS,
        **_peaks(lambda: take(2), device, cuda_graphs=step.implementation.cuda_graphs),
        **_shares(lambda: take(_PROFILED), device, _PROFILED * median),
    }


def _peaks(run: Callable[[], Any], device: torch.device, *, cuda_graphs: bool) -> dict[str, float]:
    """Return the most memory that is allocated while `run` runs, and the most that is reserved.

    That of CUDA graphs is reserved as long as they live and does not count as allocated: with them both are the latter.
    """
    if device.type != "cuda":
        return {}
    # What compilation and the first steps left in the cache is not the step's.
    release_memory()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    reserved = torch.cuda.max_memory_reserved(device) / _GIB
    peak = reserved if cuda_graphs else torch.cuda.max_memory_allocated(device) / _GIB
    return {"peak_gib": peak, "peak_reserved_gib": reserved}


def _shares(run: Callable[[], Any], device: torch.device, milliseconds: float) -> dict[str, float]:
    """Return the device's time for each kind of work in `run`, as shares of the time that it takes unprofiled.

    The rest is idle. The profiler slows the host, so that the gaps in its own record say little.
    """
    if device.type != "cuda":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            run()
        profiler.export_chrome_trace(str(trace))
        profile = profile_of(read_kernels(trace))
    if profile is None:
        return {}
    scale = profile.milliseconds / milliseconds
    result = {kind: share * scale for kind, share in profile.shares.items() if kind != "idle"}
    result["idle"] = max(0.0, 1 - sum(result.values()))
    return {f"share_{kind.replace('-', '_')}": share for kind, share in result.items()}
