"""The trainer for a compiled step that replays CUDA graphs: what a replay overwrites is used or moved before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fat5.training.gradient_buffers import GradientBuffers
from fat5.training.trainer import PretrainTrainer


class GraphTrainer(PretrainTrainer):
    """`PretrainTrainer` for a model that was compiled in a mode that replays CUDA graphs.

    A replay writes to the addresses of the one before: loss, statistics and gradients of a micro-batch are gone with
    the next. So each micro-batch and each evaluation batch is announced as a new run of the graphs, and losses are
    added up, never kept. With several micro-batches a step the gradients are moved into buffers of their own, where
    they add up to what autograd would have made of them.

    Several ranks sum these buffers, in one collective after the last backward, in the place of DistributedDataParallel:
    under it torch.compile cuts the model at the bounds of its buckets, into pieces that are graphs of their own, and it
    leaves the gradients of all micro-batches but the last where the graphs put them. The sum cannot hide behind the
    backward pass, but moves each gradient once.

    The first micro-batch warms up and the second records the graphs. Both are in the first step, or make the first two:
    `warm_up_seconds` holds them.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._leave_unwrapped()
        model = cast(nn.Module, self.model)
        several = self.args.world_size > 1
        if several:
            # What DDP sees to: the ranks begin with the same weights.
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.broadcast(parameter, src=0)
        moved = several or self.args.gradient_accumulation_steps > 1
        self._gradients = GradientBuffers(model.named_parameters()) if moved else None

    @property
    def warm_up_steps(self) -> int:
        """Steps of a process that hold its first two micro-batches."""
        return 2 if self.args.gradient_accumulation_steps == 1 else 1

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; what an earlier call left behind that broke off inside a step is no part of the next one's first."""
        if self._gradients is not None:
            self._gradients.clear()
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of a micro-batch and bring its gradients to safety."""
        torch.compiler.cudagraph_mark_step_begin()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._gradients is not None:
            self._gradients.take()
            if self.accelerator.sync_gradients:
                self._gradients.give(reduce=self.args.world_size > 1)
        return loss

    def _backward(self, loss: Tensor) -> None:
        # The ranks' gradients are summed here, not averaged.
        super()._backward(loss / self.args.world_size if self.args.world_size > 1 else loss)

    def _evaluation_batches(self, loader: DataLoader) -> Iterator[dict[str, Any]]:
        for batch in super()._evaluation_batches(loader):
            torch.compiler.cudagraph_mark_step_begin()
            yield batch
