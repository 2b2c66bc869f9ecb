"""What attention asks of a cache: the keys and values of one layer, kept from call to call."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyValues(Protocol):
    """Keys and values of one attention layer, each [B, L, H, D]."""

    @property
    def joined(self) -> Tensor | None:
        """Self-attention: the weights of q, k and v one below the other, to be multiplied by at once, or None.

        A step of one token is bound by the number of its kernels. The parameters stay three.
        """
        ...

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, n, H, D] behind those that are there, and return all.

        A cache of fixed length returns its free slots too, behind the others: causal attention hides them.
        """
        ...

    def stored(self) -> tuple[Tensor, Tensor] | None:
        """Return what is there, or None before the first `append`.

        Cross-attention makes keys and values once. Their batch may be smaller than that of the queries: then each row
        is that of as many queries in a row, such as the beams of one input.
        """
        ...
