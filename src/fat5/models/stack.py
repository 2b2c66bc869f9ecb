"""T5's encoder and decoder stacks, with the module names of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithCrossAttentions

from fat5.models.cache import DecoderCache, TransformersCache
from fat5.models.configuration import FAT5Config
from fat5.models.token_layout import make_layout, token_shape
from fat5.nn import Attention, FeedForward, KeyValues, RMSNorm, SequenceLayout
from fat5.nn.attention_weights import recorded_weights
from fat5.nn.dropout import Dropout
from fat5.nn.joined import joined_weights
from fat5.nn.plans import AttentionPlans
from fat5.nn.position import StackPositions, locate
from fat5.nn.shared_keys import LayerKeys, SharedKeys
from fat5.ops.norm import add_residual
from fat5.ops.operators import plain_calls


class _Sublayer(nn.Module):
    """A residual sublayer: `x + dropout(f(norm(x)))`.

    The addition at its end is left to the norm that comes next, which does both in one pass: a sublayer takes the
    states and the update of the sublayer before, and returns their sum and its own update.
    """

    def __init__(self, config: FAT5Config) -> None:
        super().__init__()
        self.layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon, backend=config.kernel_backend)
        self.dropout = Dropout(config.dropout_rate)

    def _add_and_normalise(self, hidden_states: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum."""
        if update is None:
            return self.layer_norm(hidden_states), hidden_states
        return self.layer_norm(update, hidden_states)


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
        self,
        hidden_states: Tensor,
        update: Tensor | None,
        layout: SequenceLayout,
        position_bias: Tensor | None,
        positions: StackPositions,
        cache: KeyValues | None = None,
        query_offset: int | Tensor | None = None,
        weight: Tensor | None = None,
        plans: AttentionPlans | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the states before this sublayer, and its update."""
        normed, hidden_states = self._add_and_normalise(hidden_states, update)
        attended = self.SelfAttention(
            normed, layout, position_bias, positions, cache=cache, query_offset=query_offset, weight=weight, plans=plans
        )
        return hidden_states, self.dropout(attended)


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
        self,
        hidden_states: Tensor,
        update: Tensor | None,
        layout: SequenceLayout,
        encoder_states: Tensor,
        encoder_layout: SequenceLayout,
        cache: KeyValues | None = None,
        shared: LayerKeys | None = None,
        plans: AttentionPlans | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the states before this sublayer, and its update."""
        normed, hidden_states = self._add_and_normalise(hidden_states, update)
        attended = self.EncDecAttention(
            normed,
            layout,
            key_value_states=encoder_states,
            key_value_layout=encoder_layout,
            cache=cache,
            shared=shared,
            plans=plans,
        )
        return hidden_states, self.dropout(attended)


