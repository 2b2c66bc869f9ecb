"""The dependent launches of one call."""

from __future__ import annotations

from typing import Any

import torch

from fat5.ops.dependent_launch import dependent_launch, follower_options


class Chain:
    """The launches of one call that may start ahead of the end of the kernel before them.

    On Hopper a kernel launched so starts when every program of the one before has announced that it may
    (`gdc_launch_dependents`) or has ended; it prepares what does not depend on that one, and waits (`await_previous`).
    The first kernel of a chain is launched the common way, after all work before. Each kernel waits in each program, so
    that the end of one is the end of all before it, and none writes before it waits: memory of its own may be filled by
    PyTorch until then, under deterministic algorithms.
    """

    def __init__(self, device: torch.device) -> None:
        self._early = dependent_launch(device)
        self._options = follower_options(device) if self._early else {}
        self._begun = False

    def link(self) -> dict[str, Any]:
        """Return the options of the next launch of a Triton kernel."""
        return {"CHAIN": self._early} | self.start()

    def start(self) -> dict[str, Any]:
        """Return the options of the next launch of a Gluon kernel, which waits in any case."""
        begun, self._begun = self._begun, True
        return self._options if begun else {}

    def end(self) -> None:
        """Have the next launch start after all before it: some other kernel came between."""
        self._begun = False
