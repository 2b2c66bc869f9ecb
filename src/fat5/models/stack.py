"""T5's encoder and decoder stacks, with the module names of its checkpoints."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from fat5.models.configuration import FAT5Config
from fat5.nn import Attention, FeedForward, RMSNorm, SequenceLayout
from fat5.nn.position import StackPositions, locate


class _Sublayer(nn.Module):
    """A residual sublayer: `x + dropout(f(norm(x)))`."""

    def __init__(self, config: FAT5Config) -> None:
        super().__init__()
        self.layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)


class SelfAttentionLayer(_Sublayer):
    """Self-attention as a residual sublayer."""

    def __init__(self, config: FAT5Config, *, causal: bool, owns_bias: bool) -> None:
        super().__init__(config)
        self.SelfAttention = Attention(
            config.d_model,
            config.num_heads,
            config.d_kv,
            causal=causal,
            dropout=config.dropout_rate,
            position=config.position_settings,
            owns_bias=owns_bias,
            backend=config.attention_backend,
        )

    def forward(
        self, hidden_states: Tensor, layout: SequenceLayout, position_bias: Tensor | None, positions: StackPositions
    ) -> Tensor:
        """Return the states after this sublayer."""
        attended = self.SelfAttention(self.layer_norm(hidden_states), layout, position_bias, positions)
        return hidden_states + self.dropout(attended)


class CrossAttentionLayer(_Sublayer):
    """Attention to the encoder's output as a residual sublayer; no position encoding of any kind."""

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.EncDecAttention = Attention(
            config.d_model,
            config.num_heads,
            config.d_kv,
            dropout=config.dropout_rate,
            backend=config.attention_backend,
        )

    def forward(
        self, hidden_states: Tensor, layout: SequenceLayout, encoder_states: Tensor, encoder_layout: SequenceLayout
    ) -> Tensor:
        """Return the states after this sublayer."""
        attended = self.EncDecAttention(
            self.layer_norm(hidden_states), layout, key_value_states=encoder_states, key_value_layout=encoder_layout
        )
        return hidden_states + self.dropout(attended)


