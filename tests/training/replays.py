"""CUDA graphs on the CPU: what a model returned and the gradients it left turn to NaN when the next replay begins.

As a program it is `fat5 pretrain RUN.yaml` with a model that is taken to replay graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fat5.models import FAT5ForConditionalGeneration
from fat5.training import pretrain as pretraining
from fat5.training.compilation import Compilation


class Replays:
    """Holds what lies in the memory of the last replay, and writes over it at the next.

    Attributes:
        count: Replays so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._held: list[Tensor] = []

    def watch(self, model: FAT5ForConditionalGeneration) -> None:
        """Take a model's outputs and gradients for a graph's."""
        model.register_forward_hook(self._keep_outputs)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._keep_gradient)

    @torch.no_grad()
    def begin(self) -> None:
        """Stand in for `torch.compiler.cudagraph_mark_step_begin`."""
        self.count += 1
        for tensor in self._held:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        self._held = []

    def _keep_outputs(self, module: object, inputs: object, outputs: dict[str, object]) -> None:
        self._held += [value.detach() for value in outputs.values() if isinstance(value, Tensor)]

    def _keep_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._held.append(parameter.grad)


@contextmanager
def replaying() -> Iterator[Replays]:
    """Have every mark of a step's beginning overwrite what came before."""
    replays, original = Replays(), torch.compiler.cudagraph_mark_step_begin
    torch.compiler.cudagraph_mark_step_begin = replays.begin
    try:
        yield replays
    finally:
        torch.compiler.cudagraph_mark_step_begin = original


def main() -> None:
    """Train as `fat5 pretrain` does."""
    from fat5.cli.main import main as fat5_main

    with replaying() as replays:
        pretraining.choose_compilation = lambda *_, **__: Compilation("reduce-overhead", "replays on a CPU")
        pretraining.compile_model = lambda model, *_, **__: replays.watch(model)
        sys.exit(fat5_main(["pretrain", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
