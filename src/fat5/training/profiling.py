"""Where the time of a step goes on the GPU: matrix products, attention, memory-bound work, communication, nothing."""

from __future__ import annotations

import bisect
import gzip
import json
import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

TRACE_NAME = "profile_trace.json.gz"
KINDS = ("gemm", "attention", "memory-bound", "communication")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Names of cuBLAS's, CUTLASS's and Inductor's matrix products, and of attention kernels by all who write them.
_GEMM: tuple[str, ...] = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "triton_tem", "_mm_", "tensorop")
_ATTENTION: tuple[str, ...] = (
    "attention",
    "flash",
    "fmha",
    "sdpa",
    "mha_",
    "key_value_kernel",
    "query_kernel",
    "band_kernel",
)
_ATTENTION += ("table_kernel", "buckets_kernel", "bias_kernel", "delta_kernel", "document_tiles", "flex_")
_ATTENTION += ("prepare_kernel", "finish_kernel", "record_kernel", "setup_kernel")
# Names that attention's kernels have in common with those of norms and activations. A replayed CUDA graph launches all
# of a step at once, so that nothing says which of them a kernel is; but the others hold no tiles in shared memory, and
# for their sums take at most so many bytes.
_AMBIGUOUS_NAMES = ("forward_kernel", "backward_kernel")
_BYTES_WITHOUT_TILES = 16_384


class Kernel(NamedTuple):
    """Work of the device: what launched it, its name, and its time in microseconds."""

    op: str
    name: str
    start: float
    duration: float


class Profile(NamedTuple):
    """Shares of the time between the first kernel and the last; they add up to 1.

    The profiler itself slows the host down: "idle" is an upper bound of what the device waits without it.

    Attributes:
        shares: By kind, and "idle".
        milliseconds: That time.
        longest: The kernels that took most, with their share.
    """

    shares: dict[str, float]
    milliseconds: float
    longest: list[tuple[str, float]]


def kind_of(op: str, name: str) -> str:
    """Return what a kernel is for.

    Args:
        op: The attention operator that launched it, or "attention" where its shared memory tells that one has, or
            empty. It goes before the name, since a fused attention is matrix products too, and kernels of all sorts
            bear the same short names.
        name: The kernel's own name.
    """
    lower = name.lower()
    if lower.startswith("nccl"):
        return "communication"
    if op or any(part in lower for part in _ATTENTION):
        return "attention"
    return "gemm" if any(part in lower for part in _GEMM) else "memory-bound"


def read_kernels(trace: Path) -> list[Kernel]:
    """Return the work of the device in a torch profiler's trace (`.json` or `.json.gz`), in order of time."""
    data = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    events = [event for event in json.loads(data)["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: (event["tid"], event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    attention = _attention_ops(events)
    kernels = []
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            launch = launches.get(event.get("args", {}).get("correlation"))
            op = attention.around(*launch) if launch else ""
            shared_memory = event.get("args", {}).get("shared memory", 0)
            if event["name"] in _AMBIGUOUS_NAMES and shared_memory > _BYTES_WITHOUT_TILES:
                op = op or "attention"
            kernels.append(Kernel(op, event["name"], float(event["ts"]), float(event["dur"])))
    return sorted(kernels, key=lambda kernel: kernel.start)


def profile_of(kernels: Iterable[Kernel]) -> Profile | None:
    """Return the shares of time, or None where the device did nothing. Kernels at the same time count once."""
    times: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    first: float | None = None
    end = 0.0
    for kernel in kernels:
        if first is None:
            first = end = kernel.start
        times["idle"] += max(0.0, kernel.start - end)
        alone = max(0.0, kernel.start + kernel.duration - max(end, kernel.start))
        times[kind_of(kernel.op, kernel.name)] += alone
        by_name[kernel.name] += alone
        end = max(end, kernel.start + kernel.duration)
    if first is None or end == first:
        return None
    total = end - first
    longest = sorted(by_name.items(), key=lambda entry: -entry[1])[:10]
    shares = {kind: times[kind] / total for kind in (*KINDS, "idle")}
    return Profile(shares, total / 1e3, [(name, time / total) for name, time in longest])


def describe_profile(profile: Profile | None) -> str:
    """Return a profile as lines for people."""
    if profile is None:
        return "no work of a GPU was recorded"
    lines = ["  ".join(f"{kind} {share:.1%}" for kind, share in profile.shares.items())]
    return "\n".join([*lines, *(f"  {share:6.1%}  {name[:100]}" for name, share in profile.longest)])


class ProfileCallback(TrainerCallback):
    """Profiles some steps after the first ones, writes the trace and prints where the time went.

    Args:
        steps: Steps to profile.
        folder: Where `profile_trace.json.gz` goes; chrome://tracing and ui.perfetto.dev open it.
    """

    skipped = 5

    def __init__(self, steps: int, folder: Path) -> None:
        self.steps = steps
        self.path = folder / TRACE_NAME
        self.profile: Profile | None = None
        self._seen = 0
        self._profiler: torch.profiler.profile | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start once the run is warm."""
        if self._seen == self.skipped and self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if args.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop, write and print after the last step to profile."""
        self._seen += 1
        if self._seen == self.skipped + self.steps and self._profiler is not None:
            self._finish(args)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what there is of a run that ends early, or say that it was too short."""
        if self._profiler is not None and self._seen < self.skipped + self.steps:
            self._finish(args)
        elif self._profiler is None:
            logger.warning("nothing was profiled: the run ended within its first %d steps", self.skipped)

    def _finish(self, args: TrainingArguments) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        profiler = self._profiler
        if profiler is None:
            return
        profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))
        self.profile = profile_of(read_kernels(self.path))
        logger.info(
            "profile of %d steps, %s (the profiler slows the host: without it less is idle):\n%s",
            self.steps,
            self.path,
            describe_profile(self.profile),
        )


class _Intervals:
    """Times of operators on each thread, none inside another."""

    def __init__(self) -> None:
        self._starts: dict[Any, list[float]] = defaultdict(list)
        self._ends: dict[Any, list[tuple[float, str]]] = defaultdict(list)

    def add(self, thread: Any, start: float, end: float, name: str) -> None:
        if not self._ends[thread] or start >= self._ends[thread][-1][0]:
            self._starts[thread].append(start)
            self._ends[thread].append((end, name))

    def around(self, thread: Any, time: float) -> str:
        place = bisect.bisect_right(self._starts[thread], time) - 1
        if place < 0 or time > self._ends[thread][place][0]:
            return ""
        return self._ends[thread][place][1]


def _attention_ops(events: list[dict[str, Any]]) -> _Intervals:
    ops = [event for event in events if event.get("cat") == "cpu_op" and "attention" in event["name"].lower()]
    intervals = _Intervals()
    for event in sorted(ops, key=lambda event: event["ts"]):
        intervals.add(event["tid"], event["ts"], event["ts"] + event["dur"], event["name"])
    return intervals
