"""The gradients by hidden states and by the head's weight, added up over blocks of rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fat5.ops.loss.rows import accumulation_dtype


class HiddenGradients:
    """The gradients by hidden states and weight, as far as they are wanted.

    Attributes:
        wanted: Whether there is anything to add.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, hidden_gradient: bool, weight_gradient: bool) -> None:
        wide = accumulation_dtype(weight.dtype)
        self.wanted = hidden_gradient or weight_gradient
        self._hidden_gradient, self._weight_gradient = hidden_gradient, weight_gradient
        self._hidden = hidden.new_zeros(hidden.shape if hidden_gradient else 0)
        self._weight = weight.new_empty(weight.shape if weight_gradient else 0, dtype=wide)
        self._started = False  # the first block is stored, not added

    def add(self, rows: slice | Tensor, dlogits: Tensor, states: Tensor, weight: Tensor, wide: Tensor) -> None:
        """Add a block of rows.

        Args:
            rows: Where they lie.
            dlogits: [R, V], the gradient by their logits, in the type of the hidden states.
            states: [R, D], their hidden states, finite on ignored rows.
            weight: [V, D].
            wide: The same as `dlogits`, in the accumulation type if there is such a copy.
        """
        if self._hidden_gradient and isinstance(rows, slice):
            torch.mm(dlogits, weight, out=self._hidden[rows])
        elif self._hidden_gradient:
            self._hidden[rows] = dlogits @ weight
        if self._weight_gradient:
            self._add_to_weight(dlogits, states, wide)
            self._started = True

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the gradient by the hidden states [N, D], in their type, and that by the weight [V, D].

        The latter is in the accumulation type, so that it is rounded once. One that is not wanted is empty.
        """
        return self._hidden, self._weight if self._started else self._weight.zero_()

    def _add_to_weight(self, dlogits: Tensor, states: Tensor, wide: Tensor) -> None:
        total, dtype = self._weight, self._weight.dtype
        if states.dtype == dtype or not states.is_cuda:
            left, right = wide.to(dtype).t(), states.to(dtype)
            torch.addmm(total, left, right, out=total) if self._started else torch.mm(left, right, out=total)
        elif not self._started:
            torch.mm(dlogits.t(), states, out_dtype=dtype, out=total)
        elif adds_in_place(states.dtype, states.device):
            torch.addmm(total, dlogits.t(), states, out_dtype=dtype, out=total)
        else:
            total += torch.mm(dlogits.t(), states, out_dtype=dtype)


@functools.cache
def adds_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch adds the product of two matrices of a short type to one in float32, in that one's memory.

    Some versions want the summand in the short type.
    """
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    factor = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
