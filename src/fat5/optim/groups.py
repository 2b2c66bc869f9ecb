"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# Tables of biases by distance are two-dimensional, but they shift scores: they are biases all the same.
_POSITION_BIASES = ("relative_attention_bias",)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into a group that decays and one that does not.

    Matrices decay, the embedding included. Norm weights, biases and all other parameters of fewer than two dimensions
    do not, nor do relative position biases, which are known by their name in T5's state dict. A tied parameter comes
    once.

    Args:
        model: The model; parameters that require no gradient are left out.
        weight_decay: The decay of the first group.

    Returns:
        One or two dicts of `params` and `weight_decay` for an optimizer, the decayed first; no empty group.

    Raises:
        ValueError: The model has no trainable parameter.
    """
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim > 1 and not any(part in _POSITION_BIASES for part in name.split("."))
        (decayed if is_matrix else kept).append(parameter)
    if not decayed and not kept:
        raise ValueError(f"parameter_groups: {type(model).__name__} has no parameter that requires a gradient")
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
