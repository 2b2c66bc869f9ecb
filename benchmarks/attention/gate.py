"""The correctness gate: outputs and gradients of the timed shape against float64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.attention.reference import Answer, attention_answer
from benchmarks.attention.workload import DTYPES, Inputs, Workload
from benchmarks.subject import GateError

FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_LARGEST_LIMIT = 0.1  # a limit near 1 would let zeros pass


class Gate:
    """Compares the first and the last head of every row, at the shape that is timed.

    The relative error `norm(x - truth) / norm(truth)`, with float64 as the truth, may be 2 times that of plain PyTorch
    in the same type for the output, and 3 times for gradients; 10 % at most in any case. NaN never passes.
    """

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self._workload, self._inputs = workload, inputs
        self.heads = tuple(sorted({0, workload.heads - 1}))

    @functools.cache  # noqa: B019  (a gate lives as long as its workload is measured)
    def _answers(self, with_bias: bool) -> tuple[Answer, Answer]:
        arguments = (self._workload, self._inputs, self.heads)
        exact = attention_answer(*arguments, torch.float64, with_bias=with_bias)
        return exact, attention_answer(*arguments, DTYPES[self._workload.dtype], with_bias=with_bias)

    def check(self, answer: Answer, *, with_bias: bool) -> float:
        """Return the share of the tolerance that the worst error takes.

        Args:
            answer: Of the heads `self.heads`; `grad_bias` is None where the implementation gives none.
            with_bias: The implementation adds the bias.

        Raises:
            GateError: An error is beyond its limit, or something is not finite.
        """
        exact, plain = self._answers(with_bias)
        worst = 0.0
        for name in ("out", "grad_q", "grad_k", "grad_v", "grad_bias"):
            got, truth, simple = (getattr(x, name) for x in (answer, exact, plain))
            if got is None:
                continue
            if got.shape != truth.shape:
                raise GateError(f"{name} has shape {list(got.shape)}, expected {list(truth.shape)}")
            factor = FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR
            limit = min(factor * _relative_error(simple, truth), _LARGEST_LIMIT)
            error = _relative_error(got, truth)
            if not error <= limit:
                raise GateError(f"{name} is off by {error:.2e} of its norm, more than the {limit:.2e} allowed")
            worst = max(worst, error / limit)
        return worst


def _relative_error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


@contextlib.contextmanager
def poisoned_memory(device: torch.device, *, python_too: bool) -> Iterator[None]:
    """Have new memory hold NaN, so that an element that nobody writes is seen.

    The caching allocator of a GPU hands out what was just given back: large and small blocks of NaN. With `python_too`,
    what `torch.empty` and its kin return is filled as well; not for code that is being compiled, which would trace it.
    """
    if device.type == "cuda":
        sizes = (2**26,) * 8 + (2**16,) * 64
        blocks = [torch.full((size,), torch.nan, device=device) for size in sizes]
        del blocks
    originals = {(owner, name): getattr(owner, name) for owner, name in _EMPTY} if python_too else {}
    for (owner, name), original in originals.items():
        setattr(owner, name, functools.partial(_filled, original) if owner is torch else _method(original))
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


_EMPTY = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


def _filled(original, *args, **kwargs):
    out = original(*args, **kwargs)
    return out.fill_(torch.nan) if out.is_floating_point() and out.device.type != "meta" else out


def _method(original):
    def new_empty(self, *args, **kwargs):
        return _filled(original, self, *args, **kwargs)

    return new_empty
