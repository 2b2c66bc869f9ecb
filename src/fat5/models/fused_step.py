"""A decoder's step of one token in few kernels, for a T5 with gated feed-forward layers.

As modules a layer is 14 kernels, of which each takes some microseconds whatever it does. Here norms and gates are part
of the linear layers that follow and precede them, and attention stores the keys and values itself, which leaves 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fat5.models.joined_weights import JoinedWeights
from fat5.models.stack import CrossAttentionLayer, FAT5Block, FAT5Stack, FeedForwardLayer, SelfAttentionLayer
from fat5.models.step_shape import StepShape
from fat5.nn import Attention, FeedForward, RelativePositionBias, RMSNorm, SequenceLayout
from fat5.nn.dropout import Dropout
from fat5.nn.feed_forward import GATED_GELUS
from fat5.ops import add_rms_norm, flash_attention
from fat5.ops.attention.backends import MAX_HEAD_DIM
from fat5.ops.kernels_or_torch import KERNEL_TYPES
from fat5.ops.step import step_attention, step_linear
from fat5.ops.step.linear import linear_refusal

if TYPE_CHECKING:
    from fat5.models.modeling import FAT5ForConditionalGeneration

_KNOWN = {
    *(FAT5Stack, FAT5Block, SelfAttentionLayer, CrossAttentionLayer, FeedForwardLayer),
    *(Attention, FeedForward, RMSNorm, RelativePositionBias, nn.Linear, nn.Embedding, Dropout, nn.ModuleList),
}
_MOST_ROWS = 64  # beyond, the kernels of larger products are faster
_LONG, _ENOUGH_HEADS = 512, 64  # keys from which as many heads of rows are needed to keep a GPU busy unsplit


def takes_model(model: FAT5ForConditionalGeneration, shape: StepShape, joined: JoinedWeights) -> bool:
    """Return whether `FusedStep` computes what a model's decoder computes in steps of this shape."""
    config, decoder, device = model.config, model.decoder, model.shared.weight.device
    if (
        shape.source_holes
        or shape.target_padding == "holes"
        or shape.batch * shape.beams > _MOST_ROWS
        or shape.dtype not in KERNEL_TYPES
        or config.position_encoding not in ("relative", "none")
        or "torch" in (config.attention_backend, config.kernel_backend)
        or config.d_kv > MAX_HEAD_DIM
        or config.activation not in GATED_GELUS
        or type(decoder.embed_tokens) is not nn.Embedding
        or any(weight is None for weight in (*joined.attention, *joined.feed_forward))
        or any(linear_refusal(config.d_model, shape.dtype, device, gated=gated) for gated in (False, True))
    ):
        return False
    for module in decoder.modules():
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if type(module) not in _KNOWN or hooked or (isinstance(module, nn.Linear) and module.bias is not None):
            return False  # an adapter, for example, whose weight says less than it does
    weights = (weight for name, weight in decoder.named_parameters() if "relative_attention_bias" not in name)
    return all(weight.dtype == shape.dtype and weight.device == device for weight in weights)


class FusedStep:
    """The decoder's step, for a model and shape that `takes_model` accepts.

    Args:
        model: The model.
        shape: Sizes.
        joined: Its joined weights.
    """

    def __init__(self, model: FAT5ForConditionalGeneration, shape: StepShape, joined: JoinedWeights) -> None:
        self._decoder = model.decoder
        self._config = model.config
        self._shape = shape
        self._joined = joined
        self._layers: list[Any] = [cast(Any, block).layer for block in model.decoder.block]
        self._tables = [self._table(layer) for layer in self._layers]

    def _table(self, layer: Any) -> Tensor | None:
        """Return a layer's own bias by distance, float32 [H, 2R + 1]."""
        bias = getattr(layer[0].SelfAttention, "relative_attention_bias", None)
        return None if bias is None else bias.by_distance().table.detach().clone()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the bias of the weights again: they may have been trained."""
        for layer, table in zip(self._layers, self._tables, strict=True):
            if table is not None:
                table.copy_(layer[0].SelfAttention.relative_attention_bias.by_distance().table)

    def __call__(
        self,
        tokens: Tensor,
        own: Tensor,
        cross: Tensor,
        positions: Tensor,
        target: SequenceLayout,
        source: SequenceLayout,
    ) -> Tensor:
        """Return the decoder's last states of one token a row, and store its keys and values.

        Args:
            tokens: int64 [rows].
            own: Keys and values of self-attention, [layers, 2, rows, L, H, D]; slots `positions` are filled in.
            cross: Those of cross-attention, [layers, 2, batch, L, H, D].
            positions: int64 [rows], tokens in the cache.
            target: Layout of the decoder's slots.
            source: That of the encoder's.

        Returns:
            [rows, d_model].
        """
        eps, backend = self._config.layer_norm_epsilon, self._config.kernel_backend
        heads = (self._config.num_heads, self._config.d_kv)
        x: Tensor = self._decoder.embed_tokens.weight
        more: dict[str, Any] = {"tokens": tokens}
        table: Tensor | None = None
        for index, layer in enumerate(self._layers):
            attention, feed_forward = layer[0].SelfAttention, layer[2].DenseReluDense
            settings: dict[str, Any] = {"eps": eps, "backend": backend}
            joined = cast(Tensor, self._joined.attention[index])
            projected, states = step_linear(x, joined, norm=layer[0].layer_norm.weight, **more, **settings)
            q, k, v = projected.view(len(tokens), 3, *heads).unbind(1)
            table = table if self._tables[index] is None else self._tables[index]
            keys, values = own[index]
            attended = step_attention(
                q, keys, values, new=(k, v), positions=positions, table=table, key_starts=target.starts,
                key_lengths=target.lengths, backend=backend,
            )  # fmt: skip
            update = self._multiply(attended.flatten(1), attention.o.weight)
            attention, norm = layer[1].EncDecAttention, layer[1].layer_norm.weight
            q, states = step_linear(update, attention.q.weight, residual=states, norm=norm, **settings)
            keys, values = cross[index]
            attended = self._cross_attention(q.view(len(tokens), *heads), keys, values, source)
            update = self._multiply(attended.flatten(1), attention.o.weight)
            inner, states = step_linear(
                update, cast(Tensor, self._joined.feed_forward[index]), residual=states,
                norm=layer[2].layer_norm.weight, approximate=GATED_GELUS[self._config.activation], **settings,
            )  # fmt: skip
            x, more = self._multiply(inner, feed_forward.wo.weight), {"residual": states}
        final = self._decoder.final_layer_norm.weight
        return add_rms_norm(x, more["residual"], final, eps, backend=backend)[0]

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if linear_refusal(x.shape[1], x.dtype, x.device, gated=False) is not None:
            return F.linear(x, weight)
        return step_linear(x, weight, backend=self._config.kernel_backend)[0]

    def _cross_attention(self, q: Tensor, keys: Tensor, values: Tensor, source: SequenceLayout) -> Tensor:
        bounds: dict[str, Any] = {"key_starts": source.starts, "key_lengths": source.lengths}
        rows, heads, _ = q.shape
        if self._shape.beams == 1 and (keys.shape[1] <= _LONG or rows * heads >= _ENOUGH_HEADS):
            return step_attention(q, keys, values, backend=self._config.kernel_backend, **bounds)
        # Beams are queries of one row; the keys of few long rows are split among programs.
        grouped = q.view(keys.shape[0], -1, *q.shape[1:])
        backend = self._config.attention_backend
        return flash_attention(grouped, keys, values, backend=backend, **bounds).reshape(q.shape)
