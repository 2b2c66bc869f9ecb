"""The public cross-entropies, with their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fat5.ops.loss.backends import choose_backend
from fat5.ops.loss.checks import check_hidden, check_logits, check_same_type, check_terms
from fat5.ops.loss.rows import LossTerms


@dataclass(frozen=True)
class CrossEntropyOutput:
    """What a cross-entropy returns.

    Attributes:
        loss: Cross-entropy with its z-loss, the only field that carries gradients. A scalar, or the shape of the
            labels with `reduction="none"`; float32, or float64 for float64 inputs.
        z_loss: The share of `loss` that the z-loss makes up, reduced like it, to be logged; detached.
        correct: bool, the shape of the labels: the highest logit, the first of equals, is the label's; False where
            ignored.
        count: int64 scalar, the number of labels that are not ignored.
    """

    loss: Tensor
    z_loss: Tensor
    correct: Tensor
    count: Tensor


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_bytes: int | None = None,
    backend: str = "auto",
    overwrite_logits: bool = False,
) -> CrossEntropyOutput:
    """Cross-entropy of logits with label smoothing, z-loss and accuracy, without float32 copies of all the logits.

    For a token with logits x, label y and lse = log(sum_v exp x_v):

        loss = (1 - eps) (lse - x_y) + eps (lse - mean_v x_v) + z_loss lse^2,   eps = label_smoothing

    The mean is over kept tokens, those whose label is not `ignore_index`; where none is kept the loss and its
    gradients are 0. An ignored token counts nowhere, even if its logits are NaN. The arithmetic is in float32
    (float64 for float64 logits), also under autocast; the gradient has the type of the logits. Differentiable once.

    The `triton` backend reads the logits once and stores the gradient in the same pass, for "mean" and "sum" outside
    torch.compile; otherwise the backward pass reads them again. Float16 logits always take the second way: a mean of
    many tokens would round their gradients to 0 before a loss scale is applied.

    Args:
        logits: [..., V], any strides.
        labels: [...], int64 or int32, each in [0, V) or `ignore_index`.
        ignore_index: Label of the tokens to leave out.
        label_smoothing: Weight of the uniform distribution over the vocabulary, in [0, 1).
        z_loss: Weight of lse^2, at least 0; 1e-4 in the T5X and PaLM recipes.
        reduction: "mean" over kept tokens, "sum" over them, or "none" for a loss a token, 0 where ignored.
        chunk_bytes: Most bytes of working logits of the torch backend at a time; 16 MiB on a CPU and 1 GiB elsewhere if
            None. The kernels need none.
        backend: "auto" for the kernels on a GPU that they run on, else PyTorch; or "torch" or "triton".
        overwrite_logits: Allow the gradient to take the memory of the logits, which hold anything afterwards; the
            backward pass can then run once. The torch backend, and whatever does not store the gradient in the forward
            pass, leaves them alone.

    Returns:
        CrossEntropyOutput: loss, z_loss, correct, count.

    Raises:
        ValueError: Shapes, types, devices or settings do not fit, or a label is out of range (on other devices than
            the CPU a label out of range is a device-side assertion instead, so that the host need not wait).

    References: Szegedy et al., arXiv:1512.00567 (label smoothing); Chowdhery et al., PaLM, arXiv:2204.02311 (z-loss).
    """
    check_terms("cross_entropy", label_smoothing, z_loss, reduction, chunk_bytes)
    check_logits(logits, labels)
    chosen = choose_backend("cross_entropy", backend, logits)
    flat_logits, flat_labels = logits.reshape(labels.numel(), logits.shape[-1]), _flat(labels)
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    if chosen.reduced is not None and reduction != "none" and _gradient_in_forward(logits):
        mean = reduction == "mean"
        loss, z_share, correct, count = chosen.reduced(flat_logits, flat_labels, terms, mean, overwrite_logits)
        return CrossEntropyOutput(loss, z_share, correct.view(labels.shape), count.view(()))
    loss, z_share, correct, _ = chosen.rows(flat_logits, flat_labels, *terms, chosen.chunk_bytes(labels, chunk_bytes))
    if reduction == "none":
        return _output(loss, z_share, correct, labels, ignore_index, reduction)
    return _output(loss.sum(), z_share.sum(), correct, labels, ignore_index, reduction)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_bytes: int | None = None,
    backend: str = "auto",
) -> CrossEntropyOutput:
    """Cross-entropy of `hidden @ weight.T` whose logits exist a block of rows at a time.

    The loss is that of `cross_entropy`. With "mean" and "sum" the gradients are computed along with the loss and only
    scaled in the backward pass; with "none" the backward pass recomputes the logits. Only gradients that are needed
    are computed: none under no_grad, none for a frozen hidden or weight. The logits have the type of `hidden`, the
    arithmetic on them is in float32 (float64 for float64), and the gradient of the weight is added up in it and
    rounded once. Under autocast both inputs are cast to the autocast type on entry, and the backward pass runs in
    that type too. Differentiable once.

    Args:
        hidden: [..., D], any strides.
        weight: [V, D], the language model head.
        labels: [...], int64 or int32, each in [0, V) or `ignore_index`.
        ignore_index: Label of the tokens to leave out.
        label_smoothing: Weight of the uniform distribution over the vocabulary, in [0, 1).
        z_loss: Weight of lse^2, at least 0.
        reduction: "mean" over kept tokens, "sum" over them, or "none" for a loss a token, 0 where ignored.
        chunk_bytes: Most bytes of logits at a time; if None 16 MiB on a CPU, 256 MiB for the kernels, and 1 GiB for the
            torch backend elsewhere, whose float32 copy counts.
        backend: "auto" for the kernels on a GPU that they run on, else PyTorch; or "torch" or "triton".

    Returns:
        CrossEntropyOutput: loss, z_loss, correct, count.

    Raises:
        ValueError: As `cross_entropy`; also if the types of hidden and weight differ outside autocast.
    """
    check_terms("linear_cross_entropy", label_smoothing, z_loss, reduction, chunk_bytes)
    check_hidden(hidden, weight, labels)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    check_same_type(hidden, weight)
    flat_hidden, flat_labels = hidden.reshape(labels.numel(), hidden.shape[-1]), _flat(labels)
    chosen = choose_backend("linear_cross_entropy", backend, hidden, weight)
    settings = (ignore_index, label_smoothing, z_loss, chosen.chunk_bytes(labels, chunk_bytes))
    if reduction == "none":
        loss, z_share, correct, _ = chosen.hidden.rows(flat_hidden, weight, flat_labels, *settings)
    else:
        grads = torch.is_grad_enabled()
        loss, z_share, correct, _, _ = chosen.hidden.sum(
            flat_hidden, weight, flat_labels, *settings, grads and hidden.requires_grad, grads and weight.requires_grad
        )
    return _output(loss, z_share, correct, labels, ignore_index, reduction)


def _output(
    loss: Tensor, z_share: Tensor, correct: Tensor, labels: Tensor, ignore_index: int, reduction: str
) -> CrossEntropyOutput:
    count = (labels != ignore_index).sum()
    if reduction == "none":
        loss, z_share = loss.view(labels.shape), z_share.view(labels.shape)
    elif reduction == "mean":
        kept = count.clamp(min=1)
        loss, z_share = loss / kept, z_share / kept
    return CrossEntropyOutput(loss, z_share.detach(), correct.view(labels.shape), count)


def _flat(labels: Tensor) -> Tensor:
    return labels.reshape(-1).long().contiguous()


def _gradient_in_forward(logits: Tensor) -> bool:
    """Whether the forward pass stores the gradient; a traced graph would copy it where the backward scales it."""
    wanted = torch.is_grad_enabled() and logits.requires_grad and logits.dtype != torch.float16
    return wanted and not torch.compiler.is_compiling()
