"""FAT5 models with the Hugging Face interface."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput

from fat5.models.cache import CACHE_NAME, TransformersCache, given_cache, mask_with_past, new_cache
from fat5.models.configuration import FAT5Config
from fat5.models.encoder_graph import encoder_of_call
from fat5.models.generation import FAT5GenerationMixin
from fat5.models.loading import CheckpointLoading
from fat5.models.outputs import FAT5Seq2SeqOutput
from fat5.models.source_layout import source_layout
from fat5.models.stack import FAT5Block, FAT5Stack
from fat5.models.step_cache import StepCache
from fat5.models.token_layout import make_layout, token_shape
from fat5.nn import AlibiSlopes, Attention, FeedForward, FireBias, RelativePositionBias, RMSNorm
from fat5.nn.position import INITIAL_SCALE, slope_exponents
from fat5.ops import CrossEntropyOutput, cross_entropy, linear_cross_entropy
from fat5.ops.attention.backends import BACKENDS

IGNORE_INDEX = -100


class FAT5PreTrainedModel(CheckpointLoading):
    """Base of the FAT5 models: initialisation, tying and loading."""

    config_class = FAT5Config
    config: FAT5Config
    has_decoder = False
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = [FAT5Block.__name__]  # noqa: RUF012

    def __init__(self, config: FAT5Config) -> None:
        if config.is_encoder_decoder != self.has_decoder:
            # A configuration of its own, since the one given may serve a model of the other kind, too.
            config = copy.deepcopy(config)
            config.is_encoder_decoder = self.has_decoder
        super().__init__(config)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For classes outside its own package Transformers skips modules that own no parameter, in case they overwrite
        # loaded ones. `init` below never does: it looks at each parameter's own flag.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """T5's initialisation: the scale of the scores is inside q, so q is far smaller than k and v."""
        config, factor = self.config, self.config.initializer_factor
        if isinstance(module, RMSNorm):
            init.constant_(module.weight, factor)
        elif isinstance(module, Attention):
            inner = module.num_heads * module.head_dim
            init.normal_(module.q.weight, mean=0.0, std=factor * (config.d_model * module.head_dim) ** -0.5)
            init.normal_(module.k.weight, mean=0.0, std=factor * config.d_model**-0.5)
            init.normal_(module.v.weight, mean=0.0, std=factor * config.d_model**-0.5)
            init.normal_(module.o.weight, mean=0.0, std=factor * inner**-0.5)
        elif isinstance(module, RelativePositionBias):
            init.normal_(module.weight, mean=0.0, std=factor * config.d_model**-0.5)
        elif isinstance(module, AlibiSlopes) and module.log2_slopes is not None:
            slopes = slope_exponents(module.num_heads, symmetric=module.symmetric, device=module.log2_slopes.device)
            init.copy_(module.log2_slopes, slopes)
        elif isinstance(module, FireBias):
            init.constant_(module.scale, INITIAL_SCALE)
            init.constant_(module.threshold_factor, 1.0)
            for layer in (module.hidden, module.output):  # PyTorch's own, as the paper's code has it
                bound = factor * layer.in_features**-0.5
                init.uniform_(layer.weight, -bound, bound)
                init.uniform_(layer.bias, -bound, bound)
        elif isinstance(module, FeedForward):
            for wi in [module.wi_0, module.wi_1] if module.gated else [module.wi]:
                init.normal_(wi.weight, mean=0.0, std=factor * config.d_model**-0.5)
            init.normal_(module.wo.weight, mean=0.0, std=factor * config.d_ff**-0.5)
        elif isinstance(module, FAT5PreTrainedModel) and hasattr(module, "shared"):
            # The head sees states of mean square 1. Logits of mean square 1 start the loss near ln(vocab_size): the
            # head, or the scale before a tied one, must be d_model ** -0.5; T5's own std of 1 starts near 100.
            small_embedding = config.tie_word_embeddings and not config.scale_decoder_outputs
            std = factor * (config.d_model**-0.5 if small_embedding else 1.0)
            init.normal_(module.shared.weight, mean=0.0, std=std)
            if hasattr(module, "lm_head") and not config.tie_word_embeddings:
                scale = 1.0 if config.scale_decoder_outputs else config.d_model**-0.5
                init.normal_(module.lm_head.weight, mean=0.0, std=factor * scale)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Refuse Transformers' choices of attention, which would do nothing here; it calls its default "eager"."""
        if requested_attention not in (None, "eager"):
            raise ValueError(
                f"got attn_implementation={requested_attention!r}; FAT5's models have their own attention: leave "
                f"it out, or set attention_backend to 'auto' or one of {sorted(BACKENDS)}"
            )
        return "eager"

    shared: nn.Embedding

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return which weights are one: the stacks' embeddings always, the LM head where the configuration ties it."""
        tied = dict(self._tied_weights_keys or {})
        if not self.config.tie_word_embeddings:
            tied.pop("lm_head.weight", None)
        return tied

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding that encoder and decoder share."""
        return self.shared

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding in every place."""
        self.shared = cast(nn.Embedding, value)
        for name in ("encoder", "decoder"):
            if hasattr(self, name):
                getattr(self, name).embed_tokens = value


