"""Names that may stand on the hub: which can, whether the hub can be asked, and data sets by their names."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from fat5.errors import DataError, nearest_path

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# `owner/corpus.fr` may be a data set; `corpus.fr` has no owner and is a file.
_FILE_ENDING = re.compile(r"[^/]*\.[a-z][a-z0-9]*", re.IGNORECASE)
_KNOWN_FILE = re.compile(
    r".*\.(txt|text|jsonl?|ndjson|[ct]sv|parquet|arrow|xml|html|md|ya?ml|zip|tar|gz|zst|xz|bz2)", re.IGNORECASE
)


def may_be_on_hub(name: str) -> bool:
    """Whether `name` has the form `name` or `owner/name` of the hub, and not that of a file or a path."""
    if name.startswith(".") or _KNOWN_FILE.fullmatch(name) or _FILE_ENDING.fullmatch(name):
        return False
    return _HUB_NAME.fullmatch(name) is not None


def hub_resolves() -> bool:
    """Whether the hub's host has an address here; behind a proxy, which resolves it, that is taken for granted.

    Without a network the hub's client would try for most of a minute, even for a folder's name with a typo.
    """
    host = _host()
    if host is None or {"https", "http", "all"} & set(getproxies()):
        return True
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError):  # the second for what cannot be a host's name
        return False
    return True


def local_files_only(name: str) -> bool:
    """Return the argument of that name for Transformers' `from_pretrained`: whether it need not ask the hub for `name`.

    It is true where there is no network, since a model in the cache is then found at once, and for a folder.
    """
    return Path(name).is_dir() or not hub_resolves()


def load_hub_dataset(entry: str, name: str | None = None, **options: Any) -> Any:
    """Load a data set by its name on the hub or, where the hub cannot be asked, from the cache of an earlier load.

    Args:
        entry: The data set, which is no file or folder here.
        name: Its configuration, where it has several.
        options: `split` and `streaming` of `datasets.load_dataset`; what is in the cache is not streamed.

    Raises:
        DataError: There is none; the message says whether the hub could be asked.
    """
    import datasets

    reachable = hub_resolves()
    try:
        if reachable:
            return datasets.load_dataset(entry, name, **options)
        with _cache_alone():
            return datasets.load_dataset(entry, name, **{**options, "streaming": False})
    except Exception as error:
        reason = " ".join((str(error).strip() or type(error).__name__).split())
        if not reachable:
            cached = "nothing of that name" if isinstance(error, ConnectionError) else reason
            reason = f"there is no network to it here ({_host()} has no address), and in the cache: {cached}"
        raise DataError(
            f"{entry!r} is no file or folder here, and no data set of that name could be loaded from the hub: "
            f"{reason}{nearest_path(entry)}"
        ) from error


def _host() -> str | None:
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).hostname


@contextmanager
def _cache_alone() -> Iterator[None]:
    """Let `datasets`, which has no argument for it, look into its cache alone."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
