"""FAT5: Flash Attention T5.

`import fat5` registers the models with Transformers' Auto classes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fat5.version import __version__

if TYPE_CHECKING:
    from fat5.models import (
        FAT5Config,
        FAT5EncoderModel,
        FAT5ForConditionalGeneration,
        FAT5ForQuestionAnswering,
        FAT5ForSequenceClassification,
        FAT5ForTextEmbedding,
        FAT5ForTokenClassification,
    )
    from fat5.models.patch import patch, unpatch

__all__ = [
    "FAT5Config",
    "FAT5EncoderModel",
    "FAT5ForConditionalGeneration",
    "FAT5ForQuestionAnswering",
    "FAT5ForSequenceClassification",
    "FAT5ForTextEmbedding",
    "FAT5ForTokenClassification",
    "__version__",
    "patch",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("fat5.models.patch" if "patch" in name else "fat5.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The `fat5` command imports what each subcommand needs, so that `fat5 --help` does not wait seconds for torch.
if PurePath(sys.argv[0] if sys.argv else "").name not in ("fat5", "-m"):
    import fat5.models  # noqa: F401
