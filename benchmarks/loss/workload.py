"""What the losses are measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Workload:
    """A mean cross-entropy with z-loss, and its gradients.

    Attributes:
        rows: Tokens.
        vocab: Logits a token.
        width: Of the hidden states; 0 where the logits are given.
        dtype: A name in DTYPES.
        ignored: Share of the tokens whose label is ignored.
        z_loss: Weight of the squared log-sum-exp.
    """

    rows: int
    vocab: int
    width: int = 0
    dtype: str = "bf16"
    ignored: float = 0.0
    z_loss: float = 1e-4

    @property
    def moved_bytes(self) -> float | None:
        """Bytes of given logits, read once, and of their gradient, written once; an ignored row is written alone."""
        one_pass = self.rows * self.vocab * DTYPES[self.dtype].itemsize
        return None if self.width else one_pass * (2 - self.ignored)

    @property
    def flops(self) -> float | None:
        """Of the three matrix products around the loss; ignored rows count."""
        return 6.0 * self.rows * self.vocab * self.width if self.width else None

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row that name the workload."""
        return {
            "rows": self.rows,
            "width": self.width,
            "vocab": self.vocab,
            "dtype": self.dtype,
            "ignored": self.ignored,
        }


@dataclass(frozen=True)
class Inputs:
    """Tensors that all implementations share.

    Attributes:
        leaves: The logits [N, V]; or the hidden states [N, D] and the head's weight [V, D].
        labels: int64 [N].
    """

    leaves: tuple[Tensor, ...]
    labels: Tensor

    @staticmethod
    def draw(workload: Workload, device: torch.device, seed: int = 0) -> Inputs:
        """Draw random inputs, the logits with a variance of 1; equal seeds give equal inputs on one device."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype = DTYPES[workload.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        if workload.width:
            weight = normal(workload.vocab, workload.width).mul_(workload.width**-0.5)
            leaves: tuple[Tensor, ...] = (normal(workload.rows, workload.width), weight)
        else:
            leaves = (normal(workload.rows, workload.vocab),)
        labels = torch.randint(workload.vocab, (workload.rows,), generator=generator, device=device)
        dropped = torch.rand(workload.rows, generator=generator, device=device) < workload.ignored
        return Inputs(leaves, labels.masked_fill(dropped, IGNORE_INDEX))
