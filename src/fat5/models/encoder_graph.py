"""The encoder of a `generate(..., cuda_graph=True)`: one CUDA graph for each size class of its inputs.

Launched kernel by kernel, the encoder of a small model keeps the host busy for several times as long as the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from fat5.models.cuda_graph import can_capture, fingerprint, record_graph, rounded
from fat5.models.kept import Kept
from fat5.models.token_layout import make_layout
from fat5.nn import SequenceLayout

if TYPE_CHECKING:
    from fat5.models.modeling import FAT5ForConditionalGeneration

_KEPT_GRAPHS = 2
_MOST_TOKENS = 65_536  # beyond, the host is faster than the GPU, and a graph would keep its memory for nothing


@dataclass(frozen=True)
class EncoderShape:
    """What the buffers of an encoder's graph depend on.

    Attributes:
        batch: Rows.
        length: Tokens that there is room for.
        padded: Some of the room may hold padding, at the ends of a row.
        dtype: Type of the weights.
    """

    batch: int
    length: int
    padded: bool
    dtype: torch.dtype


class EncoderGraph:
    """An encoder's forward over tokens that stay where they are, as a CUDA graph.

    Args:
        model: Whose encoder will run.
        shape: Sizes.
    """

    def __init__(self, model: FAT5ForConditionalGeneration, shape: EncoderShape) -> None:
        device = model.shared.weight.device
        self.shape = shape
        with torch.inference_mode(False):  # the buffers outlive the call
            self._tokens = torch.zeros(shape.batch, shape.length, dtype=torch.int64, device=device)
            self._starts, self._lengths = torch.zeros(2, shape.batch, dtype=torch.int64, device=device)
        self._lengths.fill_(shape.length)
        layout = SequenceLayout(starts=self._starts, lengths=self._lengths) if shape.padded else SequenceLayout()
        encoder = model.encoder

        def forward() -> Tensor:
            return encoder(input_ids=self._tokens, layout=layout, return_dict=False)[0]

        self._replay: Callable[[], Tensor] = record_graph(forward, device)

    def encode(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the states of tokens [batch, L], L at most the shape's length, in a buffer that the next call writes.

        What other slots of the buffer hold changes nothing in them.
        """
        length = tokens.shape[1]
        self._tokens[:, :length] = tokens
        if layout.starts is not None and layout.lengths is not None:
            self._starts.copy_(layout.starts)
            self._lengths.copy_(layout.lengths)
        elif self.shape.padded:
            self._starts.zero_()
            self._lengths.fill_(length)
        return self._replay()[:, :length]


class GraphedEncoder:
    """What Transformers' `generate` calls as the encoder: a graph where there can be one, else the encoder itself.

    Args:
        model: The model.
        borrowed: Holds the graph until the call of `generate` ends.

    Attributes:
        source: Layout of the inputs, once it was called: nobody has to look at the mask again.
    """

    main_input_name = "input_ids"

    def __init__(self, model: FAT5ForConditionalGeneration, borrowed: ExitStack) -> None:
        self.source: SequenceLayout | None = None
        self._model = model
        self._borrowed = borrowed

    def __call__(self, **inputs: Any) -> Any:
        """Encode, as `forward`."""
        return self.forward(**inputs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Encode; arguments and result are those of `FAT5Stack.forward`."""
        encoder, config = self._model.encoder, self._model.config
        if input_ids is None or inputs_embeds is not None:
            return encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
                return_dict=return_dict,
            )
        layout = self.source = make_layout(input_ids.shape, attention_mask, None, None)
        more = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        more = more or (config.output_attentions if output_attentions is None else output_attentions)
        if more or not self._has_graph(layout, *input_ids.shape):
            return encoder(
                input_ids=input_ids,
                layout=layout,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
                return_dict=return_dict,
            )
        batch, length = input_ids.shape
        shape = EncoderShape(
            batch=batch,
            length=rounded(length),
            padded=layout.starts is not None or length != rounded(length),
            dtype=self._model.shared.weight.dtype,
        )
        key = (shape, fingerprint(encoder))
        graph = self._borrowed.enter_context(_kept.borrowed(self._model, key, lambda: EncoderGraph(self._model, shape)))
        states = graph.encode(input_ids, layout)
        return BaseModelOutput(last_hidden_state=states) if return_dict else (states,)

    def _has_graph(self, layout: SequenceLayout, batch: int, length: int) -> bool:
        if layout.mask is not None or batch * rounded(length) > _MOST_TOKENS:
            return False
        if not can_capture(self._model, self._model.encoder):
            return False
        # FIRE's positions depend on whether any row starts with padding, at which an eager forward looks.
        return self._model.config.position_encoding != "fire" or (layout.starts is None and length == rounded(length))


_kept: Kept[EncoderGraph] = Kept(_KEPT_GRAPHS)
_current: ContextVar[GraphedEncoder | None] = ContextVar("graphed_encoder", default=None)


@contextmanager
def graphed_encoder(model: FAT5ForConditionalGeneration) -> Iterator[GraphedEncoder]:
    """Yield the encoder that `encoder_of_call` returns in this block, for one call of a model's `generate`."""
    with ExitStack() as borrowed:
        encoder = GraphedEncoder(model, borrowed)
        token = _current.set(encoder)
        try:
            yield encoder
        finally:
            _current.reset(token)


def encoder_of_call(model: Any) -> GraphedEncoder | None:
    """Return the encoder of the block of `graphed_encoder` that this runs in, if it is this model's and unused."""
    encoder = _current.get()
    return encoder if encoder is not None and encoder._model is model and encoder.source is None else None
