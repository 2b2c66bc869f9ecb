"""Generation whose steps are CUDA graphs: `generate(..., cuda_graph=True)`.

Greedy search without further wishes runs here: choice, end of sequence and count are part of the graph, and the host
looks only now and then whether all rows have ended. Everything else runs in Transformers' own loops, with the decoder's
step as a graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.utils import ModelOutput

from fat5.models.cache import CACHE_NAME
from fat5.models.cuda_graph import can_capture, fingerprint, rounded
from fat5.models.encoder_graph import GraphedEncoder
from fat5.models.greedy_steps import GreedySettings, GreedySteps, Steps
from fat5.models.kept import Kept
from fat5.models.step_cache import StepCache
from fat5.models.step_shape import StepShape
from fat5.nn import SequenceLayout

if TYPE_CHECKING:
    from fat5.models.modeling import FAT5ForConditionalGeneration

_KEPT_STEPS = 2

_MODES = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
}
_kept: Kept[Steps] = Kept(_KEPT_STEPS)


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of `generate` that do not go with `cuda_graph=True`.

    Raises:
        ValueError: One is given.
    """
    for name in ("cache", "past_key_values", "assistant_model", "custom_generate"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"got {name} with cuda_graph=True, which brings a cache and loops of its own; leave one out"
            )
    if arguments.get("use_cache") is False:
        raise ValueError("got use_cache=False with cuda_graph=True; the graph is a step over a cache: leave one out")


def decode(
    model: FAT5ForConditionalGeneration,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    encoder: GraphedEncoder | None = None,
    **model_kwargs: Any,
) -> Tensor | ModelOutput:
    """Generate; called by Transformers' `generate` with all that it has prepared.

    Raises:
        ValueError: A mode of generation that has no graph.
    """
    mode = generation_config.get_generation_mode()
    if mode not in _MODES or generation_config.use_cache is False:
        what = "use_cache=False" if mode in _MODES else str(mode.value).replace("_", " ")
        raise ValueError(
            f"got {what} with cuda_graph=True; expected greedy search, sampling or beams with a cache: leave out "
            "cuda_graph"
        )
    if generation_config.output_attentions or model_kwargs.get("output_attentions") or model.config.output_attentions:
        raise ValueError("got output_attentions=True with cuda_graph=True, whose steps make no weights: leave one out")
    places = set(getattr(model, "hf_device_map", {}).values())
    if len(places) > 1:
        raise ValueError(
            f"got cuda_graph=True with a model spread over {sorted(map(str, places))}; expected one device: load it "
            "without a device_map, or leave out cuda_graph"
        )
    if streamer is not None and generation_config.num_beams > 1:
        raise ValueError("got a streamer with beams; tokens of a beam are known at the end alone")
    beams = max(generation_config.num_beams, generation_config.num_return_sequences)
    encoder_states: Tensor = model_kwargs["encoder_outputs"][0][::beams]
    mask, prompt_mask = (model_kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask"))
    source = None if encoder is None else encoder.source
    if source is None:
        source = SequenceLayout.from_attention_mask(None if mask is None else mask[::beams])
    target = SequenceLayout.from_attention_mask(prompt_mask)
    if target.starts is not None and prompt_mask is not None and not prompt_mask[:, -1].all():
        target = SequenceLayout(mask=prompt_mask.bool())  # padding at the end of a prompt is a hole before what follows
    plain = (
        mode is GenerationMode.GREEDY_SEARCH
        and not logits_processor
        and all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in stopping_criteria)
        and streamer is None
        and not synced_gpus
        and not generation_config.return_dict_in_generate
    )
    greedy = _greedy_settings(generation_config, stopping_criteria) if plain else None
    shape = StepShape(
        batch=encoder_states.shape[0],
        beams=beams,
        source_length=rounded(encoder_states.shape[1]),
        target_length=rounded(generation_config.max_length),
        source_holes=source.mask is not None,
        target_padding="holes" if target.mask is not None else "none" if target.starts is None else "start",
        dtype=encoder_states.dtype,
    )
    with _borrowed_steps(model, shape, greedy) as steps:
        steps.cache.begin(model, encoder_states, source, target)
        if isinstance(steps, GreedySteps):
            longest = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
            return steps.run(model, input_ids, min([generation_config.max_length, *longest]))
        loop = getattr(type(model), _MODES[mode])
        options = {"streamer": streamer} if _MODES[mode] == "_sample" else {}
        result = loop(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            **options,
            **model_kwargs | {CACHE_NAME: steps.cache},
        )
    if isinstance(result, ModelOutput):  # the cache belongs to the next call
        return type(result)(**{name: value for name, value in result.items() if name != CACHE_NAME})
    return result


def _greedy_settings(config: GenerationConfig, criteria: StoppingCriteriaList) -> GreedySettings:
    eos = [token for c in criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id.flatten().tolist()]
    pad = getattr(config, "_pad_token_tensor", None)  # what Transformers fills ended rows with
    return GreedySettings(tuple(eos), 0 if pad is None else int(pad))


def _borrowed_steps(
    model: FAT5ForConditionalGeneration, shape: StepShape, greedy: GreedySettings | None
) -> AbstractContextManager[Steps]:
    """Return a context of steps of this shape, captured where they can be; an earlier call may have left some."""
    capture = can_capture(model, model.decoder)

    def make() -> Steps:
        steps = Steps(StepCache(model, shape)) if greedy is None else GreedySteps(StepCache(model, shape), greedy)
        if capture:
            steps.cache.capture(model, lambda: steps.step(model))
        return steps

    key = (shape, greedy, capture, fingerprint(model.decoder), fingerprint(model.lm_head))
    return _kept.borrowed(model, key, make)