class FAT5EncoderModel(FAT5PreTrainedModel):
    """The encoder alone: tokens to hidden states."""

    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}  # noqa: RUF012
    # Those of a whole model, and of heads on the encoder.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^decoder\.", r"^lm_head\.", r"^classifier\.", r"^qa_outputs\."
    ]  # fmt: skip

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = FAT5Stack(self.config, is_decoder=False)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> FAT5Stack:
        """Return the encoder's stack."""
        return self.encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple[Any, ...]:
        """Encode; the arguments and the result are those of `FAT5Stack.forward`."""
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=return_dict is not False,
        )


class FAT5ForConditionalGeneration(FAT5PreTrainedModel, FAT5GenerationMixin):
    """Encoder and decoder with a language modelling head."""

    has_decoder = True

    _tied_weights_keys = {  # noqa: RUF012
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    }
    accepts_loss_kwargs = True  # Trainer then passes num_items_in_batch

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = FAT5Stack(self.config, is_decoder=False)
        self.decoder = FAT5Stack(self.config, is_decoder=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> FAT5Stack:
        """Return the encoder's stack; inside `generate(..., cuda_graph=True)` what runs it as a graph."""
        return cast(FAT5Stack, encoder_of_call(self) or self.encoder)

    def get_decoder(self) -> FAT5Stack:
        """Return the decoder's stack."""
        return self.decoder

    def get_output_embeddings(self) -> nn.Linear:
        """Return the LM head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the LM head."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        decoder_cu_seqlens: Tensor | None = None,
        decoder_max_seqlen: int | None = None,
        cache: EncoderDecoderCache | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        reduction: str = "mean",
        return_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> FAT5Seq2SeqOutput | tuple[Any, ...]:
        """Encode, decode, and score.

        Batches are padded, [B, L] with masks, or packed, [total] with the `cu_seqlens` and `max_seqlen` of both
        sides. With labels the loss is computed by chunks of tokens and the logits never exist, unless asked for.

        Args:
            input_ids: Encoder tokens.
            attention_mask: Encoder mask [B, L], non-zero where real; padding on any side, or holes.
            decoder_input_ids: Decoder tokens; by default the labels shifted right.
            decoder_attention_mask: Decoder mask; with a cache, over the tokens in it too.
            labels: Target tokens, shaped as the decoder's; -100 is ignored.
            inputs_embeds: Instead of input_ids.
            decoder_inputs_embeds: Instead of decoder_input_ids.
            encoder_outputs: Output of an earlier call of the encoder, instead of its inputs.
            cu_seqlens: Offsets of the packed encoder documents, int tensor [documents + 1].
            max_seqlen: Longest encoder document, or an upper bound.
            decoder_cu_seqlens: Offsets of the packed decoder documents, the same documents in order.
            decoder_max_seqlen: Longest decoder document, or an upper bound.
            cache: Keys and values of the tokens before decoder_input_ids, or empty; the call adds its own.
            past_key_values: The same, under the name that it has in earlier releases of Transformers.
            use_cache: Return a cache; by default only where one is given.
            num_items_in_batch: The loss is the sum over the labels divided by this, not their mean: for batches that
                are accumulated.
            reduction: "mean", "sum" or "none" (a loss a token).
            return_logits: By default only where there are no labels.
            output_hidden_states: Return the states of both stacks.
            output_attentions: Return the attention weights of both stacks, see `FAT5Stack.forward`.
            return_dict: False for a plain tuple.

        Returns:
            `FAT5Seq2SeqOutput`.
        """
        if (cu_seqlens is None) != (decoder_cu_seqlens is None):
            raise ValueError("got cu_seqlens for one side alone; packed batches need cu_seqlens and decoder_cu_seqlens")
        cache = given_cache(cache, past_key_values)
        if cache is not None or use_cache:
            cache = self._check_cache(new_cache() if cache is None else cache, packed=cu_seqlens is not None)
        if isinstance(cache, StepCache):
            return cache.run(self, cast(Tensor, decoder_input_ids), output_hidden_states)
        source = token_shape(input_ids, inputs_embeds) if encoder_outputs is None else encoder_outputs[0].shape[:-1]
        encoder_layout = (
            source_layout(cache, source, attention_mask)
            if cu_seqlens is None and max_seqlen is None
            else make_layout(source, attention_mask, cu_seqlens, max_seqlen)
        )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                layout=encoder_layout,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
            )
        encoder_states: Tensor = encoder_outputs[0]
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("expected one of decoder_input_ids, decoder_inputs_embeds and labels")
            decoder_input_ids = self.shift_right(labels, decoder_cu_seqlens)
        target = token_shape(decoder_input_ids, decoder_inputs_embeds)
        past = None if cache is None else TransformersCache(cache)
        if past is not None:
            num_keys = past.num_keys(target[1])
            decoder_attention_mask = mask_with_past(decoder_attention_mask, past.past, target[1], num_keys)
            target = torch.Size((target[0], num_keys))
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            inputs_embeds=decoder_inputs_embeds,
            layout=make_layout(target, decoder_attention_mask, decoder_cu_seqlens, decoder_max_seqlen),
            encoder_states=encoder_states,
            encoder_layout=encoder_layout,
            cache=past,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden_states: Tensor = decoder_outputs[0]
        output = FAT5Seq2SeqOutput(
            encoder_last_hidden_state=encoder_states,
            decoder_last_hidden_state=hidden_states,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            decoder_hidden_states=decoder_outputs.hidden_states,
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
        )
        setattr(output, CACHE_NAME, cache)
        hidden_states = self.head_inputs(hidden_states)
        if labels is not None:
            if labels.shape != hidden_states.shape[:-1]:
                raise ValueError(
                    f"got labels {list(labels.shape)} for decoder inputs {list(hidden_states.shape[:-1])}; "
                    "expected one label a token"
                )
            scores = self._score(hidden_states, labels, reduction if num_items_in_batch is None else "sum")
            output.loss, output.z_loss = scores.loss, scores.z_loss
            if num_items_in_batch is not None:
                output.loss, output.z_loss = scores.loss / num_items_in_batch, scores.z_loss / num_items_in_batch
            output.correct, output.count = scores.correct, scores.count
        if return_logits or (return_logits is None and labels is None):
            output.logits = self.lm_head(hidden_states)
        return output if return_dict is not False else output.to_tuple()

    def _score(self, hidden_states: Tensor, labels: Tensor, reduction: str) -> CrossEntropyOutput:
        terms: dict[str, Any] = {
            "ignore_index": IGNORE_INDEX,
            "label_smoothing": float(self.config.label_smoothing),
            "z_loss": float(self.config.z_loss),
            "reduction": reduction,
            "backend": self.config.kernel_backend,
        }
        if type(self.lm_head) is nn.Linear and not hasattr(self.lm_head, "_hf_hook"):
            return linear_cross_entropy(hidden_states, self.lm_head.weight, labels, **terms)
        # An adapter on the head, or accelerate's move of it to where it computes, acts when the module is called.
        logits = self.lm_head(hidden_states)
        return cross_entropy(logits, labels.to(logits.device), **terms)

    def head_inputs(self, hidden_states: Tensor) -> Tensor:
        """Return the decoder's states as the LM head reads them: scaled where the configuration says so."""
        return hidden_states * self.config.d_model**-0.5 if self.config.scale_decoder_outputs else hidden_states

    def _check_cache(self, cache: EncoderDecoderCache, *, packed: bool) -> EncoderDecoderCache:
        if packed:
            raise ValueError("got a cache with cu_seqlens; packed batches have no cache: pad the batch to generate")
        recomputed = any(cast(FAT5Block, block).gradient_checkpointing for block in self.decoder.block)
        if self.training and recomputed and torch.is_grad_enabled():
            raise ValueError(
                "got a cache with gradient checkpointing, which computes layers a second time: pass use_cache=False"
            )
        return cache

    def shift_right(self, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the decoder's inputs for these labels: each document moved right behind the start token.

        Args:
            labels: [B, L], or packed [total] with cu_seqlens; -100 becomes padding.
            cu_seqlens: Offsets of the packed documents.
        """
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError(f"got decoder_start_token_id={start} and pad_token_id={pad}; shifting labels needs both")
        shifted = labels.roll(1, -1)
        if cu_seqlens is None:
            shifted[..., :1] = start
        else:
            starts = torch.zeros(labels.shape[0] + 1, dtype=torch.bool, device=labels.device)
            starts = starts.index_fill_(0, cu_seqlens.long(), True)
            shifted = torch.where(starts[:-1], start, shifted)
        return shifted.masked_fill(shifted == IGNORE_INDEX, pad)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels right, under the name that Transformers' collators look for."""
        return self.shift_right(labels)
