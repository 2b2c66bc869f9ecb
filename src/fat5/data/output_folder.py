"""Folders that appear whole, and that replace only what the same command made."""

from __future__ import annotations

import fcntl
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
def resumable_folder(path: str | os.PathLike[str], *, overwrite: bool, replaceable: Sequence[str]) -> Iterator[Path]:
    """Yield the temporary folder of an output, which a killed process leaves behind for the next one to go on with.

    Its name is `.NAME.unfinished`, beside `path`. It becomes `path` on success, is removed on an error, and stays after
    a kill or Ctrl+C. Otherwise as `output_folder`.

    Raises:
        FileExistsError: `path` may not be replaced, or another process is at work on it.
        OSError: Something could not be written; nothing of it is kept.
    """
    target = Path(path).resolve()
    _check_replaceable(target, overwrite, replaceable)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        with _locked(unfinished, target):
            try:
                yield unfinished
                _replace(target, unfinished)
            except Exception:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        raise OSError(error.errno, f"nothing was kept of {path}: {error}") from error


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Make `folder` and hold it against other processes; the operating system lets go of it however this one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _is_held(descriptor, folder):
            raise FileExistsError(f"another process is making {target}; wait for it, or name another folder")
        yield
    finally:
        os.close(descriptor)


def _is_held(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Else the other process has just renamed it to its final name.
        return not os.path.samestat(os.fstat(descriptor), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        return True
    except OSError:  # the file system knows no locks
        return False


@contextmanager
def _whole_folder(target: Path, overwrite: bool, replaceable: Sequence[str]) -> Iterator[Path]:
    _check_replaceable(target, overwrite, replaceable)
    if not _is_in_use(target):
        with atomic_directory(target) as folder:
            yield folder
        return
    finished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
    with atomic_directory(finished) as folder:
        yield folder
    _replace(target, finished)


def _is_in_use(target: Path) -> bool:
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


def _check_replaceable(target: Path, overwrite: bool, replaceable: Sequence[str]) -> None:
    if not _is_in_use(target):
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} already exists and is no folder; name another, or remove it first")
    if not overwrite:
        raise FileExistsError(f"{target} already exists and is not empty; name another folder, or pass --overwrite")
    foreign = sorted(p.name for p in target.iterdir() if not any(fnmatch(p.name, pattern) for pattern in replaceable))
    if foreign:
        raise FileExistsError(f"{target} also holds {foreign[0]!r}, which was not made here; it is not overwritten")


def _replace(target: Path, finished: Path) -> None:
    """Rename `finished` to `target`; what was there is kept until then."""
    if not target.exists():
        finished.replace(target)
        return
    replaced = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.replace(replaced)
    finished.replace(target)
    shutil.rmtree(replaced)
