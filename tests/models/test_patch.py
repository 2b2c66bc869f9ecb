"""A patched Transformers model equals itself before: logits, loss, every gradient, whatever the mask and the head."""

import copy

import pytest
import torch
import transformers
from torch import nn

from fat5.models.patch import patch
from tests.models.patch_models import (
    CONFIGS,
    SIZES,
    TOLERANCE,
    compare,
    compare_gradients,
    make_batch,
    make_pair,
    one_thread,  # noqa: F401
    spread,
)


@pytest.fixture(params=CONFIGS)
def pair(request):
    """A patched model and the same one as Transformers makes it, with its eager attention."""
    return make_pair(request.param)


@pytest.fixture
def batch():
    return make_batch()


def test_logits_loss_and_every_gradient(pair, batch):
    """Pitfalls: a scale of 1 / sqrt(D); a relative bias in cross-attention; padding on either side."""
    compare(*pair, batch)


def test_without_masks(pair, batch):
    del batch["attention_mask"]
    compare(*pair, batch)


def test_encoder_mask_with_holes(pair, batch):
    batch["attention_mask"][3, 7:9] = 0
    batch["attention_mask"][0, 3] = 0
    compare(*pair, batch)


def test_decoder_mask_right_left_and_with_holes(pair, batch):
    """What a padded query of the decoder gives is nobody's business: it may see no key at all."""
    mask = torch.ones_like(batch["labels"])
    mask[0, 12:] = 0
    mask[1, :6] = 0
    for holes in (False, True):
        mask[3, 4:6] = 0 if holes else 1
        labels = batch["labels"].masked_fill(mask == 0, -100)
        compare(*pair, batch | {"labels": labels, "decoder_attention_mask": mask}, kept=mask.bool())


def test_masks_of_any_type(pair, batch):
    ours, _ = pair
    expected = ours(**batch).loss
    for dtype in (torch.bool, torch.float32, torch.int32):
        assert ours(**batch | {"attention_mask": batch["attention_mask"].to(dtype)}).loss == expected


def test_the_default_implementation_of_transformers(batch):
    compare(*make_pair("t5-v1.1", attention="sdpa"), batch)


@pytest.mark.parametrize("kind", ["boolean", "floating"])
def test_masks_of_four_dimensions(batch, kind):
    """Such a mask is taken as it is, for causality too: here the decoder's first tokens see each other, as a prefix."""
    ours, theirs = make_pair("t5-v1.0", attention="sdpa")
    encoder = batch.pop("attention_mask").bool()[:, None, None].expand(-1, -1, 40, -1)
    decoder = torch.ones(21, 21, dtype=torch.bool).tril()
    decoder[:5, :5] = True
    decoder = decoder[None, None].expand(4, -1, -1, -1)
    if kind == "floating":
        encoder, decoder = ((~m).float() * torch.finfo(torch.float32).min for m in (encoder, decoder))
    states = theirs.encoder(input_ids=batch["input_ids"], attention_mask=encoder)[0].detach()
    torch.testing.assert_close(
        ours.encoder(input_ids=batch["input_ids"], attention_mask=encoder)[0].detach(), states, **TOLERANCE
    )
    batch |= {"input_ids": None, "encoder_outputs": (states,), "decoder_attention_mask": decoder}
    got, want = ours(**batch), theirs(**batch)
    torch.testing.assert_close(got.logits, want.logits, **TOLERANCE)
    compare_gradients(ours.decoder, theirs.decoder, got.loss, want.loss)


HEADS = ["Model", "EncoderModel", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ["T5", "MT5", "UMT5"])
def test_every_head(family, head, batch):
    sizes = SIZES | {"num_layers": 1, "num_decoder_layers": 1, "attn_implementation": "eager"}
    config = getattr(transformers, f"{family}Config")(**sizes)
    theirs = spread(getattr(transformers, f"{family}{head}")(config))
    ours = patch(copy.deepcopy(theirs))
    batch["input_ids"][:, 20] = 1  # the sequence head reads the last </s> of each row
    del batch["labels"]
    if head == "Model":
        batch["decoder_input_ids"] = torch.randint(2, 97, (4, 9))
    got, want = (m(**batch, return_dict=False) for m in (ours, theirs))
    tensors = [(a, b) for a, b in zip(got, want, strict=True) if isinstance(a, torch.Tensor)]
    for a, b in tensors:
        torch.testing.assert_close(a, b, **TOLERANCE)
    weights = torch.randn_like(tensors[0][0])
    compare_gradients(ours, theirs, *((x * weights).mean() for x in tensors[0]))


def test_inputs_as_embeddings(batch):
    ours, theirs = make_pair("umt5")
    embeddings = torch.randn(4, 40, SIZES["d_model"])
    compare(ours, theirs, batch | {"input_ids": None, "inputs_embeds": embeddings})


@pytest.mark.parametrize("name", ["t5-v1.1", "umt5"])
def test_low_precision_is_as_close_to_float32_as_transformers(name, batch):
    ours, theirs = make_pair(name)
    reference = theirs(**batch).logits
    for model in (ours, theirs):
        model.to(torch.bfloat16)
    got, want = ours(**batch).logits, theirs(**batch).logits
    assert got.dtype == want.dtype == torch.bfloat16
    assert (got - reference).norm() < 1.2 * (want - reference).norm()


def test_autocast(batch):
    """Pitfall: mixed types under autocast."""
    ours, theirs = make_pair("t5-v1.1")
    reference = theirs(**batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        got, want = ours(**batch), theirs(**batch)
    assert got.logits.dtype == want.logits.dtype
    assert (got.logits - reference).norm() < 1.2 * (want.logits - reference).norm()
    got.loss.backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_has_the_type_that_transformers_gives(dtype, weight_dtype):
    """Pitfall: a float32 weight with a bfloat16 input changes the output's type. The next projection counts on it."""
    ours, theirs = make_pair("t5-v1.0")
    got, want = (m.encoder.final_layer_norm.to(weight_dtype) for m in (ours, theirs))
    x = torch.randn(5, SIZES["d_model"]).to(dtype)
    assert got(x).dtype == want(x).dtype
    precise = nn.functional.rms_norm(x.double(), (32,), got.weight.double(), 1e-6)
    assert (got(x) - precise).abs().max() <= (want(x) - precise).abs().max() + 1e-6
