"""A message of Inductor that takes longer to write than a model takes to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

FIRST_LAZY = (2, 13)
"""The first release known to write the message only where someone reads it."""

_SHOWN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def shorten(version: str = torch.__version__) -> None:
    """Have Inductor name the arguments of an operator that it has no code for by their types alone.

    At its first sight of each custom op, Inductor before `FIRST_LAZY` writes a message with all arguments, and each of
    them with whatever it was computed from, once for every path that leads there, whether the message is logged or not.
    In a model that is a chain of custom ops, a layer has about twelve paths, so that the loss behind six layers takes
    minutes to compile and the loss behind twelve for ever.
    """
    if tuple(int(part) for part in version.split(".")[:2]) >= FIRST_LAZY:
        return
    try:
        from torch._inductor.exc import OperatorIssue
    except ImportError:  # it is private, and may go without notice
        return
    OperatorIssue.operator_str = staticmethod(operator_str)  # type: ignore[method-assign]


def operator_str(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an operator and its arguments, tensors by the name of their type."""
    lines = [f"target: {target}", *(f"args[{n}]: {_shown(x)}" for n, x in enumerate(args))]
    lines += [f"{name}: {_shown(x)}" for name, x in kwargs.items()]
    return "\n".join(f"  {line}" for line in lines)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, _SHOWN) else type(value).__name__