class FeedForwardLayer(_Sublayer):
    """Feed-forward as a residual sublayer."""

    def __init__(self, config: FAT5Config, *, keep_inner: bool = False) -> None:
        super().__init__(config)
        self.DenseReluDense = FeedForward(
            config.d_model,
            config.d_ff,
            activation=config.activation,
            gated=config.is_gated,
            dropout=config.dropout_rate,
            backend=config.kernel_backend,
            keep_inner=keep_inner,
        )

    def forward(
        self, hidden_states: Tensor, update: Tensor | None, joined: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the states before this sublayer, and its update."""
        normed, hidden_states = self._add_and_normalise(hidden_states, update)
        return hidden_states, self.dropout(self.DenseReluDense(normed, joined))


class FAT5Block(GradientCheckpointingLayer):
    """One layer of a stack: self-attention, in a decoder cross-attention, feed-forward."""

    def __init__(self, config: FAT5Config, *, is_decoder: bool, owns_bias: bool, index: int) -> None:
        super().__init__()
        self.index = index
        # What the last layers keep is let go first, and a decoder has fewer tokens than an encoder. The first third
        # makes it again: its share would be there together with the gradient of all layers' keys and values.
        keep_inner = is_decoder and 3 * (index + 1) > (config.num_decoder_layers or 0)
        self.layer = nn.ModuleList([SelfAttentionLayer(config, causal=is_decoder, owns_bias=owns_bias)])
        if is_decoder:
            self.layer.append(CrossAttentionLayer(config))
        self.layer.append(FeedForwardLayer(config, keep_inner=keep_inner))

    def forward(
        self,
        hidden_states: Tensor,
        update: Tensor | None,
        position_bias: Tensor | None,
        encoder_states: Tensor | None,
        layout: SequenceLayout,
        positions: StackPositions,
        encoder_layout: SequenceLayout | None = None,
        cache: DecoderCache | None = None,
        query_offset: int | Tensor | None = None,
        shared: LayerKeys | None = None,
        joined: tuple[Tensor | None, Tensor | None] = (None, None),
        plans: AttentionPlans | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, SharedKeys | None]:
        """Return the states, the update still to be added, the position bias, and keys and values of cross-attention.

        The bias is this block's own, or what it got; keys and values are those that it got, as the blocks behind it
        take them. `joined` are weights of self-attention and feed-forward that have been joined for all blocks, `plans`
        the attentions' plans.

        The bias is made inside the block that owns its parameters, so that a wrapper that gathers parameters a block at
        a time finds them there.
        """
        own, *cross, feed_forward = cast(Any, self.layer)  # by number, each look-up would take microseconds
        own_bias = own.SelfAttention.own_bias(positions, layout, hidden_states.device)
        position_bias = own_bias if own_bias is not None else position_bias
        own_cache, cross_cache = (None, None) if cache is None else cache.layer(self.index)
        hidden_states, update = own(
            hidden_states, update, layout, position_bias, positions, own_cache, query_offset, joined[0], plans
        )
        if encoder_states is not None:
            hidden_states, update = cross[0](
                hidden_states, update, layout, encoder_states, encoder_layout, cross_cache, shared, plans
            )
        wi = joined[1] if cache is None else cache.joined_feed_forward(self.index)
        hidden_states, update = feed_forward(hidden_states, update, wi)
        return hidden_states, update, position_bias, None if shared is None else shared.after


_OWN = (
    FAT5Block, SelfAttentionLayer, CrossAttentionLayer, FeedForwardLayer, Attention, FeedForward, RMSNorm, Dropout
)  # fmt: skip


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
            FAT5Block(config, is_decoder=is_decoder, owns_bias=i == 0 or config.relative_attention_per_layer, index=i)
            for i in range(num_layers or 0)
        )
        self.kernel_backend = config.kernel_backend
        self.final_layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon, backend=config.kernel_backend)
        self.dropout = Dropout(config.dropout_rate)

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
        cache: DecoderCache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool = True,
    ) -> BaseModelOutputWithCrossAttentions | tuple[Any, ...]:
        """Run the stack.

        Args:
            input_ids: [B, L], or packed [total].
            attention_mask: [B, L], non-zero where real; padding on any side, or holes. All real by default.
            inputs_embeds: Instead of input_ids: [B, L, d_model] or packed [total, d_model].
            cu_seqlens: Packed: int tensor [documents + 1].
            max_seqlen: Packed: longest document, or an upper bound.
            layout: Instead of the mask or cu_seqlens, where the caller has it already; with a cache, its keys included.
            encoder_states: Decoder: the encoder's output, [B, Lk, d_model] or packed.
            encoder_layout: Decoder: its layout.
            cache: Decoder: keys and values of the tokens before these.
            output_hidden_states: Return the states before each block, and the last; by default as the configuration.
            output_attentions: Return the attention weights of each layer, before dropout, [B, heads, Lq, Lk] or packed
                [heads, total_q, total_k]; by default as the configuration. They are made for this alone, at many times
                the cost of attention, and carry no gradients.
            return_dict: False for a plain tuple.

        Returns:
            `last_hidden_state`, [B, L, d_model] or packed [total, d_model]; where asked for `hidden_states`,
            `attentions` and in a decoder `cross_attentions`.
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions:
            return self._with_attentions(
                return_dict,
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                layout=layout,
                encoder_states=encoder_states,
                encoder_layout=encoder_layout,
                cache=cache,
                output_hidden_states=output_hidden_states,
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if layout is None:
            layout = make_layout(token_shape(input_ids, inputs_embeds), attention_mask, cu_seqlens, max_seqlen)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = self.dropout(hidden_states)
        past: int | Tensor = 0
        num_keys: int | None = None
        query_offset: int | Tensor | None = None
        if cache is not None:
            past, num_keys = cache.past, cache.num_keys(hidden_states.shape[1])
            query_offset = past.expand(hidden_states.shape[0]).contiguous() if isinstance(past, Tensor) else past
        in_full = self._steps_in_full(cache, hidden_states)
        if in_full and encoder_states is not None and encoder_layout is not None:
            encoder_layout = encoder_layout.in_full(encoder_states.shape[1])
            if past == 0 and encoder_layout.mask is not None:  # their keys and values are kept
                encoder_states = encoder_states.masked_fill(~encoder_layout.mask[..., None], 0)
        positions = locate(
            self.position,
            layout,
            hidden_states,
            self.head_dim,
            causal=self.is_decoder,
            training=self.training,
            past=past,
            num_keys=num_keys,
            in_full=in_full and hidden_states.shape[1] == 1,
        )
        positions = positions.on_backend(self.kernel_backend)
        position_bias: Tensor | None = None
        update: Tensor | None = None
        shared = None if cache is not None or encoder_states is None else self._shared_keys(encoder_states)
        joined = self._joined_weights() if cache is None else [(None, None)] * len(self.block)
        plans = AttentionPlans() if cache is None and self._makes_for_all() else None
        seen: list[Tensor] = []
        for place, (block, weights) in enumerate(zip(self.block, joined, strict=True)):
            # A checkpoint keeps what goes into a block: one tensor rather than two.
            if update is not None and (output_hidden_states or (block.gradient_checkpointing and self.training)):
                hidden_states, update = add_residual(update, hidden_states), None
            if output_hidden_states:
                seen.append(hidden_states)
            hidden_states, update, position_bias, shared = block(
                hidden_states,
                update,
                position_bias,
                encoder_states,
                layout=layout,
                positions=positions,
                encoder_layout=encoder_layout,
                cache=cache,
                query_offset=query_offset,
                shared=None if shared is None else shared.of_layer(place),  # of blocks left out, indices have gaps
                joined=weights,
                plans=plans,
            )
        if update is None:
            hidden_states = self.final_layer_norm(hidden_states)
        else:
            hidden_states, _ = self.final_layer_norm(update, hidden_states)
        hidden_states = self.dropout(hidden_states)
        all_states = (*seen, hidden_states) if output_hidden_states else None
        output = BaseModelOutputWithCrossAttentions(last_hidden_state=hidden_states, hidden_states=all_states)
        return output if return_dict else output.to_tuple()

    def _steps_in_full(self, cache: DecoderCache | None, hidden_states: Tensor) -> bool:
        """Whether masks and a query's bias are made once for all layers, as PyTorch's own attention takes them.

        That is on a CPU without gradients, where the layers' attentions to one query are bound by the host.
        """
        grows = isinstance(cache, TransformersCache) and not isinstance(cache.past, Tensor)
        by_torch = hidden_states.device.type == "cpu" and self.config.attention_backend in ("auto", "torch")
        return grows and by_torch and plain_calls()

    def _shared_keys(self, encoder_states: Tensor) -> SharedKeys | None:
        """Return keys and values of all layers, or None where each layer is to make its own."""
        return SharedKeys.make(self._cross_attentions(), encoder_states) if self._makes_for_all() else None

    def _joined_weights(self) -> Sequence[tuple[Tensor | None, Tensor | None]]:
        """Return for each block weights of self-attention and feed-forward, or None where it is to join them itself.

        That is also outside of a compiled step, where gradients are sent to other ranks as each layer has its own.
        """
        if not torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._makes_for_all():
            return [(None, None)] * len(self.block)
        layers = [cast(Any, block).layer for block in self.block]
        own = joined_weights([layer[0].SelfAttention.joined_maps() for layer in layers])
        return list(zip(own, joined_weights([layer[-1].DenseReluDense.joined_maps() for layer in layers]), strict=True))

    def _makes_for_all(self) -> bool:
        """Whether something may be made for all blocks before the first one runs.

        Not where a block is computed a second time, to keep less; and not where somebody has wrapped one, or a layer in
        it, or replaced its `forward`: a wrapper may hold the weights only while what is in it runs, run it without
        gradients, or run it again in the backward.
        """
        blocks = [block for block in self.block if type(block) is FAT5Block]
        if len(blocks) < len(self.block) or any(block.training and block.gradient_checkpointing for block in blocks):
            return False
        parts = [part for block in blocks for part in (block, *block.layer)]
        parts += [child for part in parts if isinstance(part, _Sublayer) for child in part.children()]
        return all(type(part) in _OWN and "forward" not in vars(part) for part in parts)

    def _cross_attentions(self) -> list[Attention]:
        return [cast(CrossAttentionLayer, cast(FAT5Block, block).layer[1]).EncDecAttention for block in self.block]

    def _with_attentions(
        self, return_dict: bool, **inputs: Any
    ) -> BaseModelOutputWithCrossAttentions | tuple[Any, ...]:
        own = [cast(SelfAttentionLayer, cast(FAT5Block, block).layer[0]).SelfAttention for block in self.block]
        cross = self._cross_attentions() if self.is_decoder else []
        with recorded_weights(own) as own_weights, recorded_weights(cross) as cross_weights:
            output = cast(BaseModelOutputWithCrossAttentions, self.forward(**inputs, output_attentions=False))
        output.attentions = tuple(own_weights)
        if self.is_decoder and inputs["encoder_states"] is not None:
            output.cross_attentions = tuple(cross_weights)
        return output if return_dict else output.to_tuple()