class FeedForwardLayer(_Sublayer):
    """Feed-forward as a residual sublayer."""

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.DenseReluDense = FeedForward(
            config.d_model,
            config.d_ff,
            activation=config.activation,
            gated=config.is_gated,
            dropout=config.dropout_rate,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the states after this sublayer."""
        return hidden_states + self.dropout(self.DenseReluDense(self.layer_norm(hidden_states)))


class FAT5Block(GradientCheckpointingLayer):
    """One layer of a stack: self-attention, in a decoder cross-attention, feed-forward."""

    def __init__(self, config: FAT5Config, *, is_decoder: bool, owns_bias: bool) -> None:
        super().__init__()
        self.layer = nn.ModuleList([SelfAttentionLayer(config, causal=is_decoder, owns_bias=owns_bias)])
        if is_decoder:
            self.layer.append(CrossAttentionLayer(config))
        self.layer.append(FeedForwardLayer(config))

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor | None,
        encoder_states: Tensor | None,
        layout: SequenceLayout,
        positions: StackPositions,
        encoder_layout: SequenceLayout | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the new states and the stack's position bias: this block's own if it makes one, else the one it got.

        The bias is made inside the block that owns its parameters, so that a wrapper that gathers parameters a block at
        a time finds them there.
        """
        own_bias = cast(SelfAttentionLayer, self.layer[0]).SelfAttention.own_bias(
            positions, layout, hidden_states.device
        )
        position_bias = own_bias if own_bias is not None else position_bias
        hidden_states = self.layer[0](hidden_states, layout, position_bias, positions)
        if encoder_states is not None:
            hidden_states = self.layer[1](hidden_states, layout, encoder_states, encoder_layout)
        return self.layer[-1](hidden_states), position_bias


class FAT5Stack(nn.Module):
    """An encoder or a decoder: embedding, blocks, final norm."""

    main_input_name = "input_ids"  # generate() looks here when it runs the encoder

    def __init__(self, config: FAT5Config, *, is_decoder: bool) -> None:
        super().__init__()
        num_layers = config.num_decoder_layers if is_decoder else config.num_layers
        self.config = config
        self.is_decoder = is_decoder
        self.position = config.position_settings
        self.head_dim = config.d_kv
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.block = nn.ModuleList(
            FAT5Block(config, is_decoder=is_decoder, owns_bias=i == 0 or config.relative_attention_per_layer)
            for i in range(num_layers or 0)
        )
        self.final_layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        layout: SequenceLayout | None = None,
        encoder_states: Tensor | None = None,
        encoder_layout: SequenceLayout | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool = True,
    ) -> BaseModelOutput | tuple[Any, ...]:
        """Run the stack.

        Args:
            input_ids: [B, L], or packed [total].
            attention_mask: [B, L], non-zero where real; padding on any side, or holes. All real by default.
            inputs_embeds: Instead of input_ids: [B, L, d_model] or packed [total, d_model].
            cu_seqlens: Packed: int tensor [documents + 1].
            max_seqlen: Packed: longest document, or an upper bound.
            layout: Instead of the mask or cu_seqlens, where the caller has it already.
            encoder_states: Decoder: the encoder's output, [B, Lk, d_model] or packed.
            encoder_layout: Decoder: its layout.
            output_hidden_states: Return the states before each block, and the last; by default as the configuration.
            output_attentions: Not available: the weights never exist. Must be False or None.
            return_dict: False for a plain tuple.

        Returns:
            `last_hidden_state`, [B, L, d_model] or packed [total, d_model].
        """
        if output_attentions:
            raise ValueError("got output_attentions=True; the attention weights never exist and cannot be returned")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if layout is None:
            layout = make_layout(token_shape(input_ids, inputs_embeds), attention_mask, cu_seqlens, max_seqlen)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = self.dropout(hidden_states)
        positions = locate(
            self.position, layout, hidden_states, self.head_dim, causal=self.is_decoder, training=self.training
        )
        position_bias: Tensor | None = None
        seen: list[Tensor] = []
        for block in self.block:
            seen.append(hidden_states)
            hidden_states, position_bias = block(
                hidden_states,
                position_bias,
                encoder_states,
                layout=layout,
                positions=positions,
                encoder_layout=encoder_layout,
            )
        hidden_states = self.dropout(self.final_layer_norm(hidden_states))
        all_states = (*seen, hidden_states) if output_hidden_states else None
        output = BaseModelOutput(last_hidden_state=hidden_states, hidden_states=all_states)
        return output if return_dict else output.to_tuple()


def token_shape(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> torch.Size:
    """Return the shape of the tokens, [B, L] or packed [total], whichever way they come."""
    if input_ids is not None and inputs_embeds is None:
        return input_ids.shape
    if inputs_embeds is not None and input_ids is None:
        return inputs_embeds.shape[:-1]
    raise ValueError(
        "expected exactly one of input_ids and inputs_embeds; got " + ("both" if input_ids is not None else "neither")
    )


def make_layout(
    shape: torch.Size, attention_mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> SequenceLayout:
    """Return the layout of tokens of this shape that a mask or the offsets of packed documents describe."""
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueError(
            f"got max_seqlen={max_seqlen} with{'out' if cu_seqlens is None else ''} cu_seqlens; they belong together"
        )
    if len(shape) != (2 if cu_seqlens is None else 1):
        raise ValueError(
            f"got inputs of shape {list(shape)}; expected [batch, length] without cu_seqlens, [total] with them"
        )
    if cu_seqlens is not None and max_seqlen is not None:
        if attention_mask is not None:
            raise ValueError("got an attention_mask with cu_seqlens; packed inputs take no mask")
        return SequenceLayout.packed(cu_seqlens, max_seqlen)
    if attention_mask is not None and attention_mask.shape != shape:
        raise ValueError(
            f"got attention_mask {list(attention_mask.shape)} for inputs {list(shape)}; expected one entry a token"
        )
    return SequenceLayout.from_attention_mask(attention_mask)
