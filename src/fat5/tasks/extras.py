"""Packages that only some commands need: imported where they are used, asked for by the name of their extra."""

from __future__ import annotations

import importlib
from types import ModuleType

from fat5.errors import ConfigError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Its name, such as "sklearn.metrics".
        extra: The extra of this package that installs it.
        purpose: What needs it, the start of the message.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).split(".")[0]
        raise ConfigError(
            f"{purpose} needs the package {missing}, which is not installed; run `pip install 'fat5[{extra}]'`"
        ) from error
