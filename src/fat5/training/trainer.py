"""Hugging Face's Trainer for denoising batches: exact accumulation, evaluation by denoiser, atomic checkpoints."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import Trainer

from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.loader import data_loader
from fat5.data.stream_loader import StreamLoader
from fat5.data.streaming_dataset import StreamingDataset
from fat5.errors import CheckpointError, FAT5Error
from fat5.optim import AdamWScale
from fat5.training import checkpoints
from fat5.training.evaluation import EvaluationSums, denoiser_of_each_token, plain_cross_entropy
from fat5.training.log_window import LogWindow, TokenClock
from fat5.training.progress import library_bars_hidden

# What a batch says about itself; the model does not take these.
METADATA = ("denoiser_ids", "num_input_tokens", "num_target_tokens")


class PretrainTrainer(Trainer):
    """Trainer for the whole batches, packed or padded, of a `DenoisingDataset` or a `StreamingDataset`.

    Differences from `transformers.Trainer`:

    - the data sets shard themselves by rank; accelerate leaves their loaders alone;
    - `AdamWScale` clips as it reads the gradients, without a pass that writes them;
    - the loss of a step is the sum over its micro-batches and ranks divided by their number of target tokens;
    - a step never makes the host wait for the device; losses are fetched at the logs;
    - logs hold `accuracy`, `z_loss`, `tokens_per_second` and `tokens_seen`, counted in real tokens of both sides; the
      first step of a process, which compiles, is `warm_up_seconds` and stays out of the speed (`GraphTrainer`: two);
    - `evaluate` gives cross-entropy (no z-loss, no smoothing) and masked accuracy, overall and by denoiser, and keeps
      no logits;
    - a checkpoint appears under its name only when it is whole.

    Args:
        train_dataset: the training batches of this rank, without end.
        eval_dataset: the evaluation batches of this rank, or None.
        num_tokens: tokens of the training text, for the epochs in the log; None for a stream.
        structural_ids: sentinel and EOS ids, left out of `eval_accuracy_text`.
        max_eval_batches: evaluate on at most so many batches a rank; None for all.
        keep_checkpoints: number of checkpoints to keep.
        checkpoint_facts: written into each checkpoint's manifest.
        **kwargs: those of `transformers.Trainer`.
    """

    def __init__(
        self,
        *,
        train_dataset: DenoisingDataset | StreamingDataset,
        eval_dataset: DenoisingDataset | None = None,
        num_tokens: int | None,
        structural_ids: Iterable[int],
        max_eval_batches: int | None = None,
        keep_checkpoints: int = 2,
        checkpoint_facts: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self._train_loader: Any = None
        self.num_tokens = num_tokens
        self.structural_ids = frozenset(structural_ids)
        self.max_eval_batches = max_eval_batches
        self.keep_checkpoints = keep_checkpoints
        self.checkpoint_facts = checkpoint_facts or {}
        # FAT5's forward takes num_items_in_batch; said outright, since the Trainer else guesses from the signature.
        self.model_accepts_loss_kwargs = True
        self.output_dir = Path(str(self.args.output_dir))
        self.window = LogWindow(self.args.device)
        self._staging_dir: Path | None = None
        self.add_callback(TokenClock(self.window, self.warm_up_steps))

    @property
    def warm_up_steps(self) -> int:
        """Steps of a process that compile or record, and stay out of the speed."""
        return 1

    def _leave_unwrapped(self) -> None:
        """Keep accelerate from putting DistributedDataParallel around a model whose ranks meet in another way."""
        prepare = self.accelerator.prepare_model
        cast(Any, self.accelerator).prepare_model = lambda model, **_: prepare(
            model, device_placement=False, evaluation_mode=True
        )

    def get_train_dataloader(self) -> DataLoader:
        """Return the loader of whole batches, one shard a rank, not wrapped by accelerate; always the same one."""
        if self._train_loader is None:
            self._train_loader = self._loader(cast(Any, self.train_dataset))
        return self._train_loader

    def load_data_state(self, checkpoint: Path, batches: int) -> None:
        """Take a stream up where `checkpoint` left it; token files need no state.

        Args:
            checkpoint: A whole checkpoint.
            batches: Batches that each rank had taken.

        Raises:
            CheckpointError: The checkpoint holds no state of this rank's stream, or that of another step.
            ConfigError: The state belongs to another number of ranks or workers, or to other text or settings.
        """
        loader = cast(Any, self.get_train_dataloader())
        if not isinstance(loader, StreamLoader):
            return
        path = checkpoint / self._data_state_name
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} has no {path.name}: it was saved by fewer processes than run now")
        loader.load_state_dict(torch.load(path, weights_only=True))
        if loader.batches != batches:
            raise CheckpointError(f"{path} stands behind batch {loader.batches:,}, expected batch {batches:,}")

    @property
    def _data_state_name(self) -> str:
        return f"data_state_{self.args.process_index}.pt"

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Return the evaluation loader, of the same kind."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(dataset, DenoisingDataset):
            raise ValueError(f"evaluation needs a DenoisingDataset, got {type(dataset).__name__}")
        return self._loader(dataset)

    def _loader(self, dataset: DenoisingDataset | StreamingDataset) -> Any:
        return data_loader(
            dataset,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.device.type == "cuda",
        )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of a micro-batch; nothing here makes the host wait for the device."""
        self.window.tokens += int(inputs["num_input_tokens"]) + int(inputs["num_target_tokens"])
        self.window.targets += int(inputs["num_target_tokens"])
        if not cast(nn.Module, self.model).training:  # an evaluation came between; walking all modules takes time
            model.train()
        loss = self.compute_loss(model, self._model_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self._backward(loss)
        return loss.detach()

    def _backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the model's loss (normalised by `num_items_in_batch`) and add its statistics to the log window."""
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        self.window.add(outputs.correct, outputs.z_loss)
        # The gradients of the ranks are averaged, and the loss is normalised by the tokens of all of them.
        loss = outputs.loss if self.args.world_size == 1 else outputs.loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor | None:
        """Return the target tokens of the step over all ranks; the Trainer's own waits for the device."""
        if not batch_samples:
            return None
        count = torch.tensor(float(sum(int(batch["num_target_tokens"]) for batch in batch_samples)))
        if device.type == "cuda":
            count = count.pin_memory().to(device, non_blocking=True)
        return self.accelerator.reduce(count, reduction="sum") if self.args.world_size > 1 else count

    def _model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        device = self.args.device
        return {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
            if name not in METADATA
        }

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = self._clip_in_the_step(self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            grad_norm = self._clip_in_the_step(math.inf)
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _clip_in_the_step(self, max_norm: float) -> Tensor | None:
        """Return the gradients' norm and let the optimiser clip; None where it cannot or a scaler changes them yet."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # out of accelerate's wrapper
        if not isinstance(optimizer, AdamWScale) or self.accelerator.scaler is not None:
            return None
        return optimizer.clip_grad_norm(max_norm)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: the Trainer's estimate would run all weights over the encoder's tokens, so none is better."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Complete a training log with the window's accuracy, z-loss and speed, and every log with the tokens seen.

        Raises:
            FAT5Error: the training loss is not finite.
        """
        if "loss" in logs:
            self._close_window(logs)
        # What the Trainer calls samples are batches here, and the operations are not counted.
        for name in ("train_samples_per_second", "total_flos"):
            logs.pop(name, None)
        logs["tokens_seen"] = self.state.num_input_tokens_seen
        super().log(logs, start_time)
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FAT5Error(self._divergence(logs["loss"]))

    def _close_window(self, logs: dict[str, float]) -> None:
        sums, seconds, warm_up = self.window.close()
        loader = cast(Any, self.get_train_dataloader())
        streamed = isinstance(loader, StreamLoader)
        skipped = loader.statistics().skipped_tokens if streamed else 0
        sums = torch.cat([sums, sums.new_tensor([skipped])])
        sums = self.accelerator.reduce(sums, reduction="sum")
        correct, z_loss, targets, tokens, timed_tokens, skipped = sums.tolist()
        logs["accuracy"] = correct / max(targets, 1.0)
        logs["z_loss"] = z_loss
        if timed_tokens:
            logs["tokens_per_second"] = timed_tokens / max(seconds, 1e-9)
        if warm_up:
            logs["warm_up_seconds"] = warm_up
        self.state.num_input_tokens_seen += int(tokens)
        batches = self.state.global_step * self.args.gradient_accumulation_steps
        if streamed:
            slots = batches * self.args.world_size * loader.dataset.budgets.slots
            logs["fill"] = self.state.num_input_tokens_seen / slots
            logs["skipped_tokens"] = int(skipped)
            self.state.epoch = cast(Any, None)
        else:
            plan = loader.dataset.statistics(batches)
            logs["fill"] = plan.fill
            logs["skipped_tokens"] = plan.skipped_tokens
            # The Trainer cannot know how far an endless stream has come in the documents.
            self.state.epoch = (plan.text_tokens + plan.skipped_tokens) / self.num_tokens

    def _divergence(self, loss: float) -> str:
        whole = checkpoints.newest_whole_checkpoint(self.output_dir)
        advice = f"go on from {whole}" if whole else "start again"
        return (
            f"the training loss is {loss} at step {self.state.global_step}: training has diverged; {advice} with a "
            "lower optimizer.lr, a longer warm-up or training.precision=fp32"
        )

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return and log loss, perplexity and masked accuracy per kept target token, overall and per denoiser.

        Args:
            eval_dataset: a data set in the place of the trainer's own.
            ignore_keys: of no effect: no output is kept.
            metric_key_prefix: starts every name, as in `eval_loss` and `eval_loss/R-mu3-r0.15`.
        """
        started = time.perf_counter()
        with self.window.paused():
            sums = self._evaluation_sums(self.get_eval_dataloader(eval_dataset))
            sums.sums = self.accelerator.reduce(sums.sums, reduction="sum")
            metrics = sums.metrics(metric_key_prefix)
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - started
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _evaluation_sums(self, loader: DataLoader) -> EvaluationSums:
        names = [denoiser.name for denoiser in loader.dataset.denoisers]  # type: ignore[attr-defined]
        # The model without its distributed wrapper: ranks may hold different numbers of batches.
        model: Any = self.model
        sums = EvaluationSums(names, model.config.vocab_size, self.structural_ids, self.args.device)
        model.eval()
        with plain_cross_entropy(model.config), self.accelerator.autocast():
            for batch in self._evaluation_batches(loader):
                inputs = self._model_inputs(batch)
                outputs = model(**inputs, reduction="none")
                denoisers = denoiser_of_each_token(
                    inputs["labels"],
                    batch["denoiser_ids"].to(self.args.device, non_blocking=True),
                    inputs.get("decoder_cu_seqlens"),
                )
                sums.add(outputs.loss, outputs.correct, inputs["labels"], denoisers)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        return sums

    def _evaluation_batches(self, loader: DataLoader) -> Iterator[dict[str, Any]]:
        total = min(len(loader), self.max_eval_batches or len(loader))
        hidden = None if self.is_world_process_zero() else True  # None: where there is no terminal
        yield from tqdm(islice(loader, total), "evaluating", total, leave=False, dynamic_ncols=True, disable=hidden)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Strictly; the Trainer's own loading warns of tied weights, which a file holds once, and lets others pass.
        load_model(
            cast(nn.Module, self.model if model is None else model),
            Path(resume_from_checkpoint) / checkpoints.WEIGHTS,
            strict=True,
        )

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging_dir is None else str(self._staging_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        with self.window.paused(), library_bars_hidden():
            if self.args.should_save:
                checkpoints.clear_staging(self.output_dir)
            self.accelerator.wait_for_everyone()
            self._staging_dir = self.output_dir / checkpoints.STAGING
            try:
                super()._save_checkpoint(model, trial)
                self._save_data_state(self._staging_dir / name)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    checkpoints.seal_checkpoint(self._staging_dir / name, self._facts())
                    checkpoints.publish_checkpoint(self._staging_dir / name, self.output_dir / name)
                    checkpoints.rotate_checkpoints(self.output_dir, self.keep_checkpoints)
            except (OSError, RuntimeError, SafetensorError) as error:
                # PyTorch and safetensors report a full disk as errors of their own.
                raise CheckpointError(self._save_failure(name, error)) from error
            finally:
                self._staging_dir = None
                if self.args.should_save:
                    checkpoints.clear_staging(self.output_dir)
            self.accelerator.wait_for_everyone()

    def _save_data_state(self, folder: Path) -> None:
        loader = cast(Any, self.get_train_dataloader())
        if isinstance(loader, StreamLoader):
            torch.save(loader.state_dict(), folder / self._data_state_name)

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.state.global_step,
            "tokens_seen": self.state.num_input_tokens_seen,
            **self.checkpoint_facts,
        }

    def _save_failure(self, name: str, error: Exception) -> str:
        free = shutil.disk_usage(self.output_dir).free / 2**20
        whole = checkpoints.newest_whole_checkpoint(self.output_dir)
        kept = f"the last whole checkpoint is {whole}" if whole else "there is no earlier checkpoint"
        reason = " ".join(str(error).split())
        where = f"{self.output_dir} ({reason}; {free:.0f} MiB free)"
        return f"{name} could not be saved in {where}: nothing of it was kept, {kept}"
