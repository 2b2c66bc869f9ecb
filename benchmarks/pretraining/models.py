"""The models side by side, with the same weights, each with the batch in the form it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.pretraining.workload import Workload
from benchmarks.subject import GateError
from fat5.models import FAT5Config, FAT5ForConditionalGeneration

LARGEST_ERROR = 0.1


def make_fat5(workload: Workload, device: torch.device | str = "cpu") -> FAT5ForConditionalGeneration:
    """Return FAT5's model in float32, in training mode, from seed 0."""
    torch.manual_seed(0)
    config = FAT5Config(
        vocab_size=workload.vocab_size,
        d_model=workload.d_model,
        d_kv=workload.head_dim,
        d_ff=workload.d_ff,
        num_layers=workload.layers,
        num_heads=workload.heads,
    )
    with torch.device(device):
        model = FAT5ForConditionalGeneration(config).train()
    if workload.checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def make_t5(workload: Workload, device: torch.device | str = "cpu") -> T5ForConditionalGeneration:
    """Return Transformers' T5 with the same weights, its LM head untied by hand, whatever its configuration says."""
    config = T5Config(
        vocab_size=workload.vocab_size,
        d_model=workload.d_model,
        d_kv=workload.head_dim,
        d_ff=workload.d_ff,
        num_layers=workload.layers,
        num_heads=workload.heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device(device):
        model = T5ForConditionalGeneration(config).train()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    weights = make_fat5(workload, device).state_dict()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise GateError(f"the models' weights differ: missing {missing}, unexpected {unexpected}")
    if workload.checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def packed(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return rows as packed documents of one length, the form of FAT5's collator."""
    ids, labels = batch["input_ids"], batch["labels"]

    def offsets(rows: Tensor) -> Tensor:
        return torch.arange(0, rows.numel() + 1, rows.shape[1], dtype=torch.int32, device=rows.device)

    return {
        "input_ids": ids.flatten(),
        "labels": labels.flatten(),
        "cu_seqlens": offsets(ids),
        "max_seqlen": ids.shape[1],
        "decoder_cu_seqlens": offsets(labels),
        "decoder_max_seqlen": labels.shape[1],
    }


def gradient(model: nn.Module, batch: dict[str, Any]) -> tuple[float, Tensor]:
    """Return the loss and all gradients as one vector in float32 on the CPU, by the names of the parameters in order.

    On the CPU, so that it does not count as memory of the step that is measured later.
    """
    loss = model(**batch).loss
    loss.backward()
    named = sorted(model.named_parameters())
    vector = torch.cat([parameter.grad.float().flatten().cpu() for _, parameter in named])
    model.zero_grad()
    return loss.item(), vector


class Gate:
    """Compares loss and gradients on two short rows with Transformers' T5 in float32.

    The relative error of an implementation may be three times that of Transformers in the same type, and 10 % at most.
    """

    def __init__(self, workload: Workload, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._workload = workload.small()
        self._batch = self._workload.draw(device)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        model = make_t5(self._workload, device)
        self._truth = gradient(model, self._batch)
        torch.set_float32_matmul_precision(precision)
        self._plain_error = self._error(*gradient(model.to(dtype), self._batch))

    def check(self, model: nn.Module, *, is_packed: bool) -> float:
        """Return the share of the tolerance that the model's error takes.

        Raises:
            GateError: It takes more than all of it.
        """
        batch = packed(self._batch) if is_packed else self._batch
        error = self._error(*gradient(model, batch))
        allowed = min(max(3 * self._plain_error, 1e-4), LARGEST_ERROR)
        if not error <= allowed:
            raise GateError(
                f"gradients differ by {error:.2e} from Transformers in float32, at most {allowed:.2e} allowed"
            )
        return error / allowed

    def _error(self, loss: float, vector: Tensor) -> float:
        expected, truth = self._truth
        if not abs(loss - expected) <= 0.01 * expected:
            raise GateError(f"the loss is {loss:.4f}, expected {expected:.4f} as Transformers has it in float32")
        return float(torch.linalg.vector_norm(vector - truth) / torch.linalg.vector_norm(truth))
