"""The small French corpus that comes with the package: 1,718 articles of law, 1.5 MB of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SAMPLE_NAME = "fat5:sample"


def sample_path() -> Path:
    """Return the path of the shipped corpus: UTF-8 text, gzip, a blank line between documents."""
    return Path(__file__).with_name("sample") / "sample_fr.txt.gz"


def sample_documents() -> Iterator[str]:
    """Yield the documents of the shipped corpus, always in the same order. Its licence is in `sample/NOTICE.md`."""
    from fat5.data.text_files import read_text_file

    return read_text_file(sample_path(), documents="paragraph")
