"""Documents out of local files (plain text, JSON lines, Parquet), with errors that name the place."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

from fat5.errors import DataError, nearest

DocumentUnit = Literal["paragraph", "line", "file"]

_COMPRESSED = (".gz", ".zst")
_FORMATS = (".txt", ".jsonl", ".parquet")
_PARQUET_BATCH = 512


def file_format(path: Path) -> str | None:
    """Return ".txt", ".jsonl" or ".parquet" by the name of `path`, compression aside, or None for other files."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    suffix = name.suffix.lower()
    if suffix not in _FORMATS or (suffix == ".parquet" and name != path):
        return None
    return suffix


def read_file(path: Path, *, documents: DocumentUnit, text_column: str) -> Iterator[str]:
    """Yield the documents of one file of a known format.

    Args:
        path: A file for which `file_format` is not None.
        documents: What a document of a plain text file is; see `read_text_file`.
        text_column: Column of a Parquet file or key of a JSON object that holds the text.

    Raises:
        DataError: The file is damaged, not UTF-8, lacks the column, or holds no document.
    """
    kind = file_format(path)
    if kind == ".txt":
        texts = read_text_file(path, documents=documents)
    elif kind == ".jsonl":
        texts = _read_json_lines(path, text_column)
    else:
        texts = _read_parquet(path, text_column)
    empty = True
    for text in texts:
        empty = False
        yield text
    if empty:
        raise DataError(f"{path} holds no document ({path.stat().st_size:,} bytes)")


def read_text_file(path: Path, *, documents: DocumentUnit) -> Iterator[str]:
    """Yield the documents of a plain text file in UTF-8.

    Args:
        path: A .txt file, or .txt.gz or .txt.zst.
        documents: "paragraph": lines up to the next blank line; "line": each line; "file": the whole file as it is.

    Raises:
        DataError: The file is not UTF-8 (the message names the byte) or its compressed data is damaged.
    """
    if documents == "file":
        lines = list(read_lines(path, keep_ends=True))
        if lines:
            yield "".join(lines)
    elif documents == "line":
        yield from read_lines(path)
    else:
        paragraph: list[str] = []
        for line in read_lines(path):
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield "\n".join(paragraph)
                paragraph = []
        if paragraph:
            yield "\n".join(paragraph)


def text_bytes_estimate(path: Path, text_column: str) -> int | None:
    """Return about how many bytes of text a file holds, or None where only reading it would tell."""
    if path.suffix.lower() in _COMPRESSED:
        return None
    if file_format(path) != ".parquet":
        return path.stat().st_size
    metadata = open_parquet(path).metadata
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if text_column not in names:
        return None
    column = names.index(text_column)
    return sum(metadata.row_group(i).column(column).total_uncompressed_size for i in range(metadata.num_row_groups))


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow

        with pyarrow.CompressedInputStream(os.fspath(path), "zstd") as stream:
            yield io.BufferedReader(stream)
    else:
        with gzip.open(path) if suffix == ".gz" else path.open("rb") as stream:
            yield cast("IO[bytes]", stream)


def read_lines(path: Path, *, keep_ends: bool = False) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, also a .gz or .zst one.

    Raises:
        DataError: The file is not UTF-8 (the message names the byte) or its compressed data is damaged.
    """
    yield from decoded_lines(_raw_lines(path), os.fspath(path), keep_ends=keep_ends)


def decoded_lines(lines: Iterable[bytes], name: str, *, keep_ends: bool = False) -> Iterator[str]:
    """Yield lines as text, without a byte order mark in front of the first.

    Args:
        lines: Lines with their ends, in UTF-8.
        name: Where they come from, for the message.
        keep_ends: Keep the ends of the lines.

    Raises:
        DataError: A line is not UTF-8; the message names the byte.
    """
    offset = 0
    for line in lines:
        start, offset = offset, offset + len(line)
        if start == 0 and line.startswith(codecs.BOM_UTF8):
            start = len(codecs.BOM_UTF8)
            line = line[start:]
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise DataError(_not_utf8(name, start + error.start, line[error.start])) from error
        yield text if keep_ends else text.rstrip("\r\n")


def _not_utf8(name: str, offset: int, byte: int) -> str:
    where = " of the decompressed text" if name.lower().endswith(_COMPRESSED) else ""
    encoding = "UTF-16" if offset == 0 and byte in (0xFE, 0xFF) else "ISO-8859-1"
    return (
        f"{name} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}{where}; if it is {encoding}, convert it with "
        f"`iconv -f {encoding} -t UTF-8`"
    )


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as stream:
            yield from stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is no complete gzip file: {error}") from error
    except OSError as error:
        if path.suffix.lower() == ".zst" and error.errno is None:
            raise DataError(f"{path} is no complete zstd file: {error}") from error
        raise


def _read_json_lines(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number:,}: no JSON object: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number:,}: expected a JSON object, got {type(row).__name__}")
        if column not in row:
            raise DataError(f"{path}, line {number:,}: {missing_column(column, list(row))}")
        yield checked_text(row[column], f"{path}, line {number:,}", column)


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow

    file = open_parquet(path)
    if column not in file.schema_arrow.names:
        raise DataError(f"{path}: {missing_column(column, file.schema_arrow.names)}")
    damage = (pyarrow.ArrowException, OSError)
    row = 0
    try:
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield checked_text(value, f"{path}, row {row:,}", column)
                row += 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, in the {_PARQUET_BATCH} rows from row {row:,}: text that is not UTF-8") from error
    except damage as error:
        raise DataError(f"{path} is damaged near row {row:,}: {error}") from error


def open_parquet(path: Path) -> Any:
    """Return the `pyarrow.parquet.ParquetFile` of a file.

    Raises:
        DataError: It is damaged or cut short.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is no complete Parquet file: {str(error).splitlines()[0]}") from error


def missing_column(column: str, present: list[str]) -> str:
    """Return the message for a text column that is not there."""
    return f"no column {column!r}; columns: {', '.join(present) or 'none'}{nearest(column, present)}"


def checked_text(value: object, place: str, column: str) -> str:
    r"""Return the text of one row: "" for null; lone surrogates, which JSON can spell but UTF-8 not hold, as U+FFFD.

    Raises:
        DataError: The value is no text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{place}: column {column!r} holds {type(value).__name__}, expected text")
    return without_surrogates(value)


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD in the place of each lone surrogate; no tokenizer takes one."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
