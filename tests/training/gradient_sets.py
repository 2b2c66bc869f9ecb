"""A process of several that sum gradients of some parameters: as a program, with the folder of what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fat5.errors import FAT5Error
from fat5.training.gradient_buffers import GradientBuffers


class Watched(GradientBuffers):
    """Counts how often the counts of the ranks are looked at."""

    looks = 0

    def _check_counts(self) -> None:
        self.looks += 1
        super()._check_counts()


def main(folder: Path) -> None:
    """Write the sums of each step, and what was raised where the ranks have different gradients."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parameters = {name: nn.Parameter(torch.zeros(5)) for name in "ab"}
    parameters["c"] = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))

    def step(buffers: GradientBuffers, names: str) -> dict[str, float | None]:
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, rank + 1) if name in names else None
        buffers.take()
        buffers.give(reduce=True)
        return {name: None if p.grad is None else float(p.grad.unique()) for name, p in parameters.items()}

    def raised(buffers: GradientBuffers, names: str) -> str | None:
        try:
            step(buffers, names)
        except FAT5Error as error:
            return str(error).split(" expected")[0]
        return None

    buffers = Watched(parameters.items())
    found: dict[str, object] = {"sums": [step(buffers, names) for names in ("abc", "abc", "ac", "ac", "abc")]}
    found["looks"] = buffers.looks
    found["later"] = raised(buffers, "a" if rank == 0 else "abc")
    found["at_first"] = raised(GradientBuffers(parameters.items()), "a" if rank == 0 else "abc")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
