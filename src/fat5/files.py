"""Atomic writes: a reader sees the old file, the new file, or none, never half of one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _staging(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success it replaces `path`, on any error it is removed.

    The sibling lies in the same folder, so the final rename is atomic on one file system.

    Raises:
        IsADirectoryError: `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder; expected the name of a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _staging(target)
    try:
        yield staging
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary sibling folder; on success it becomes `path`, on any error it is removed.

    Raises:
        FileExistsError: `path` exists and is not an empty folder.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} already exists and is not an empty folder; name another or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _staging(target)
    staging.mkdir()
    try:
        yield staging
        if target.exists():
            target.rmdir()
        staging.replace(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
