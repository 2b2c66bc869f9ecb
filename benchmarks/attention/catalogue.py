"""The implementations by name, in the order of the tables."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend

from benchmarks.attention.implementation import Implementation
from benchmarks.attention.own import fat5
from benchmarks.attention.peers import eager, flex, sdpa
from benchmarks.registry import UsageError
from fat5.ops.attention.backends import BACKENDS

YARDSTICK = "cudnn"

_PEERS = (
    sdpa(YARDSTICK, SDPBackend.CUDNN_ATTENTION, bias=False),
    sdpa("fa2", SDPBackend.FLASH_ATTENTION, bias=False),
    sdpa("cudnn-bias", SDPBackend.CUDNN_ATTENTION, bias=True),
    sdpa("sdpa-bias", SDPBackend.EFFICIENT_ATTENTION, bias=True, bias_gradient=True),
    flex("flex"),
    eager("eager-bias"),
)
"""The yardstick comes first, so that the others' ratios to it are known at once."""


def catalogue() -> dict[str, Implementation]:
    """Return all implementations; a backend added to `fat5.ops.attention.backends.BACKENDS` is here too."""
    own = [fat5(name, by_distance=shared) for name in BACKENDS for shared in (False, True)]
    own.append(fat5("hopper", deterministic=True))  # the others' backward gives equal bits as it is
    return {x.name: x for x in (*_PEERS, *own)}


def default_names(device: torch.device) -> list[str]:
    """Return those worth the time: no eager attention, and the torch backend only where there is no GPU."""
    gpu_only = [name for name in catalogue() if name != "eager-bias" and not name.startswith("fat5-torch")]
    return gpu_only if device.type == "cuda" else ["eager-bias", "fat5-torch"]


def choose(names: Sequence[str] | None, device: torch.device) -> list[Implementation]:
    """Return the implementations of these names, in the order of the tables.

    Raises:
        UsageError: There is no such implementation; the message names the nearest.
    """
    known = catalogue()
    wanted = default_names(device) if names is None else names
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"no implementation {name!r}; expected some of {', '.join(known)}{hint}")
    return [implementation for name, implementation in known.items() if name in wanted]
