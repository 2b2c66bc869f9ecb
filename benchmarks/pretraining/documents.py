"""Real documents' lengths through the package's own collator and loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.collator.documents import RandomDocuments, special_tokens
from benchmarks.pretraining.workload import Workload
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.loader import data_loader
from fat5.training.trainer import METADATA


def packed_batches(
    workload: Workload, device: torch.device, *, workers: int, documents: int
) -> Iterator[dict[str, Any]]:
    """Yield packed batches of log-normal documents, on the device; the copy is not waited for.

    They have the workload's encoder slots, and the decoder slots that the mixture fills at the same rate. Each has
    `num_tokens`, its real tokens.
    """
    config = DenoisingConfig(
        max_input_length=workload.encoder,
        max_target_length=workload.encoder,
        encoder_budget=workload.batch * workload.encoder,
    )
    dataset = DenoisingDataset(RandomDocuments(documents), special_tokens(), config)
    loader: Any = data_loader(dataset, num_workers=workers, pin_memory=device.type == "cuda")
    for batch in loader:
        inputs = {
            name: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
            for name, value in batch.items()
            if name not in METADATA
        }
        yield {**inputs, "num_tokens": batch["num_input_tokens"] + batch["num_target_tokens"]}
