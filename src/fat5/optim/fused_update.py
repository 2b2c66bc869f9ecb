"""The update of AdamWScale in a few launches: which tensors share one, tables of their addresses, the launches."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fat5.ops.attention.backends import BACKENDS
from fat5.optim.addresses import Addresses, addresses_of
from fat5.optim.torch_updates import MIN_SCALE, Entry, Settings

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from fat5.optim import kernels

    _TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_VECTOR_BYTES = 16
_SCALARS_BLOCK, _CLIP_BLOCK = 1024, 4096

Work = Sequence[tuple[Settings, list[Entry]]]


@dataclass(frozen=True)
class Launch:
    """How tensors are cut; a program of the update takes a block, one of the sums a chunk of several blocks.

    Args:
        block: Elements of a block, a power of two.
        blocks_a_chunk: Blocks of a chunk.
        warps: Warps a program.
    """

    block: int = 2048
    blocks_a_chunk: int = 8
    warps: int = 8

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return self.block * self.blocks_a_chunk


LAUNCH = Launch()


@functools.cache
def unavailable() -> str | None:
    """Return why the kernels cannot run on this machine, None if they can."""
    return BACKENDS["triton"]()


def refuses(parameter: Tensor) -> str | None:
    """Return why the kernels cannot update this parameter, None if they can."""
    if type(parameter) not in (torch.nn.Parameter, Tensor):
        return f"the kernels take plain tensors, and a parameter is a {type(parameter).__name__}"
    if parameter.dtype not in DTYPES:
        return f"the kernels take bfloat16, float16 and float32 parameters, not {parameter.dtype}"
    if not parameter.is_cuda and not triton.knobs.runtime.interpret:
        return f"a parameter is on {parameter.device}"
    if not parameter.is_contiguous():
        return f"a parameter of shape {tuple(parameter.shape)} is not contiguous"
    return None


def refuses_entry(entry: Entry) -> str | None:
    """Return why the kernels cannot take this parameter with its gradient and its state, None if they can."""
    parameter, grad, state = entry
    reason = refuses(parameter)
    if reason is not None:
        return reason
    first, dtype = state["exp_avg"], parameter.dtype
    if grad.dtype not in DTYPES:
        return f"the kernels take bfloat16, float16 and float32 gradients, not {grad.dtype}"
    if first.dtype != dtype or first.numel() != parameter.numel() or first.is_cuda != parameter.is_cuda:
        return f"a parameter is {_described(parameter)} now, but its state {_described(first)}"
    if not first.is_contiguous():
        return f"the state of a parameter of shape {tuple(parameter.shape)} is not contiguous"
    return None


def settings_of(group: Mapping[str, Any]) -> Settings:
    """Return the settings of one of an optimizer's groups."""
    beta1, beta2 = group["betas"]
    return Settings(group["lr"], float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


class _Key(NamedTuple):
    """What the tensors of one launch have in common; `betas` numbers the different (beta1, beta2, eps) of a step."""

    device: torch.device
    dtype: torch.dtype
    grad_dtype: torch.dtype
    kahan: bool
    aligned: bool
    betas: int


@dataclass
class _Batch:
    """The tensors of one launch: rows of the table, addresses of gradients, and how many are of which settings."""

    rows: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)  # place of the settings, tensors
    parameters: list[Tensor] = field(default_factory=list)
    chunks: int = 0


@dataclass(frozen=True)
class Plan:
    """The launches of a step.

    Attributes:
        batches: The tensors of each launch.
        settings: Of each group that has gradients.
        launch: How the tensors are cut.
        work: The tensors, held until the launches: a gradient may be a copy made for them.
        groups: Which of the optimizer's groups have gradients.
        addresses: What tells whether the plan serves again, None if it does not.
    """

    batches: dict[_Key, _Batch]
    settings: list[Settings]
    launch: Launch
    work: Work = ()
    groups: list[int] = field(default_factory=list)
    addresses: Addresses | None = None


@dataclass(frozen=True)
class _Table:
    """The tables of a batch on the device, and what they hold."""

    batch: _Batch
    stream: int
    rows: Tensor  # int64 [tensors, COLUMNS]
    gradients: Tensor  # int64 [tensors]
    owners: Tensor  # int32 [chunks]


