"""Gradients in memory of their own: added up over micro-batches, summed over ranks once a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fat5.errors import FAT5Error

_ALIGNMENT = 256
"""Bytes at which each parameter's part begins, as if it had been allocated on its own."""
_RANKS_A_COUNTER = 128
"""Ranks that are added up in one element: bf16 counts to 256 without rounding."""
_SHOWN = 4
"""Parameters that an error names."""


class GradientBuffers:
    """Keeps the gradients of several backward passes whose memory the next pass overwrites, as CUDA graphs do.

    The sums are those of autograd, in the gradients' own type: g = (g_1 + g_2) + g_3 ..., rounded after each addition.
    Parameters of one type share one flat buffer, so that one collective reduces them.

    A parameter without a gradient on one rank would keep its sum of an earlier step there, and get an update on some
    ranks alone. So the ranks that have a gradient of each parameter are counted, in the same collective: a rank whose
    set of parameters is a new one may not enter one that the others do not. The counts are looked at where the set is
    new, which is the first step and whenever another graph is recorded; no other step waits for the device.

    Args:
        named_parameters: The model's, in the same order on all ranks; those without requires_grad are left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self._names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        self._flat: list[Tensor] = []
        self._views: list[Tensor] = []
        self._holds = [False] * len(self._parameters)
        self._counts = torch.empty(0)  # [parameters, counters]: part of the first flat buffer
        self._own_counts = torch.empty(0)
        self._agreed: list[bool] | None = None

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
            reduce: Sum over all ranks of the default process group first.

        Raises:
            FAT5Error: Some ranks have a gradient of a parameter and others none; raised where the set of parameters is
                another than in the step before, which is so on one rank at least.
        """
        if reduce:
            self._reduce()
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            parameter.grad = view if self._holds[index] else None
            self._holds[index] = False

    def clear(self) -> None:
        """Forget what was kept: a step that was broken off."""
        self._holds = [False] * len(self._parameters)

    def _reduce(self) -> None:
        is_new = self._holds != self._agreed
        if is_new:
            counts = torch.zeros(self._counts.shape)
            counts[:, dist.get_rank() // _RANKS_A_COUNTER] = torch.tensor(self._holds, dtype=counts.dtype)
            self._own_counts = counts.to(self._counts)
        self._counts.copy_(self._own_counts)
        for flat in self._flat:
            dist.all_reduce(flat)
        if is_new:
            self._check_counts()
            self._agreed = list(self._holds)

    def _check_counts(self) -> None:
        ranks = dist.get_world_size()
        counts = self._counts.double().sum(1).tolist()
        partial = [f"{name} ({n:.0f})" for name, n in zip(self._names, counts, strict=True) if n not in (0, ranks)]
        if partial:
            more = f" and {len(partial) - _SHOWN} more" if len(partial) > _SHOWN else ""
            raise FAT5Error(
                f"rank {dist.get_rank()}: these parameters have a gradient on some of the {ranks} ranks alone (on how "
                f"many is in brackets): {', '.join(partial[:_SHOWN])}{more}; expected a model that uses the same "
                "parameters on all ranks in each step"
            )

    def _allocate(self) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for parameter in self._parameters:
            groups[parameter.dtype, parameter.device].append(parameter)
        views: dict[int, Tensor] = {}
        counters = -(-dist.get_world_size() // _RANKS_A_COUNTER) if dist.is_initialized() else 0
        for (dtype, device), members in groups.items():
            unit = _ALIGNMENT // dtype.itemsize
            sizes = [-(-parameter.numel() // unit) * unit for parameter in members]
            counts = 0 if self._flat else len(self._parameters) * counters
            # Zeros: what lies between the parts is reduced too.
            flat = torch.zeros(sum(sizes) + counts, dtype=dtype, device=device)
            if counts:
                self._counts = flat[-counts:].view(-1, counters)
            self._flat.append(flat)
            for parameter, part in zip(members, flat.split([*sizes, counts]), strict=False):
                views[id(parameter)] = part[: parameter.numel()].view_as(parameter)
        self._views = [views[id(parameter)] for parameter in self._parameters]
