"""What `generate` asks of a FAT5 model."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, GenerationConfig, GenerationMixin, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from fat5.models.cache import CACHE_NAME, given_cache
from fat5.models.decoding import check_arguments, decode
from fat5.models.encoder_graph import graphed_encoder
from fat5.models.step_cache import StepCache
from fat5.nn import SequenceLayout

_POSITIONAL = list(inspect.signature(GenerationMixin.generate).parameters)[3:]


class FAT5GenerationMixin(GenerationMixin):
    """Generation with the caches of Transformers, or with steps that are CUDA graphs."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        cuda_graph: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Generate, as Transformers' `generate` does, whose arguments and results these are.

        Args:
            inputs: Encoder tokens; also `input_ids=`.
            generation_config: Settings.
            *args: What else Transformers' `generate` takes by position.
            cuda_graph: Run the encoder as one CUDA graph, and each decoder step over a cache of fixed addresses. The
                first call of a shape captures them, later calls reuse them, also for inputs of other lengths of its
                size class. Without a GPU, or with a model that a graph cannot hold, the same loop runs without a graph.
            **kwargs: Settings, and inputs of the model.

        Raises:
            ValueError: Something that `cuda_graph=True` does not do is asked for, such as assisted decoding.
        """
        if not cuda_graph:
            return super().generate(inputs, generation_config, *args, **kwargs)
        named = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        check_arguments(named)
        with graphed_encoder(cast(Any, self)) as encoder:
            loop = partial(decode, streamer=named.get("streamer"), encoder=encoder)
            return super().generate(inputs, generation_config, *args, custom_generate=loop, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the inputs of one step of generation.

        Args:
            input_ids: All decoder tokens so far, [B, L].
            next_sequence_length: How many of them, from the end, are not in the cache yet; None for all.
            encoder_outputs: The encoder's output.
            attention_mask: Encoder mask.
            decoder_attention_mask: Mask over all decoder tokens so far.
            cache: The cache.
            past_key_values: The cache, under its earlier name.
            use_cache: Whether to keep one.
            is_first_iteration: True in the first step.
            **kwargs: Settings that the model is to see in each step, such as output_hidden_states.
        """
        cache = given_cache(cache, past_key_values)
        if is_first_iteration:
            _check_static_inputs(input_ids.device, cache, attention_mask, decoder_attention_mask)
        if decoder_attention_mask is not None and isinstance(cache, EncoderDecoderCache) and cache.is_compileable:
            # One shape for all steps. What lies behind the tokens so far is hidden as later than they are.
            length = cache.get_max_length()
            longer = decoder_attention_mask.new_ones(decoder_attention_mask.shape[0], length)
            longer[:, : decoder_attention_mask.shape[1]] = decoder_attention_mask[:, :length]
            decoder_attention_mask = longer
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        return {
            **{name: value for name, value in kwargs.items() if value is not None},
            "decoder_input_ids": new.clone(),  # contiguous, with the same strides in every step
            "encoder_outputs": encoder_outputs,
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "use_cache": use_cache,
            **({} if cache is None else {CACHE_NAME: cache}),
        }

    def _reorder_cache(self, cache: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Reorder the cache for the beams that go on.

        Beams of one input share the encoder's keys and values, which stay as they are. Static caches keep their
        addresses, so that compiled steps stay valid.
        """
        if isinstance(cache, StepCache):
            cache.reorder_cache(beam_idx)
            return cache
        own = cache.self_attention_cache
        if not isinstance(own, StaticCache):
            own.reorder_cache(cast(torch.LongTensor, beam_idx))
            return cache
        layers: list[Any] = own.layers
        for layer in layers:
            for kept in (layer.keys, layer.values):
                kept.copy_(kept.index_select(0, beam_idx))
        return cache


def _check_static_inputs(device: torch.device, cache: EncoderDecoderCache | None, *masks: Tensor | None) -> None:
    """Refuse holes in a mask where the steps will be compiled: a compiled step cannot look for them."""
    if cache is None or not cache.is_compileable or device.type == "cpu":
        return
    if any(SequenceLayout.from_attention_mask(mask).mask is not None for mask in masks):
        raise ValueError(
            "got an attention mask with padding between real tokens and a static cache, whose compiled steps take "
            "padding at the ends of a row alone; generate without cache_implementation='static'"
        )