class FusedUpdate:
    """The launches of one optimizer.

    The tables are made on the device, from numbers that travel as arguments of kernels, and kept until an address
    changes. So nothing waits, nothing is read from host memory later, and a step can be captured in a CUDA graph.
    """

    def __init__(self) -> None:
        self.launch = LAUNCH
        self._tables: dict[_Key, _Table] = {}
        self._in_graphs: list[_Table] = []  # a graph knows their addresses, so they stay
        self._last: Plan | None = None

    def recall(self, groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Tensor]]) -> Plan | None:
        """Return the last plan with the settings of now, None if any tensor of these groups lies elsewhere now."""
        last = self._last
        if last is None or last.launch != self.launch or last.addresses != addresses_of(groups, state):
            return None
        return replace(last, settings=[settings_of(groups[place]) for place in last.groups])

    def plan(self, work: Work) -> Plan:
        """Sort all tensors into as few launches as their types allow."""
        return Plan(self._batches(work), [settings for settings, _ in work], self.launch, work)

    def remember(self, plan: Plan, groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Keep a plan that covers all gradients of these groups."""
        used = [n for n, group in enumerate(groups) if any(x.grad is not None for x in group["params"])]
        addresses = addresses_of(groups, state)
        # Without the work: gradients that are dropped later give their memory back.
        self._last = None if addresses is None else replace(plan, work=(), groups=used, addresses=addresses)

    def clip(self, plan: Plan, max_norm: float) -> list[tuple[Tensor, Tensor]]:
        """Return for each device the norm of all its gradients and the factor that brings it to at most `max_norm`.

        Both are 0-d float32; nothing is multiplied yet.
        """
        by_device: dict[torch.device, list[tuple[_Key, _Batch]]] = {}
        for key, batch in plan.batches.items():
            by_device.setdefault(key.device, []).append((key, batch))
        results = []
        for device, batches in by_device.items():
            with _on(device):
                count = sum(batch.chunks for _, batch in batches)
                sums = torch.empty(count, dtype=torch.float32, device=device)
                result = torch.empty(2, dtype=torch.float32, device=device)
                starts = itertools.accumulate((batch.chunks for _, batch in batches), initial=0)
                for (key, batch), start in zip(batches, starts, strict=False):
                    table = self._table(key, batch)
                    self._square_sums(table.gradients, 1, table, sums[start:], key.grad_dtype, key.aligned)
                kernels.clip_kernel[(1,)](sums, result, count, max_norm, BLOCK=_CLIP_BLOCK, num_warps=16)
                results.append((result[0], result[1]))
        return results

    def step(self, plan: Plan, grad_scale: Tensor | None) -> None:
        """Update all parameters and their state; the gradients count `grad_scale` times."""
        for key, batch in plan.batches.items():
            with _on(key.device):
                scale = None if grad_scale is None else grad_scale.to(key.device, torch.float32, non_blocking=True)
                self._step(key, batch, plan.settings, self._table(key, batch), scale)
            torch.autograd.graph.increment_version(batch.parameters)

    def _step(
        self, key: _Key, batch: _Batch, all_settings: list[Settings], table: _Table, grad_scale: Tensor | None
    ) -> None:
        sums = torch.empty(batch.chunks, dtype=torch.float32, device=key.device)
        scalars = torch.empty((len(batch.gradients), kernels.SCALARS.value), dtype=torch.float32, device=key.device)
        self._square_sums(table.rows, kernels.COLUMNS.value, table, sums, key.dtype, key.aligned)
        first = 0
        for place, count in batch.counts:
            settings = all_settings[place]
            lr = _learning_rate(settings.lr, key.device)
            kernels.scalars_kernel[(count,)](
                table.rows,
                sums,
                scalars,
                lr,
                first,
                settings.weight_decay,
                _log(settings.beta1),
                _log(settings.beta2),
                LR_IS_TENSOR=isinstance(lr, Tensor),
                MIN_SCALE=MIN_SCALE,
                CHUNK=self.launch.chunk,
                BLOCK=_SCALARS_BLOCK,
            )
            first += count
        if not batch.chunks:
            return
        settings = all_settings[batch.counts[0][0]]
        kernels.update_kernel[(batch.chunks * self.launch.blocks_a_chunk,)](
            table.rows,
            table.gradients,
            table.owners,
            scalars,
            grad_scale,
            1.0 - settings.beta1,
            settings.beta2,
            1.0 - settings.beta2,
            settings.eps,
            TYPE=_TYPES[key.dtype],
            GRAD_TYPE=_TYPES[key.grad_dtype],
            KAHAN=key.kahan,
            # 16 bytes of the float32 moment; more for the narrower tensors would move them between threads
            VECTOR=_VECTOR_BYTES // 4 if key.aligned else 1,
            BLOCK=self.launch.block,
            BLOCKS_A_CHUNK=self.launch.blocks_a_chunk,
            num_warps=self.launch.warps,
        )

    def _square_sums(
        self, addresses: Tensor, stride: int, table: _Table, sums: Tensor, dtype: torch.dtype, aligned: bool
    ) -> None:
        if not table.batch.chunks:
            return
        kernels.square_sums_kernel[(table.batch.chunks,)](
            addresses,
            table.rows,
            table.owners,
            sums,
            stride,
            TYPE=_TYPES[dtype],
            VECTOR=_VECTOR_BYTES // dtype.itemsize if aligned else 1,
            BLOCK=self.launch.block,
            BLOCKS_A_CHUNK=self.launch.blocks_a_chunk,
            num_warps=self.launch.warps,
        )

    def _batches(self, work: Work) -> dict[_Key, _Batch]:
        batches: dict[tuple[Any, ...], _Batch] = {}
        numbers: dict[tuple[float, float, float], int] = {}
        chunk = self.launch.chunk
        for place, (settings, entries) in enumerate(work):
            betas = numbers.setdefault((settings.beta1, settings.beta2, settings.eps), len(numbers))
            for parameter, grad, state in entries:
                compensation = state.get("compensation")
                low = 0 if compensation is None else compensation.data_ptr()
                addresses = (parameter.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(), low)
                gradient = grad.data_ptr()
                aligned = (addresses[0] | addresses[1] | addresses[2] | low | gradient) % _VECTOR_BYTES == 0
                kind = (parameter.device, parameter.dtype, grad.dtype, compensation is not None, aligned, betas)
                batch = batches.get(kind)
                if batch is None:
                    batch = batches[kind] = _Batch()
                numel = parameter.numel()
                batch.rows += (*addresses, state["step"].data_ptr(), numel, batch.chunks, 0)
                batch.gradients.append(gradient)
                batch.parameters.append(parameter)
                batch.chunks += -(-numel // chunk)
                if batch.counts and batch.counts[-1][0] == place:
                    batch.counts[-1] = (place, batch.counts[-1][1] + 1)
                else:
                    batch.counts.append((place, 1))
        return {_Key(*kind): batch for kind, batch in batches.items()}

    def _table(self, key: _Key, batch: _Batch) -> _Table:
        """Return the tables of a batch: the last ones where they still hold, else new ones."""
        on_gpu = key.device.type == "cuda"
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(key.device).cuda_stream if on_gpu else 0
        table = self._tables.get(key)
        # Tables are made and freed in the order of one stream; those of a graph are never freed.
        known = table is not None and (capturing or table.stream == stream)
        if table is None or not known or table.batch.rows != batch.rows:
            table = _new_table(batch, stream, key.device)
        elif table.batch.gradients != batch.gradients:
            table = replace(table, batch=batch, gradients=_filled(batch.gradients, key.device))
        if capturing:
            self._in_graphs.append(table)
        else:
            self._tables[key] = table
        return table


def _new_table(batch: _Batch, stream: int, device: torch.device) -> _Table:
    rows = _filled(batch.rows, device).view(-1, kernels.COLUMNS.value)
    first_chunks = rows[:, kernels.FIRST_CHUNK.value].contiguous()
    chunks = torch.arange(batch.chunks, device=device)
    owners = torch.searchsorted(first_chunks, chunks, right=True, out_int32=True) - 1
    return _Table(batch, stream, rows, _filled(batch.gradients, device), owners)


def _filled(numbers: list[int], device: torch.device) -> Tensor:
    """Return these numbers as int64 on a device, without a copy from host memory."""
    filled = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(list(filled.unbind()), numbers)
    return filled


def _learning_rate(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return what the kernel takes: a tensor on a GPU as it is, which a graph then reads at each replay."""
    if isinstance(lr, Tensor) and lr.is_cuda:
        return lr.to(device, non_blocking=True)
    return float(lr)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
