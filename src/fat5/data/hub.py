"""Names that may be folders here or stand on the hub: whether the hub can be asked, and which folder was meant."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from fat5.errors import nearest


def hub_resolves() -> bool:
    """Whether the hub's host has an address here; behind a proxy, which resolves it, that is taken for granted.

    Without a network the hub's client would try for most of a minute, even for a folder's name with a typo.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if host is None or {"https", "http", "all"} & set(getproxies()):
        return True
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return False
    return True


def nearest_folder(name: str) -> str:
    """Return `"; did you mean 'x'?"` for the folder whose name is nearest to `name` where it would stand, or ""."""
    path = Path(name)
    return nearest(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else [])
