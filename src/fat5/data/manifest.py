"""The manifest of a folder of token files: written last, so that a folder without one is known to be unfinished."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fat5.errors import DataError, nearest_path
from fat5.files import atomic_file

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "fat5-tokens"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """One token file.

    Attributes:
        file: Its name in the folder.
        documents: Number of its rows.
        tokens: Number of its tokens.
    """

    file: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class Manifest:
    """What a folder of token files holds and how it was made.

    Attributes:
        dtype: NumPy name of the type of the token ids.
        vocab_size: One more than the highest id of the tokenizer, added tokens included.
        shards: The token files, in order.
        documents: Number of documents, each whole and one row.
        tokens: Number of tokens, no special token among them.
        text_bytes: Bytes of their text in UTF-8, for bits per byte.
        skipped: Number of documents read and left out, by reason.
        tokenizer_fingerprint: What `tokenizer_fingerprint` gives for the tokenizer; None for data made in memory.
        tokenizer_name: Name or path of the tokenizer, for people.
        split: "train" or "validation" where the documents were split, else None.
        source: The settings of the text source.
        settings: The settings of pretokenisation.
        fat5_version: Version of the package that wrote the folder.
    """

    dtype: str
    vocab_size: int
    shards: tuple[Shard, ...]
    documents: int
    tokens: int
    text_bytes: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    tokenizer_fingerprint: str | None = None
    tokenizer_name: str = ""
    split: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    fat5_version: str = ""

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the manifest into `folder`, whole or not at all."""
        content = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **asdict(self)}
        with atomic_file(Path(folder) / MANIFEST_NAME) as path:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Manifest:
        """Read the manifest of `folder`.

        Raises:
            FileNotFoundError: There is no such folder.
            DataError: It has no manifest, a damaged one, or one of an unknown format version.
        """
        root = Path(folder)
        path = root / MANIFEST_NAME
        if not root.is_dir():
            raise FileNotFoundError(
                f"{root} does not exist or is no folder{nearest_path(root, folder=True)}; `fat5 pretokenize` makes one"
            )
        if not path.is_file():
            raise DataError(_no_manifest(root))
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT_NAME:
            raise DataError(f"{path} is not the manifest of token files made by `fat5 pretokenize`")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise DataError(
                f"{root} has format version {version!r}, this fat5 reads {FORMAT_VERSION}; update fat5 or make it again"
            )
        try:
            known = {entry.name: content[entry.name] for entry in fields(cls)}
            known["shards"] = tuple(Shard(**shard) for shard in known["shards"])
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is damaged: field {error} is missing or wrong") from error
        return cls(**known)


def _no_manifest(root: Path) -> str:
    splits = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST_NAME}"))
    if splits:
        return f"{root} holds the splits {', '.join(splits)}: name one of them, such as {root / splits[0]}"
    return f"{root} has no {MANIFEST_NAME}: it holds no token files, or its pretokenisation did not finish"
