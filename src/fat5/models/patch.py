"""`fat5.patch`: Transformers' own T5, mT5, UMT5 and FLAN-T5 models on FAT5's kernels, in place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import MT5PreTrainedModel, PreTrainedModel, T5PreTrainedModel, UMT5PreTrainedModel
from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5Attention, UMT5LayerNorm

from fat5.models.patch_attention import NAME, KernelAttention
from fat5.ops import rms_norm

ModelT = TypeVar("ModelT", bound=nn.Module)


class KernelNorm(nn.Module):
    """What Transformers' T5 layer norms are given: `rms_norm`, with their rule for types."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised states: of the weight's type where that is float16 or bfloat16, else of the wider."""
        wide = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        normed = rms_norm(hidden_states.to(wide), self.weight, self.variance_epsilon)
        return normed.to(self.weight.dtype) if self.weight.dtype in (torch.float16, torch.bfloat16) else normed


class KernelT5Attention(KernelAttention, T5Attention):
    """T5's attention on FAT5's kernels."""


class KernelMT5Attention(KernelAttention, MT5Attention):
    """mT5's attention on FAT5's kernels."""


class KernelUMT5Attention(KernelAttention, UMT5Attention):
    """UMT5's attention on FAT5's kernels."""


class KernelT5LayerNorm(KernelNorm, T5LayerNorm):
    """T5's layer norm on FAT5's kernels."""


class KernelMT5LayerNorm(KernelNorm, MT5LayerNorm):
    """mT5's layer norm on FAT5's kernels."""


class KernelUMT5LayerNorm(KernelNorm, UMT5LayerNorm):
    """UMT5's layer norm on FAT5's kernels."""


_FAMILIES = (T5PreTrainedModel, MT5PreTrainedModel, UMT5PreTrainedModel)
# A module changes its class and keeps its parameters, hooks and name. Classes can be pickled and copied, which methods
# set on single modules can't.
_KERNEL_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    T5Attention: KernelT5Attention,
    MT5Attention: KernelMT5Attention,
    UMT5Attention: KernelUMT5Attention,
    T5LayerNorm: KernelT5LayerNorm,
    MT5LayerNorm: KernelMT5LayerNorm,
    UMT5LayerNorm: KernelUMT5LayerNorm,
}
_ORIGINAL_CLASSES = {kernel: original for original, kernel in _KERNEL_CLASSES.items()}
_REPLACED = "_fat5_replaced_attention"  # attribute of a patched model: the implementation it had


def patch(model: ModelT) -> ModelT:
    """Make a Transformers model of the T5 family run on FAT5's attention and norm, in place.

    Outputs and gradients stay equal, up to rounding; parameters, `state_dict`, `save_pretrained` and `generate` with
    its caches stay as they are. T5's position bias and the masks never exist in full, so that memory grows linearly
    with the length. A second call changes nothing.

    Args:
        model: A model of Transformers' T5 (v1.0, v1.1, FLAN), mT5 or UMT5 classes, with any head or as encoder alone;
            or a module that contains such models, which are then patched.

    Returns:
        The same model.

    Raises:
        ValueError: The module contains no such model, or attention classes of its own that derive from theirs.
        RuntimeError: This release of Transformers makes T5's bias in a way that is not known here.
    """
    models = list(_models_in(model))
    for module in model.modules():
        for original in _KERNEL_CLASSES:
            if isinstance(module, original) and type(module) not in (original, _KERNEL_CLASSES[original]):
                raise ValueError(
                    f"got a {type(module).__name__}, which derives from {original.__name__}; fat5.patch replaces "
                    "Transformers' own class alone: patch the model before other tools wrap or change its modules"
                )
    for attention in (T5Attention, MT5Attention, UMT5Attention):
        _check_known(attention)
    for module in model.modules():
        if type(module) in _KERNEL_CLASSES:
            module.__class__ = _KERNEL_CLASSES[type(module)]
        if isinstance(module, KernelAttention):
            # Without a bias of its own a module would make one of zeros [1, heads, Lq, Lk], rather than ask for it.
            module.has_relative_attention_bias = True
    replaced = {part: part.config._attn_implementation for part in models}  # before any changes: parts share a config
    for part, implementation in replaced.items():
        if implementation != NAME:
            setattr(part, _REPLACED, implementation)
            part.set_attn_implementation(NAME)
    return model


def unpatch(model: ModelT) -> ModelT:
    """Undo `patch`, in place: the model runs on Transformers' own code again.

    Args:
        model: A model given to `patch`; one that was not stays as it is.

    Returns:
        The same model.

    Raises:
        ValueError: The module contains no model of the T5 family.
    """
    for part in _models_in(model):
        implementation = part.__dict__.pop(_REPLACED, None)
        if implementation is not None and part.config._attn_implementation == NAME:
            part.set_attn_implementation(implementation)
    for module in model.modules():
        if isinstance(module, KernelAttention):
            module.has_relative_attention_bias = hasattr(module, "relative_attention_bias")
        if type(module) in _ORIGINAL_CLASSES:
            module.__class__ = _ORIGINAL_CLASSES[type(module)]
    return model


def _models_in(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the T5, mT5 and UMT5 models in a module: itself, its stacks, what it wraps."""
    found = False
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, _FAMILIES):
            found = True
            yield module
    if not found:
        name = type(model).__name__
        raise ValueError(
            f"got a {name}; expected a model of Transformers' T5, mT5 or UMT5 classes (FLAN-T5 is a T5)"
            + ("; FAT5's own models run on these kernels as they are" if name.startswith("FAT5") else "")
        )


def _check_known(attention: type[nn.Module]) -> None:
    """Raise unless this class makes its bias in the method, and with the arguments, that `KernelAttention` replaces."""
    method = getattr(attention, "compute_bias", None)
    arguments = ["self", "query_length", "key_length", "device", "past_seen_tokens"]
    if method is None or list(inspect.signature(method).parameters) != arguments:
        raise RuntimeError(
            f"transformers {transformers.__version__} makes the bias of {attention.__name__} in another way than the "
            "releases that fat5.patch knows, 5.17 to 5.24; use one of those, or a newer fat5"
        )
