"""Token files: Arrow IPC files with one column `input_ids`, one document a row, one record batch a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fat5.data.manifest import Shard
from fat5.errors import DataError
from fat5.files import atomic_file

TOKEN_COLUMN = "input_ids"
# Offsets inside a row group are 32-bit in Arrow's list type.
MAX_SHARD_TOKENS = 2**31 - 1


def write_shard(path: str | os.PathLike[str], tokens: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> Shard:
    """Write one token file, whole or not at all.

    Args:
        path: The file.
        tokens: Pieces of the flat token ids, of one unsigned type; joined in order.
        lengths: Pieces of the documents' lengths, int64; joined in order.

    Raises:
        DataError: More tokens than one file can hold.
        OSError: The file cannot be written, for example since the disk is full.
    """
    import pyarrow
    import pyarrow.ipc

    flat, sizes = np.concatenate(tokens), np.concatenate(lengths)
    if flat.size > MAX_SHARD_TOKENS:
        raise DataError(
            f"a token file holds at most {MAX_SHARD_TOKENS:,} tokens, got {flat.size:,} in one batch of text"
        )
    offsets = np.zeros(sizes.size + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    column = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(flat))
    batch = pyarrow.record_batch([column], names=[TOKEN_COLUMN])
    with (
        atomic_file(path) as staging,
        pyarrow.OSFile(os.fspath(staging), "wb") as sink,
        pyarrow.ipc.new_file(sink, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    return Shard(Path(path).name, int(sizes.size), int(flat.size))


def map_shard(folder: Path, shard: Shard, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Map one token file into memory without reading its tokens.

    Returns:
        The flat token ids, of type `dtype`, and the documents' offsets into them, int32, one more than documents. Both
        are read-only views of the file.

    Raises:
        DataError: The file is missing, damaged, or differs from what the manifest says of it.
    """
    import pyarrow

    path = folder / shard.file
    if not path.is_file():
        raise DataError(f"{path} is missing, though the manifest names it; make {folder} again with `fat5 pretokenize`")
    try:
        column = _only_column(path)
        offsets = column.offsets.to_numpy()
        tokens = column.values.to_numpy()
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read, it is truncated or damaged: {str(error).splitlines()[0]}") from error
    found = Shard(shard.file, offsets.size - 1, tokens.size)
    if found != shard or tokens.dtype != dtype or (offsets[0], offsets[-1]) != (0, tokens.size):
        raise DataError(
            f"{path} is truncated or damaged: the manifest says {shard.documents:,} documents and {shard.tokens:,} "
            f"tokens of {dtype}, the file has {found.documents:,} and {found.tokens:,} of {tokens.dtype}"
        )
    return tokens, offsets


def _only_column(path: Path) -> Any:
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(os.fspath(path)) as mapped:
        column = pyarrow.ipc.open_file(mapped).get_batch(0).column(TOKEN_COLUMN)
    column.validate()
    return column
