"""Caches of Transformers, dynamic and static, under every position encoding, and what goes wrong with them."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.utils import ALL_CACHE_NAMES

from fat5.models.generation import _check_static_inputs
from fat5.nn import SequenceLayout
from fat5.nn.layout import additive_mask
from tests.models.position_variants import ENCODINGS, make

CACHE = "cache" if "cache" in ALL_CACHE_NAMES else "past_key_values"
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def static_cache(model, target=40, source=33):
    return EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=n) for n in (target, source)))


def batch(padding="none"):
    """Encoder inputs with padding, and decoder inputs with none, some on the left, or holes too."""
    mask, decoder_mask = torch.ones(3, 33, dtype=torch.int64), torch.ones(3, 29, dtype=torch.int64)
    mask[0, 21:] = 0
    if padding != "none":
        decoder_mask[1, :4] = 0
    if padding == "holes":
        decoder_mask[2, 6:8] = mask[1, 4] = 0
    return torch.randint(2, 97, (3, 33)), mask, torch.randint(2, 97, (3, 29)), decoder_mask


@pytest.mark.parametrize(
    ("kind", "padding"),
    [("dynamic", "holes"), ("static", "left")]
    + [pytest.param(*both, marks=pytest.mark.slow) for both in (
        ("dynamic", "none"), ("dynamic", "left"), ("static", "none"), ("static", "holes"))],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_steps_with_a_cache_equal_one_forward(encoding, kind, padding):
    """Pitfall: positions, a bias or a mask that are not offset by the cache. Chunks of several tokens too."""
    model = make(encoding)
    ids, mask, decoder_ids, decoder_mask = batch(padding)
    given = None if padding == "none" else decoder_mask
    encoded = model.encoder(input_ids=ids, attention_mask=mask)
    fixed = {"encoder_outputs": encoded, "attention_mask": mask, "use_cache": True}
    want = model(**fixed | {"use_cache": None}, decoder_input_ids=decoder_ids, decoder_attention_mask=given)
    assert want.get(CACHE) is None
    cache, steps = None if kind == "dynamic" else static_cache(model), []
    for start, stop in [(0, 7), (7, 12), *((i, i + 1) for i in range(12, 29))]:
        prefix_mask = None if given is None else given[:, :stop]
        out = model(**fixed, decoder_input_ids=decoder_ids[:, start:stop], decoder_attention_mask=prefix_mask,
                    **{CACHE: cache})  # fmt: skip
        cache = out[CACHE]
        steps.append(out.logits)
    real = decoder_mask.bool()
    torch.testing.assert_close(torch.cat(steps, 1)[real], want.logits[real], **TOLERANCE)


@pytest.mark.parametrize("length", [50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_greedy_search_with_and_without_a_cache(encoding, length):
    """Pitfall: the cache past the largest distance, 16."""
    model = make(encoding)
    ids, mask, _, _ = batch()
    torch.nn.init.normal_(model.lm_head.weight)
    options = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "eos_token_id": None}
    want = model.generate(**options, max_new_tokens=length)
    assert len(want.unique()) > 3
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=want[:, :-1]).logits
    assert torch.equal(logits.argmax(-1), want[:, 1:])
    assert torch.equal(model.generate(**options, max_new_tokens=20, use_cache=False), want[:, :21])


@pytest.mark.parametrize(
    ("encoding", "padded"),
    [("relative", True)]
    + [pytest.param(name, padded, marks=pytest.mark.slow) for name in ENCODINGS for padded in (False, True)],
)
@torch.no_grad()
def test_static_steps_compile_once_and_whole(encoding, padded):
    model = make(encoding)
    ids, mask, decoder_ids, _ = batch()
    decoder_mask = torch.ones(3, 40, dtype=torch.int64)
    decoder_mask[1, :3] = 0
    given = decoder_mask if padded else None
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    encoded = model.encoder(input_ids=ids, attention_mask=mask)
    fixed = {"encoder_outputs": encoded, "attention_mask": mask}
    prefix_mask = None if given is None else given[:, :29]
    want = model(**fixed, decoder_input_ids=decoder_ids, decoder_attention_mask=prefix_mask).logits
    fixed |= {CACHE: static_cache(model), "decoder_attention_mask": given}
    steps = [model(**fixed, decoder_input_ids=decoder_ids[:, :7]).logits]
    steps.append(step(**fixed, decoder_input_ids=decoder_ids[:, 7:8]).logits)
    with torch.compiler.set_stance("fail_on_recompile"):
        steps += [step(**fixed, decoder_input_ids=decoder_ids[:, i : i + 1]).logits for i in range(8, 29)]
    real = torch.ones(3, 29, dtype=torch.bool) if given is None else given[:, :29].bool()
    torch.testing.assert_close(torch.cat(steps, 1)[real], want[real], **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}, {"cuda_graph": True}])
def test_keys_and_values_of_the_encoder_are_made_once(options):
    model = make("relative")
    made = []
    for block in model.decoder.block:
        block.layer[1].EncDecAttention.k.register_forward_hook(lambda *_: made.append(1))
    model.generate(input_ids=batch()[0], max_new_tokens=9, eos_token_id=None, **options)
    assert len(made) == len(model.decoder.block)


def test_the_encoders_mask_is_read_once_a_generation(monkeypatch):
    """It does not change from step to step, and a look at it waits for a GPU. Another mask is another look."""
    model = make("relative")
    torch.nn.init.normal_(model.lm_head.weight)
    ids, mask, decoder_ids, _ = batch()
    looks, original = [], SequenceLayout.from_attention_mask
    monkeypatch.setattr(
        SequenceLayout, "from_attention_mask", lambda given: looks.append(given is mask) or original(given)
    )
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    model.generate(input_ids=ids, attention_mask=mask, **options)
    assert sum(looks) == 2, "once for the encoder, and once for the decoder"
    encoded = model.encoder(input_ids=ids, attention_mask=mask)
    cache = None
    for change in (False, True):
        if change:
            mask[:, 5:] = 0
        out = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=decoder_ids[:, :1], use_cache=True,
                    **{CACHE: cache})  # fmt: skip
        cache = out[CACHE]
    plain = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=decoder_ids[:, :1]).logits
    assert not torch.allclose(out.logits, plain), "the cache's first token was seen with the mask before"
    again = model(encoder_outputs=encoded, attention_mask=mask.clone(), decoder_input_ids=decoder_ids[:, :1],
                  use_cache=True)  # fmt: skip
    torch.testing.assert_close(again.logits, plain)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_beams_are_reordered_without_the_encoders_keys(kind):
    model = make("relative")
    ids, _, decoder_ids, _ = batch()
    cache = None if kind == "dynamic" else static_cache(model)
    cache = model(input_ids=ids, decoder_input_ids=decoder_ids[:, :5], use_cache=True, **{CACHE: cache})[CACHE]
    own, cross = (c.layers[1].keys for c in (cache.self_attention_cache, cache.cross_attention_cache))
    before, address = own.clone(), own.data_ptr()
    order = torch.tensor([2, 0, 0])
    model._reorder_cache(cache, order)
    after = cache.self_attention_cache.layers[1].keys
    assert torch.equal(after, before[order])
    assert cache.cross_attention_cache.layers[1].keys is cross
    assert kind == "dynamic" or after.data_ptr() == address, "a compiled step would read the old place"


def test_both_names_of_a_cache_are_known():
    """Pitfall: releases of Transformers disagree on the name."""
    model = make("relative")
    inputs = {"input_ids": batch()[0], "decoder_input_ids": batch()[2]}
    for name in ("cache", "past_key_values"):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        out = model(**inputs, **{name: cache})
        assert out[CACHE] is cache
        assert cache.get_seq_length() == 29
    with pytest.raises(ValueError, match="two names of one thing"):
        model(**inputs, cache=cache, past_key_values=cache)


def test_what_no_cache_can_do_is_refused():
    model = make("rotary, randomized")
    ids, _, decoder_ids, decoder_mask = batch()
    inputs = {"input_ids": ids, "decoder_input_ids": decoder_ids}
    with pytest.raises(ValueError, match="expected an EncoderDecoderCache"):
        model(**inputs, cache=DynamicCache())
    cache = model(**inputs, use_cache=True)[CACHE]
    with pytest.raises(
        ValueError, match=r"got decoder_attention_mask \[3, 29\] for 29 tokens behind a cache.*58 to 58"
    ):
        model(**inputs, decoder_attention_mask=decoder_mask, cache=cache)
    with pytest.raises(ValueError, match=r"call model\.eval"):
        model.train()(**inputs, use_cache=True)
    offsets = torch.tensor([0, 33])
    with pytest.raises(ValueError, match="packed batches have no cache"):
        model(input_ids=ids[0], decoder_input_ids=decoder_ids[0], cu_seqlens=offsets, max_seqlen=33,
              decoder_cu_seqlens=offsets, decoder_max_seqlen=29, use_cache=True)  # fmt: skip
    model = make("relative").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="pass use_cache=False"):
        model(**inputs, use_cache=True)
    holes = torch.tensor([[1, 0, 1]])
    with pytest.raises(ValueError, match="without cache_implementation='static'"):
        _check_static_inputs(torch.device("cuda"), static_cache(model), holes, None)


@pytest.mark.parametrize("padding", ["none", "holes"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_steps_on_a_cpu_take_masks_and_biases_made_once(monkeypatch, encoding, padding):
    """No layer of a growing cache's steps goes through the operator of attention, or makes a mask of its own."""
    model = make(encoding)
    ids, mask, *_ = batch(padding)
    encoded = model.encoder(input_ids=ids, attention_mask=mask)
    settings = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12}
    want = model.generate(encoder_outputs=encoded, use_cache=False, **settings)
    masks, calls = [], []
    monkeypatch.setattr("fat5.ops.attention.api.call", lambda *arguments: calls.append(1))
    monkeypatch.setattr("fat5.nn.layout.additive_mask", lambda *a: masks.append(1) or additive_mask(*a))
    got = model.generate(encoder_outputs=encoded, **settings)
    assert torch.equal(got, want)
    assert (len(calls), len(masks)) == (0, 12)


@torch.no_grad()
def test_padding_of_the_encoder_may_hold_anything():
    """Its keys and values are kept from the first step on, and no step may see them."""
    model = make("relative")
    ids, mask, decoder_ids, _ = batch()
    encoded = model.encoder(input_ids=ids, attention_mask=mask)
    spoilt = encoded.last_hidden_state.masked_fill(mask[..., None] == 0, torch.nan)
    results = []
    for states in (encoded.last_hidden_state, spoilt):
        cache = None
        for start, stop in ((0, 5), (5, 6), (6, 7)):
            out = model(encoder_outputs=(states,), attention_mask=mask, use_cache=True,
                        decoder_input_ids=decoder_ids[:, start:stop], **{CACHE: cache})  # fmt: skip
            cache = out[CACHE]
        results.append(out.logits)
    assert torch.equal(*results)
