"""Runs to be killed: they read endless streams and write a digest of every batch to a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import numpy as np
import torch

from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.loader import data_loader
from fat5.data.streaming_dataset import StreamingDataset
from fat5.data.text_stream import StreamConfig, StreamSource
from fat5.data.token_dataset import TokenDataset
from fat5.files import atomic_file
from tests.data import denoising_reference as reference
from tests.data.small_tokenizer import small_tokenizer

CONFIGS = {
    "packed": DenoisingConfig(max_input_length=64, max_target_length=64, encoder_budget=512, look_ahead=32, seed=11),
    "padded": DenoisingConfig(layout="padded", max_input_length=64, batch_size=8, seed=11),
    "concat": DenoisingConfig(layout="concat", max_input_length=64, batch_size=8, seed=11),
}


def stream(layout: str, folder: str, start_batch: int = 0) -> DenoisingDataset:
    return DenoisingDataset(
        TokenDataset(folder), reference.special_tokens(), CONFIGS[layout], rank=1, world_size=2, start_batch=start_batch
    )


def digests(batches) -> Iterator[str]:
    for batch in batches:
        digest = hashlib.sha256()
        for name, value in sorted(batch.items()):
            array = value.contiguous().numpy() if isinstance(value, torch.Tensor) else np.array(value)
            digest.update(name.encode() + str((array.dtype, array.shape)).encode() + array.tobytes())
        yield digest.hexdigest()


def text_stream() -> StreamingDataset:
    config = DenoisingConfig(layout="padded", max_input_length=128, batch_size=8, seed=11)
    stream = StreamConfig([StreamSource(["fat5:sample"])], shuffle_buffer=50)
    return StreamingDataset(stream, small_tokenizer(), config, rank=1, world_size=2)


def stream_and_save(output: str, num_workers: str) -> None:
    """Write the digests of streamed text, and with each the state behind it."""
    loader = data_loader(text_stream(), num_workers=int(num_workers))
    with open(output, "w", encoding="ascii", buffering=1) as file:  # noqa: PTH123
        for number, digest in enumerate(digests(iter(loader)), start=1):
            with atomic_file(f"{output}.state-{number}") as path:
                torch.save(loader.state_dict(), path)
            file.write(f"{digest}\n")


def main(folder: str, output: str, num_workers: str) -> None:
    runs = {
        layout: digests(iter(data_loader(stream(layout, folder), num_workers=int(num_workers)))) for layout in CONFIGS
    }
    with open(output, "w", encoding="ascii", buffering=1) as file:  # noqa: PTH123
        while True:
            for layout, run in runs.items():
                file.write(f"{layout} {next(run)}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"stored": main, "streamed": stream_and_save}[sys.argv[1]](*sys.argv[2:])
