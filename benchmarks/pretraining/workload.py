"""What a step computes: model, batch, and its operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

BACKWARD = 2.5
"""Operations of attention's backward over those of its forward."""


@dataclass(frozen=True)
class Workload:
    """A model and a batch of rows without padding.

    Attributes:
        table: Part of the case.
        d_model: Width.
        d_ff: Inner width of the gated feed-forward layers.
        heads: Attention heads.
        head_dim: Width of a head.
        layers: Layers of each stack.
        vocab_size: Rows of the embedding and of the LM head, untied.
        batch: Rows.
        encoder: Tokens of an encoder row.
        decoder: Tokens of a decoder row.
        checkpointing: Recompute activations in the backward.
    """

    table: str
    d_model: int = 512
    d_ff: int = 2048
    heads: int = 8
    head_dim: int = 64
    layers: int = 12
    vocab_size: int = 32_768
    batch: int = 32
    encoder: int = 1024
    decoder: int = 512
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a batch, both sides."""
        return self.batch * (self.encoder + self.decoder)

    @property
    def flops(self) -> float:
        """Matrix operations of forward and backward: 6 a weight and token, and attention at 3.5 times its forward.

        Encoder and decoder weights see their own tokens, the keys and values of cross-attention the encoder's, the LM
        head the decoder's. Recomputation counts for nothing.
        """
        inner = self.heads * self.head_dim
        projection, feed_forward = self.d_model * inner, 3 * self.d_model * self.d_ff
        encoder, decoder = self.batch * self.encoder, self.batch * self.decoder
        weights = self.layers * (4 * projection + feed_forward) * encoder
        weights += self.layers * (4 * projection + 2 * projection + feed_forward) * decoder
        weights += self.layers * 2 * projection * encoder
        weights += self.vocab_size * self.d_model * decoder
        pairs = self.encoder**2 + self.decoder**2 / 2 + self.encoder * self.decoder
        attention = 4 * self.batch * inner * pairs * self.layers
        return 6.0 * weights + (1 + BACKWARD) * attention

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that name it."""
        names = ("table", "d_model", "heads", "head_dim", "layers", "batch", "encoder", "decoder", "checkpointing")
        return {name: getattr(self, name) for name in names}

    def small(self) -> Workload:
        """The same model with two short rows, for the gate."""
        return replace(self, batch=2, encoder=min(self.encoder, 96), decoder=min(self.decoder, 48))

    def draw(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Return random input_ids [batch, encoder] and labels [batch, decoder]."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, self.vocab_size, (self.batch, self.encoder), generator=generator)
        labels = torch.randint(3, self.vocab_size, (self.batch, self.decoder), generator=generator)
        return {"input_ids": ids.to(device), "labels": labels.to(device)}


WORKLOADS = {
    "8x64": Workload("8x64"),
    "4x128": Workload("4x128", heads=4, head_dim=128),
    "base": Workload("base", d_model=768, d_ff=3072, heads=12),
    "long": Workload("long", batch=1, encoder=65_536, decoder=1024, checkpointing=True),
    "smoke": Workload(
        "smoke", d_model=64, d_ff=96, heads=2, head_dim=32, layers=1, vocab_size=512, batch=2, encoder=64, decoder=32
    ),
}
"""By the name of the table; "smoke" only shows that all parts run."""
