"""Gradients in memory of their own: added up over micro-batches, summed over ranks once a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ALIGNMENT = 256
"""Bytes at which each parameter's part begins, as if it had been allocated on its own."""


class GradientBuffers:
    """Keeps the gradients of several backward passes whose memory the next pass overwrites, as CUDA graphs do.

    The sums are those of autograd, in the gradients' own type: g = (g_1 + g_2) + g_3 ..., rounded after each addition.
    Parameters of one type share one flat buffer, so that one collective reduces them.

    Args:
        parameters: The model's, in the same order on all ranks; those without requires_grad are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._flat: list[Tensor] = []
        self._views: list[Tensor] = []
        self._holds = [False] * len(self._parameters)

    @torch.no_grad()
    def take(self) -> None:
        """Move the parameters' gradients in here: the first since `give` replace what was kept, later ones are added.

        The parameters are left without gradients. Nothing waits for the device.
        """
        if not self._flat:
            self._allocate()
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is None:
                continue
            kept, new = later if self._holds[index] else first
            kept.append(view)
            new.append(parameter.grad)
            self._holds[index] = True
            parameter.grad = None
        if first[0]:
            torch._foreach_copy_(*first)
        if later[0]:
            torch._foreach_add_(*later)

    def give(self, *, reduce: bool = False) -> None:
        """Give the parameters their gradients back; they stay valid until the next `take`.

        Args:
            reduce: Sum over all ranks of the default process group first. All must have gradients of the same
                parameters, as one graph has.
        """
        if reduce:
            for flat in self._flat:
                dist.all_reduce(flat)
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            parameter.grad = view if self._holds[index] else None
            self._holds[index] = False

    def clear(self) -> None:
        """Forget what was kept: a step that was broken off."""
        self._holds = [False] * len(self._parameters)

    def _allocate(self) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for parameter in self._parameters:
            groups[parameter.dtype, parameter.device].append(parameter)
        views: dict[int, Tensor] = {}
        for (dtype, device), members in groups.items():
            unit = _ALIGNMENT // dtype.itemsize
            sizes = [-(-parameter.numel() // unit) * unit for parameter in members]
            # Zeros: what lies between the parts is reduced too.
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self._flat.append(flat)
            for parameter, part in zip(members, flat.split(sizes), strict=True):
                views[id(parameter)] = part[: parameter.numel()].view_as(parameter)
        self._views = [views[id(parameter)] for parameter in self._parameters]
