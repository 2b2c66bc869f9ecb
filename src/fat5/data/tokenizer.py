"""Saving and loading of tokenizers, and a fingerprint that names one exactly."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fat5.data.hub import local_files_only, may_be_on_hub
from fat5.data.output_folder import output_folder
from fat5.errors import DataError, nearest_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@contextmanager
def tokenizer_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder for `write_tokenizer` that becomes `path` on success; entered before a long training.

    Raises:
        FileExistsError: `path` is not empty, and `overwrite` is not set or it holds more than a tokenizer.
    """
    with output_folder(path, overwrite=overwrite, replaceable=_TOKENIZER_FILES) as folder:
        yield folder


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write `tokenizer` to the folder `path`, whole or not at all, in the form that AutoTokenizer loads.

    Raises:
        FileExistsError: `path` is not empty, and `overwrite` is not set or it holds more than a tokenizer.
    """
    with tokenizer_folder(path, overwrite=overwrite) as folder:
        write_tokenizer(tokenizer, folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files of `tokenizer` into `folder`, inside an output that is not yet final.

    Raises:
        OSError: They could not be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # what the tokenizers library raises, also for a full disk
        raise OSError(errno.EIO, f"the tokenizer could not be written to {folder}: {error}") from error


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or, failing that, by its name on the hub.

    Raises:
        FileNotFoundError: The folder has no tokenizer.
        DataError: The files cannot be read, no tokenizer of that name could be loaded, or it has no fast backend.
    """
    from transformers import AutoTokenizer

    name = os.fspath(name_or_path)
    local = Path(name).is_dir()
    if local and not (Path(name) / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"{name} holds no tokenizer: it has no tokenizer_config.json")
    if not local and not may_be_on_hub(name):
        raise FileNotFoundError(f"there is no folder {name}{nearest_path(name, folder=True)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only(name))
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if local:
            raise DataError(f"the tokenizer in {name} could not be loaded: {reason[0]}") from error
        near = nearest_path(name, folder=True)
        raise DataError(
            f"there is no folder {name}{f'{near} No' if near else ', and no'} tokenizer of that name on the hub "
            f"could be loaded: {reason[0]}"
        ) from error
    backend_of(tokenizer)
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that decides which ids a text gets.

    It covers vocabulary, merges, added tokens, normaliser, pre-tokeniser and post-processor, and is equal after saving
    and loading, in any version of Transformers. Padding and truncation, which calls set and reset, are left out.

    Raises:
        DataError: The tokenizer has no fast backend.
    """
    state = json.loads(backend_of(tokenizer).to_str())
    # Fields at their neutral value come and go between versions of the tokenizers library.
    model = {key: value for key, value in state["model"].items() if value not in (None, False)}
    model["merges"] = [_merge_text(merge) for merge in model.get("merges", [])]
    parts: dict[str, Any] = {"model": model}
    for key in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor"):
        parts[key] = state[key]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the `tokenizers.Tokenizer` inside `tokenizer`.

    Raises:
        DataError: It has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no fast backend (tokenizer.json)")
    return backend


def _merge_text(merge: str | list[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)
