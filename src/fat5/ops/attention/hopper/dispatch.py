"""The backend `hopper`: its own kernels where they apply and have passed their comparison, else the portable ones."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings

import torch
from torch import Tensor

from fat5.ops.attention import launch as portable
from fat5.ops.attention.hopper.configuration import Configuration, backward_configuration, forward_configuration
from fat5.ops.attention.hopper.support import backward_refused, plannable, refused
from fat5.ops.attention.problem import Gradients, Problem
from fat5.ops.dependent_launch import capability

CAPABILITY = (9, 0)
_TAKE_OVER = "the portable kernels take over"
_verdicts: dict[tuple[Configuration, torch.device], str | None] = {}
_warned: set[str] = set()
_without_plans: set[torch.device] = set()  # where making one has failed
_lock = threading.Lock()


@functools.cache
def missing_interface() -> str | None:
    """Return why this Triton cannot compile the kernels, or None. Other versions than were tried move Gluon's
    interface."""
    try:
        from fat5.ops.attention.hopper import launch  # noqa: F401
    except Exception as error:  # whatever a moved interface raises
        return f"this Triton's Gluon does not fit: {_first_line(error)}"
    return None


def unavailable() -> str | None:
    """Return why the Hopper kernels run on no tensor here, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != CAPABILITY:
        return f"its kernels are for compute capability 9.0 (Hopper), and the GPU's is {'.'.join(map(str, capability))}"
    return missing_interface()


def run_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output and the log2-sum-exp of the scores; see `custom_ops.define_ops`."""
    problem = _with_sound_plan(problem)
    if _runs_here(problem) and refused(problem) is None:
        configuration = forward_configuration(problem)
        if verdict(configuration, problem.q.device) is None:
            from fat5.ops.attention.hopper import launch

            try:
                return launch.run_forward(problem, configuration)
            except Exception as error:
                _give_up(configuration, problem.q.device, error)
    return portable.run_forward(problem)


def run_backward(
    problem: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Write the gradients of q, k and v, and return them and, if asked for, that of the bias.

    Both kinds of kernels share one form of `lse`.
    """
    problem = _with_sound_plan(problem)
    # A broadcast gradient, such as that of a sum, has strides of 0.
    grad_out = grad_out if grad_out.stride(-1) == 1 and 0 not in grad_out.stride() else grad_out.contiguous()
    if _runs_here(problem) and backward_refused(problem, grad_out, bias_grad) is None:
        configuration = backward_configuration(problem, bias_grad, torch.are_deterministic_algorithms_enabled())
        if verdict(configuration, problem.q.device) is None:
            from fat5.ops.attention.hopper import launch

            try:
                return launch.run_backward(problem, configuration, grad_out, out, lse, gradients)
            except Exception as error:
                _give_up(configuration, problem.q.device, error)
    return portable.run_backward(problem, grad_out, out, lse, bias_grad, gradients)


def plan_size(problem: Problem, *, backward: bool) -> int:
    """Return the length of the plan that `make_plan` returns."""
    if not _runs_here(problem) or not plannable(problem):
        return 0
    from fat5.ops.attention.hopper import launch

    return launch.plan_size(problem, backward=backward)


def make_plan(problem: Problem, *, backward: bool) -> Tensor:
    """Return the plan of calls with a problem's sizes, lengths and bias; empty where the kernels take no such calls.

    Where it cannot be made, calls do without plans from then on: torch.compile relies on the length alone.
    """
    size, device = plan_size(problem, backward=backward), problem.q.device
    if size > 0 and device not in _without_plans:
        from fat5.ops.attention.hopper import launch

        try:
            return launch.make_plan(problem, backward=backward)
        except Exception as error:  # whatever the compiler or the driver raise
            if isinstance(error, torch.OutOfMemoryError):
                raise
            _without_plans.add(device)
            _warn("plans", f"hopper attention: {_first_line(error)}; each call makes for itself what a plan would hold")
    return torch.empty(size, dtype=torch.int32, device=device)


def _with_sound_plan(problem: Problem) -> Problem:
    if problem.plan is None or problem.q.device not in _without_plans:
        return problem
    return dataclasses.replace(problem, plan=None)


def _runs_here(problem: Problem) -> bool:
    """Whether there is work, and the tensors' own card is a Hopper."""
    if problem.q.numel() == 0 or problem.k.numel() == 0 or problem.q.device.type != "cuda":
        return False
    return capability(problem.q.device) == CAPABILITY and missing_interface() is None


def verdict(configuration: Configuration, device: torch.device) -> str | None:
    """Return why a configuration must not be used on a device, or None. Compares it with the portable kernels once.

    The comparison waits for the device, so it cannot run inside a CUDA graph's capture: a configuration not seen before
    then falls to the portable kernels, in this graph alone.
    """
    key = (configuration, device)
    if key in _verdicts:
        return _verdicts[key]
    if torch.cuda.is_current_stream_capturing():
        reason = "it was not used before this CUDA graph's capture, where it cannot be compared"
        _warn(
            "capture",
            f"hopper attention ({configuration}): {reason}; the graph holds the portable kernels. Run once first.",
        )
        return reason
    with _lock:
        if key not in _verdicts:
            found = examine(configuration, device)
            if found is not None and found.startswith(torch.OutOfMemoryError.__name__):
                return found  # it says nothing about the kernels: compare again next time
            _verdicts[key] = found
            if found is not None:
                _warn(str(configuration), f"hopper attention ({configuration}): {found}; {_TAKE_OVER}")
    return _verdicts[key]


def examine(configuration: Configuration, device: torch.device) -> str | None:
    """Compare a configuration with the portable kernels now, and return what is wrong with it."""
    try:
        from fat5.ops.attention.hopper.self_check import compare

        with torch.no_grad():
            compare(configuration, device)
    except Exception as error:  # whatever the compiler, the driver or a mismatch raise
        return _first_line(error)
    return None


def _give_up(configuration: Configuration, device: torch.device, error: Exception) -> None:
    """Leave a configuration to the portable kernels from now on; where memory was short, only this once."""
    if isinstance(error, torch.OutOfMemoryError):
        return
    _verdicts[configuration, device] = _first_line(error)
    _warn(str(configuration), f"hopper attention ({configuration}): {_first_line(error)}; {_TAKE_OVER}")


def _warn(about: str, message: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
