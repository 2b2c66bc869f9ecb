"""Errors that a user can mend, and the words that name the nearest valid choice."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class FAT5Error(Exception):
    """Base of the package's own errors; the command line prints its message alone, without a traceback."""


class DataError(FAT5Error, ValueError):
    """The data, a tokenizer or a data directory is not what was asked for."""


class ConfigError(FAT5Error, ValueError):
    """A setting is unknown, has a wrong type or contradicts another."""


class CheckpointError(FAT5Error, ValueError):
    """A checkpoint is missing, truncated or does not fit the model."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the choice nearest to `name`, or an empty string if none is near."""
    match = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def nearest_path(name: str | os.PathLike[str], *, folder: bool = False) -> str:
    """Return `"; did you mean 'x'?"` for the file or folder whose path is nearest to `name`, or "" if none is near.

    Each part of the path may have a typo.

    Args:
        name: A path that does not exist.
        folder: Whether a folder was meant.
    """
    found, parts = Path(), Path(name).parts
    for depth, part in enumerate(parts, start=1):
        inner = depth < len(parts)
        try:
            if inner and (found / part).is_dir():
                found /= part
                continue
            choices = [entry.name for entry in found.iterdir() if entry.is_dir() or not (inner or folder)]
        except OSError:
            return ""
        match = difflib.get_close_matches(part, choices, n=1, cutoff=0.5)
        if not match:
            return ""
        found /= match[0]
    return f"; did you mean {str(found)!r}?" if parts else ""
