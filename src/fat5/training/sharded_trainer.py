"""The trainer for parameters spread over ranks: whole checkpoints, gradients reduced once a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from fat5.errors import ConfigError
from fat5.optim.sharded import whole_state_dict
from fat5.training import checkpoints
from fat5.training.sharding import load_whole_weights, whole_weights
from fat5.training.trainer import PretrainTrainer


class ShardedTrainer(PretrainTrainer):
    """`PretrainTrainer` for a model that `shard_model` spread over the ranks.

    Its checkpoints are those of any other run: weights and optimiser state whole, one file each, so that another number
    of ranks, or one alone, goes on from them. They are gathered in the memory of the first process's host.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._leave_unwrapped()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward; the gradients are reduced with the last micro-batch of a step."""
        cast(FSDPModule, model).set_requires_gradient_sync(self.accelerator.sync_gradients)
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _evaluation_batches(self, loader: DataLoader) -> Iterator[dict[str, Any]]:
        """Yield the batches, and empty ones where other ranks have more: each forward gathers weights from all."""
        own = min(len(loader), self.max_eval_batches or len(loader))
        count = torch.tensor([own], device=self.args.device)
        counts = self.accelerator.gather(count).tolist()
        if min(counts) == 0:
            raise ConfigError(
                f"the validation text gives {sum(counts)} batches to {len(counts)} processes, expected at least one "
                "each; name more text, or leave data.validation out"
            )
        batch: dict[str, Any] = {}
        for batch in super()._evaluation_batches(loader):
            yield batch
        for _ in range(max(counts) - own):
            yield {**batch, "labels": torch.full_like(batch["labels"], -100)}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        weights = load_file(Path(resume_from_checkpoint) / checkpoints.WEIGHTS)
        load_whole_weights(cast(nn.Module, self.model if model is None else model), weights)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model; all ranks must call it."""
        weights = whole_weights(cast(nn.Module, self.model), keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = whole_state_dict(cast(Any, self.optimizer), keep=self.args.should_save)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(cast(Any, self.lr_scheduler).state_dict(), Path(output_dir) / SCHEDULER_NAME)
