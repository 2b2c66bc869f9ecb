"""The correctness gate: logits and gradients of a few texts against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.subject import GateError

FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_LARGEST_LIMIT = 0.1  # a limit near 1 would let zeros pass
ROWS = 4


@dataclass(frozen=True)
class Answer:
    """Logits [ROWS, labels], and the gradients of some parameters by name."""

    logits: Tensor
    gradients: dict[str, Tensor]


def answer(model: nn.Module, inputs: dict[str, Any]) -> Answer:
    """Run forward and backward in evaluation mode.

    The gradients are those of the position bias, of the first and last parameters of the encoder and of the head: every
    token and every layer is behind the first.
    """
    model.eval()
    model.zero_grad(set_to_none=True)
    output = model(**inputs)
    output.loss.backward()
    gradients = {
        name: parameter.grad.detach().double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name.endswith(_CHECKED)
    }
    model.zero_grad(set_to_none=True)
    return Answer(output.logits.detach().double(), gradients)


_CHECKED = (
    "encoder.block.0.layer.0.SelfAttention.q.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder.final_layer_norm.weight",
    "out_proj.weight",
)


def check(got: Answer, truth: Answer, simple: Answer | None) -> float:
    """Return the share of the tolerance that the worst error takes.

    The relative error `norm(x - truth) / norm(truth)` may be 2 times that of plain PyTorch in the same type for the
    logits, 3 times for gradients, and 10 % at most.

    Args:
        got: The implementation's.
        truth: The same weights in float64.
        simple: Plain PyTorch's in the type of the implementation; None for 10 % alone.

    Raises:
        GateError: An error is beyond its limit, or something is not finite.
    """
    if set(got.gradients) != set(truth.gradients) or len(got.gradients) < len(_CHECKED):
        raise GateError(f"gradients of {sorted(got.gradients)}, expected those of {sorted(truth.gradients)}")
    worst = 0.0
    for name, value, true, plain in _parts(got, truth, simple):
        limit = _LARGEST_LIMIT
        if plain is not None:
            factor = FORWARD_FACTOR if name == "logits" else GRADIENT_FACTOR
            # Where plain PyTorch happens to be all but exact, twice its error would be no tolerance at all.
            limit = min(max(factor * _error(plain, true), 16 * torch.finfo(torch.float32).eps), limit)
        error = _error(value, true)
        if not error <= limit:
            raise GateError(f"{name} is off by {error:.2e} of its norm, more than the {limit:.2e} allowed")
        worst = max(worst, error / limit)
    return worst


def _parts(got: Answer, truth: Answer, simple: Answer | None) -> list[tuple[str, Tensor, Tensor, Tensor | None]]:
    parts = [("logits", got.logits, truth.logits, None if simple is None else simple.logits)]
    for name, value in got.gradients.items():
        parts.append((name, value, truth.gradients[name], None if simple is None else simple.gradients[name]))
    return parts


def _error(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).norm() / truth.norm())
