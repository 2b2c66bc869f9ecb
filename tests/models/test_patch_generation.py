"""A patched model generates what it generated before: without a cache, with dynamic and with static ones, in beams."""

import pytest
import torch
from transformers import EncoderDecoderCache, StaticCache

from tests.models.patch_models import CACHE, CONFIGS, TOLERANCE, make_batch, make_pair, one_thread  # noqa: F401

WAYS = {
    "no cache": {"use_cache": False},
    "dynamic": {"use_cache": True},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}


@pytest.fixture(params=CONFIGS)
def pair(request):
    """A patched model and the same one as Transformers makes it."""
    return make_pair(request.param)


def greedy(model, batch, **options):
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 96, "output_scores": True} | options
    return model.generate(**inputs, **options, return_dict_in_generate=True)


@pytest.mark.parametrize("way", WAYS)
def test_generation(pair, way):
    """Pitfalls: the encoder's mask lost in generate; the bias that stays behind the cache."""
    ours, theirs = pair
    batch = make_batch()
    batch["attention_mask"][3, 9:14] = 0
    got, want = greedy(ours, batch, **WAYS[way]), greedy(theirs, batch, **WAYS[way])
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_generation_from_a_padded_prompt():
    """A decoder's prompt with padding on its left, where Transformers takes a mask along the cache."""
    ours, theirs = make_pair("t5-v1.1")
    batch = make_batch()
    prompt = torch.randint(2, 97, (4, 6))
    mask = torch.ones_like(prompt)
    mask[0, :2] = mask[2, :4] = 0
    options = {"decoder_input_ids": prompt, "decoder_attention_mask": mask}
    for way in ("no cache", "dynamic", "static"):
        got, want = greedy(ours, batch, **options, **WAYS[way]), greedy(theirs, batch, **options, **WAYS[way])
        assert torch.equal(got.sequences, want.sequences), way


def caches(model, kind):
    if kind == "dynamic":
        return None
    return EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=n) for n in (40, 33)))


@pytest.mark.parametrize("padded", [False, True, "holes"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["t5-v1.0", "umt5"])
def test_steps_with_a_cache_equal_one_forward(name, kind, padded):
    """Pitfall: a bias or a mask that is not offset by the cache. Chunks of several tokens too."""
    ours, theirs = make_pair(name)
    ids, mask = torch.randint(2, 97, (3, 33)), torch.ones(3, 33, dtype=torch.int64)
    mask[0, 21:] = 0
    decoder_ids, decoder_mask = torch.randint(2, 97, (3, 29)), torch.ones(3, 29, dtype=torch.int64)
    if padded:
        decoder_mask[1, :4] = 0
    if padded == "holes":
        decoder_mask[2, 6:8] = mask[1, 4] = 0
    with torch.no_grad():
        encoded = ours.encoder(input_ids=ids, attention_mask=mask)
        want = theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids,
                      decoder_attention_mask=decoder_mask if padded else None).logits  # fmt: skip
        cache, steps = caches(ours, kind), []
        for start, stop in [(0, 7), (7, 12), *((i, i + 1) for i in range(12, 29))]:
            out = ours(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=decoder_ids[:, start:stop],
                       decoder_attention_mask=decoder_mask[:, :stop] if padded else None,
                       use_cache=True, **{CACHE: cache})  # fmt: skip
            cache = out[CACHE]
            steps.append(out.logits)
    real = decoder_mask.bool()
    torch.testing.assert_close(torch.cat(steps, 1)[real], want[real], **TOLERANCE)


def test_static_decoding_compiles_once():
    ours, _ = make_pair("t5-v1.1")
    ids, mask = torch.randint(2, 97, (3, 33)), torch.ones(3, 33, dtype=torch.int64)
    mask[0, 21:] = 0
    decoder_ids = torch.randint(2, 97, (3, 20))
    torch._dynamo.reset()
    step = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        encoded = ours.encoder(input_ids=ids, attention_mask=mask)
        fixed = {"encoder_outputs": encoded, "attention_mask": mask, CACHE: caches(ours, "static")}
        want = ours(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=decoder_ids).logits
        steps = [ours(**fixed, decoder_input_ids=decoder_ids[:, :7]).logits]
        steps.append(step(**fixed, decoder_input_ids=decoder_ids[:, 7:8]).logits)
        with torch.compiler.set_stance("fail_on_recompile"):
            steps += [step(**fixed, decoder_input_ids=decoder_ids[:, i : i + 1]).logits for i in range(8, 20)]
    torch.testing.assert_close(torch.cat(steps, 1), want, **TOLERANCE)
