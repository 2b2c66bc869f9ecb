"""Errors that a user can mend, and the words that name the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
