"""A cache of fixed addresses, and the decoder's step of one token over it as a CUDA graph.

A step is some 200 small kernels. Launched one by one the host takes several times as long as the GPU; a graph launches
them all at once, and needs every tensor to stay where it is and every number that changes to be on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from fat5.models.cache import CACHE_NAME
from fat5.models.cuda_graph import record_graph
from fat5.models.fused_step import FusedStep, takes_model
from fat5.models.joined_weights import JoinedWeights
from fat5.models.outputs import FAT5Seq2SeqOutput
from fat5.models.products import multiply_into
from fat5.models.step_shape import StepShape
from fat5.nn import Attention, KeyValues, SequenceLayout

if TYPE_CHECKING:
    from fat5.models.modeling import FAT5ForConditionalGeneration


class StepCache(EncoderDecoderCache):
    """Keys and values of a decoder in buffers that stay where they are, as a `DecoderCache`.

    Passes through Transformers' generation loops as their cache. Outside a graph the number of tokens in it is an int;
    inside it is on the device, and attention sees the buffers whole, with its bounds on the device too.

    Args:
        model: Whose decoder will run.
        shape: Sizes.
    """

    def __init__(self, model: FAT5ForConditionalGeneration, shape: StepShape) -> None:
        super().__init__(DynamicCache(), DynamicCache())
        config, device = model.config, model.shared.weight.device
        self.shape = shape
        self.length = 0
        self._replay: Callable[[], Tensor] | None = None
        self._replay_filling: Callable[[], Tensor] | None = None
        self._in_graph = False
        rows, heads, layers = shape.batch * shape.beams, (config.num_heads, config.d_kv), len(model.decoder.block)
        with torch.inference_mode(False):  # the buffers outlive the call
            self._own = torch.zeros(layers, 2, rows, shape.target_length, *heads, dtype=shape.dtype, device=device)
            self._cross = torch.zeros(
                layers, 2, shape.batch, shape.source_length, *heads, dtype=shape.dtype, device=device
            )
            self._states = torch.zeros(
                shape.batch, shape.source_length, config.d_model, dtype=shape.dtype, device=device
            )
            self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self._positions = torch.zeros(rows, dtype=torch.int64, device=device)  # all alike
            self._source_starts, self._source_lengths = torch.zeros(2, shape.batch, dtype=torch.int64, device=device)
            self._source_mask = torch.zeros(shape.batch, shape.source_length, dtype=torch.bool, device=device)
            self._target_starts, self._target_lengths = torch.zeros(2, rows, dtype=torch.int64, device=device)
            self._target_mask = torch.ones(rows, shape.target_length, dtype=torch.bool, device=device)
            self._no_states = torch.zeros(0, device=device)
            self._joined = JoinedWeights(model)
            self._fused = FusedStep(model, shape, self._joined) if takes_model(model, shape, self._joined) else None
        self._source_layout = (
            SequenceLayout(mask=self._source_mask)
            if shape.source_holes
            else SequenceLayout(starts=self._source_starts, lengths=self._source_lengths)
        )
        self._target_layout = {
            "none": SequenceLayout(),
            "start": SequenceLayout(starts=self._target_starts, lengths=self._target_lengths),
            "holes": SequenceLayout(mask=self._target_mask),
        }[shape.target_padding]

    def begin(
        self,
        model: FAT5ForConditionalGeneration,
        encoder_states: Tensor,
        source: SequenceLayout,
        target: SequenceLayout,
    ) -> None:
        """Empty the cache and fill in the encoder's keys and values.

        Args:
            model: The model.
            encoder_states: [batch, L, d_model], L at most the shape's `source_length`.
            source: Their layout.
            target: Layout of the decoder's prompt; what comes after it counts as real.
        """
        self.length = 0
        self._positions.zero_()
        length = encoder_states.shape[1]
        self._states[:, :length] = encoder_states
        if length < self.shape.source_length:
            self._states[:, length:] = 0  # a bias of -inf would not hide a NaN of an earlier call
        if self._replay_filling is None:
            self._fill(model)
        else:
            self._replay_filling()
        if source.mask is not None:
            self._source_mask.zero_()
            self._source_mask[:, :length] = source.mask
        elif source.starts is None or source.lengths is None:
            self._source_starts.zero_()
            self._source_lengths.fill_(length)
        else:
            self._source_starts.copy_(source.starts)
            self._source_lengths.copy_(source.lengths)
        if target.mask is not None:
            self._target_mask.fill_(True)
            self._target_mask[:, : target.mask.shape[1]] = target.mask
        elif target.starts is not None:
            self._target_starts.copy_(target.starts)
            self._target_lengths.copy_(self.shape.target_length - target.starts)

    def _fill(self, model: FAT5ForConditionalGeneration) -> Tensor:
        """Make keys and values of the encoder's states, and what is made of weights, which may have been trained."""
        self._joined.refresh()
        if self._fused is not None:
            self._fused.refresh()
        for block, (keys, values) in zip(model.decoder.block, self._cross, strict=True):
            attention = cast(Attention, cast(Any, block).layer[1].EncDecAttention)
            multiply_into(attention.k, self._states, keys)
            multiply_into(attention.v, self._states, values)
        return self._cross

    def forward(self, model: FAT5ForConditionalGeneration) -> Tensor:
        """Return the logits [rows, vocab_size] that follow `tokens`, and add those to the cache, kernel by kernel."""
        if self._in_graph and self._fused is not None:
            states = self._fused(
                self.tokens[:, 0], self._own, self._cross, self._positions, self._target_layout, self._source_layout
            )
            self._positions += 1
            return model.lm_head(model.head_inputs(states))
        return model.lm_head(model.head_inputs(self.decode(model, self.tokens).last_hidden_state))[:, -1]

    def decode(
        self, model: FAT5ForConditionalGeneration, tokens: Tensor, output_hidden_states: bool | None = None
    ) -> Any:
        """Return what the decoder makes of tokens [rows, n], and add them to the cache."""
        layout = self._target_layout
        if layout.mask is not None:
            layout = SequenceLayout(mask=layout.mask[:, : self.num_keys(tokens.shape[1])])
        output = model.decoder(
            input_ids=tokens,
            layout=layout,
            encoder_states=self._no_states,
            encoder_layout=self._source_layout,
            cache=self,
            output_hidden_states=output_hidden_states,
        )
        self._positions += tokens.shape[1]
        self.length += 0 if self._in_graph else tokens.shape[1]
        return output

    def capture(self, model: FAT5ForConditionalGeneration, step: Callable[[], Tensor]) -> None:
        """Make a graph of `step`, a function of this cache's buffers that returns logits; `replay` then runs it.

        And one of what `begin` does with the encoder's states. What the buffers hold afterwards has no meaning: `begin`
        comes after this.
        """

        def on_device() -> Tensor:
            self._in_graph = True
            try:
                return step()
            finally:
                self._in_graph = False

        self._replay_filling = record_graph(lambda: self._fill(model), self.tokens.device)
        self._replay = record_graph(on_device, self.tokens.device)

    @property
    def is_captured(self) -> bool:
        """True if a step is a graph."""
        return self._replay is not None

    def replay(self) -> Tensor:
        """Run the captured step and return its logits, in a buffer that the next step overwrites."""
        if self._replay is None:
            raise RuntimeError("this cache has no captured step")
        logits = self._replay()
        self.length += 1
        return logits

    def run(
        self, model: FAT5ForConditionalGeneration, tokens: Tensor, output_hidden_states: bool | None
    ) -> FAT5Seq2SeqOutput:
        """Return what the model returns for tokens [rows, n] with this cache."""
        if self.is_captured and tokens.shape[1] == 1 and not output_hidden_states:
            self.tokens.copy_(tokens)
            output = FAT5Seq2SeqOutput(logits=self.replay()[:, None])
        else:
            decoded = self.decode(model, tokens, output_hidden_states)
            logits = model.lm_head(model.head_inputs(decoded.last_hidden_state))
            output = FAT5Seq2SeqOutput(logits=logits, decoder_hidden_states=decoded.hidden_states)
        setattr(output, CACHE_NAME, self)
        return output

    @property
    def past(self) -> int | Tensor:
        """Tokens in the cache."""
        return self._positions[0] if self._in_graph else self.length

    def num_keys(self, num_queries: int) -> int:
        """Return the length of the keys that self-attention sees."""
        return self.shape.target_length if self._in_graph else self.length + num_queries

    def layer(self, index: int) -> tuple[KeyValues, KeyValues]:
        """Return the two caches of a layer."""
        return _OwnKeyValues(self, index, self._joined.attention[index]), _CrossKeyValues(self._cross[index])

    def joined_feed_forward(self, index: int) -> Tensor | None:
        """Return a layer's joined weights, where it has two that can be joined."""
        return self._joined.feed_forward[index]

    def append(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values."""
        keys, values = self._own[index]
        if self._in_graph:
            keys.index_copy_(1, self._positions[:1], k)
            values.index_copy_(1, self._positions[:1], v)
        else:
            first, last = self.length, self.length + k.shape[1]
            keys[:, first:last], values[:, first:last] = k, v
            keys, values = keys[:, :last], values[:, :last]
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows; beams of one input share the encoder's keys and values."""
        used = self._own[:, :, :, : self.length]
        used.copy_(used.index_select(2, beam_idx))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in the cache."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return how many tokens there is room for."""
        return self.shape.target_length

    def __len__(self) -> int:
        return len(self._own)

    @property
    def is_linear(self) -> list[bool]:
        """No layer is linear attention."""
        return [False] * len(self)

    @property
    def is_compileable(self) -> bool:
        """Transformers is not to compile a step that is a graph."""
        return False


@dataclass(frozen=True)
class _OwnKeyValues:
    cache: StepCache
    index: int
    joined: Tensor | None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.append(self.index, k, v)

    def stored(self) -> tuple[Tensor, Tensor] | None:
        return None


@dataclass(frozen=True)
class _CrossKeyValues:
    kept: Tensor  # [2, B, L, H, D]
    joined: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("the encoder's keys and values are filled in by StepCache.begin")

    def stored(self) -> tuple[Tensor, Tensor] | None:
        k, v = self.kept
        return k, v
