"""The texts to classify, and the body that every implementation has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.workload import half_padding

NUM_LABELS = 3
EOS = 1
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 128},
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "vocab_size": 32128},
    "base": {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "vocab_size": 32128},
    "large": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16, "vocab_size": 32128},
}
"""The bodies of T5 v1.1, with gated feed-forward layers; `tiny` is for tests."""


@dataclass(frozen=True)
class Workload:
    """A batch of texts and the body that reads it.

    Attributes:
        size: A name in SIZES.
        dtype: A name in `benchmarks.attention.workload.DTYPES`.
        batch: Texts.
        length: Tokens of a row.
        padded: Half of the batch is padding.
        dropout: T5's dropout rate, in training.
    """

    size: str
    dtype: str
    batch: int
    length: int
    padded: bool
    dropout: float = 0.0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return half_padding(self.batch, self.length) if self.padded else (self.length,) * self.batch

    @property
    def settings(self) -> dict[str, Any]:
        """What every implementation's configuration says."""
        return {
            **SIZES[self.size],
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": self.dropout,
            "num_labels": NUM_LABELS,
            "decoder_start_token_id": 0,
        }

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row that name the workload."""
        return {
            "size": self.size,
            "dtype": self.dtype,
            "batch": self.batch,
            "length": self.length,
            "padding": 0.5 if self.padded else 0.0,
            "dropout": self.dropout,
        }


@dataclass(frozen=True)
class Texts:
    """The batch.

    Attributes:
        input_ids: [B, L]; each text ends in its only EOS, padding on the right is 0.
        attention_mask: [B, L], or None where all tokens are real.
        labels: [B].
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor

    @staticmethod
    def draw(workload: Workload, device: torch.device, seed: int = 0) -> Texts:
        """Draw random texts; equal seeds give equal texts on one device."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (workload.batch, workload.length)
        ids = torch.randint(EOS + 1, SIZES[workload.size]["vocab_size"], shape, generator=generator, device=device)
        lengths = torch.tensor(workload.lengths, device=device)[:, None]
        slots = torch.arange(workload.length, device=device)
        ids = torch.where(slots == lengths - 1, EOS, torch.where(slots < lengths, ids, 0))
        labels = torch.randint(NUM_LABELS, (workload.batch,), generator=generator, device=device)
        return Texts(ids, (slots < lengths).long() if workload.padded else None, labels)

    def padded_inputs(self, rows: int | None = None) -> dict[str, Tensor]:
        """Return what a model is called with, of the first rows alone if asked for."""
        inputs = {"input_ids": self.input_ids[:rows], "labels": self.labels[:rows]}
        return inputs if self.attention_mask is None else inputs | {"attention_mask": self.attention_mask[:rows]}

    def packed_inputs(self, rows: int | None = None) -> dict[str, Any]:
        """Return the same texts side by side."""
        ids = self.input_ids[:rows]
        real = torch.ones_like(ids) if self.attention_mask is None else self.attention_mask[:rows]
        offsets = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
        packed = {"input_ids": ids[real.bool()], "cu_seqlens": offsets, "max_seqlen": ids.shape[1]}
        return packed | {"labels": self.labels[:rows]}
