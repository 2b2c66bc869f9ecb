"""Folders that appear whole, and that replace only what the same command made."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from fat5.files import atomic_directory


@contextmanager
def output_folder(path: str | os.PathLike[str], *, overwrite: bool, replaceable: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` on success and is removed on any error.

    The folder that it replaces is kept until the new one is complete.

    Args:
        path: The folder to make.
        overwrite: Whether a folder that is not empty may be replaced.
        replaceable: Patterns of the names such a folder may hold at its top; anything else is somebody's work.

    Raises:
        FileExistsError: `path` is not empty, and `overwrite` is False or it holds something not `replaceable`.
        OSError: Something could not be written, for example since the disk is full; nothing of it is kept.
    """
    try:
        with _whole_folder(Path(path).resolve(), overwrite, replaceable) as folder:
            yield folder
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        raise OSError(error.errno, f"nothing was kept of {path}: {error}") from error


@contextmanager
def _whole_folder(target: Path, overwrite: bool, replaceable: Sequence[str]) -> Iterator[Path]:
    if not (target.is_dir() and any(target.iterdir())):
        with atomic_directory(target) as folder:
            yield folder
        return
    if not overwrite:
        raise FileExistsError(f"{target} already exists and is not empty; name another folder, or pass --overwrite")
    foreign = sorted(p.name for p in target.iterdir() if not any(fnmatch(p.name, pattern) for pattern in replaceable))
    if foreign:
        raise FileExistsError(f"{target} also holds {foreign[0]!r}, which was not made here; it is not overwritten")
    finished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
    replaced = finished.with_suffix(".old")
    with atomic_directory(finished) as folder:
        yield folder
    target.replace(replaced)
    finished.replace(target)
    shutil.rmtree(replaced)
