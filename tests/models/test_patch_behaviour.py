"""What `patch` does to a model besides its outputs: kernels, memory, dropout, checkpoints, its way back, its errors."""

import copy
import functools
import json
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from fat5 import FAT5Config, FAT5EncoderModel
from fat5.models import patch_attention
from fat5.models.patch import patch, unpatch
from fat5.ops import DenseBias, DistanceBias, flash_attention
from tests.models.patch_models import (
    CACHE,
    SEQ2SEQ,
    SIZES,
    TOLERANCE,
    compare,
    compare_gradients,
    make,
    make_batch,
    make_pair,
    one_thread,  # noqa: F401
)


@pytest.fixture
def batch():
    return make_batch()


@pytest.fixture
def calls(monkeypatch):
    """Record the keyword arguments of each attention of patched models."""
    seen = []

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return flash_attention(*args, **kwargs)

    monkeypatch.setattr(patch_attention, "flash_attention", spy)
    return seen


@pytest.mark.parametrize(("name", "tables"), [("t5-v1.1", 2), ("mt5", 2), ("umt5", 4)])
def test_every_attention_runs_on_the_kernels(name, tables, batch, calls):
    """Two layers of encoder self-attention, two of decoder self- and cross-attention; tables expanded once a stack."""
    make_pair(name)[0](**batch)
    assert [kwargs["causal"] for kwargs in calls] == [False, False, True, False, True, False]
    kinds = [type(kwargs["bias"]) for kwargs in calls]
    assert kinds == [DistanceBias, DistanceBias, DistanceBias, type(None), DistanceBias, type(None)]
    assert len({id(kwargs["bias"].table) for kwargs in calls if kwargs["bias"] is not None}) == tables
    assert all((kwargs["key_lengths"] is None) == (i in (2, 4)) for i, kwargs in enumerate(calls))


def test_masks_with_holes_take_the_dense_path_where_they_are(batch, calls):
    batch["attention_mask"][3, 4] = 0
    make_pair("t5-v1.0")[0](**batch)
    kinds = [type(kwargs["bias"]) for kwargs in calls]
    assert kinds == [DenseBias, DenseBias, DistanceBias, DenseBias, DistanceBias, DenseBias]
    assert calls[3]["bias"].tensor.shape == (4, 1, 1, 40)


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def test_no_tensor_of_the_square_of_the_length():
    """Neither bias nor mask, forward or backward, padded or not; Transformers' own code is the check of the check."""
    length = 2048
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
    mask = torch.ones(1, length, dtype=torch.int64)
    mask[0, 1900:] = 0
    ids = torch.randint(2, 97, (1, length))
    for name in ("t5-v1.1", "umt5"):
        ours, theirs = make_pair(name, attention="sdpa", **sizes)
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_attention_mask": mask, "labels": ids}
        with LargestTensor() as largest:
            ours(**inputs).loss.backward()
        assert length * 97 <= largest.numel < length**2 / 8
    with LargestTensor() as largest, torch.no_grad():
        theirs(**inputs)
    assert largest.numel >= 2 * length**2


def test_dropout_of_attention_weights(calls):
    """In training alone, from torch's generator, and without a shift of the mean."""
    model = patch(make("t5-v1.0", dropout_rate=0.3))
    attention, states = model.encoder.block[0].layer[0].SelfAttention, torch.randn(2, 12, SIZES["d_model"])
    expected = attention(states)[0]
    assert torch.equal(expected, attention(states)[0])
    model.train()
    draws = torch.stack([attention(states)[0] for _ in range(400)])
    assert [kwargs["dropout_p"] for kwargs in calls[:3]] == [0.0, 0.0, 0.3]
    assert (draws[0] - draws[1]).abs().max() > 0.1
    error = (draws.mean(0) - expected) / (draws.std(0) / 20)
    assert error.abs().max() < 5
    torch.manual_seed(3)
    first = attention(states)[0]
    torch.manual_seed(3)
    assert torch.equal(first, attention(states)[0])


@pytest.mark.parametrize("name", ["t5-v1.1", "umt5"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_under_checkpointing(name, reentrant, batch):
    """Pitfall: recomputation draws new dropout."""
    plain = patch(make(name, dropout_rate=0.2)).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        checkpointed.enable_input_require_grads()
    losses = []
    for model in (checkpointed, plain):
        torch.manual_seed(5)
        losses.append(model(**batch, use_cache=False).loss)
    assert losses[0] == losses[1]
    compare_gradients(checkpointed, plain, *losses)


def test_files_stay_those_of_transformers(batch, tmp_path):
    ours, theirs = make_pair("t5-v1.1", attention="sdpa")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for model, name in ((ours, "ours"), (theirs, "theirs")):
        model.save_pretrained(tmp_path / name)
    settings = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert settings[0] == settings[1]
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    assert loaded.config._attn_implementation == "sdpa"
    compare(patch(loaded), theirs, batch)


@pytest.mark.parametrize("name", ["t5-v1.0", "umt5"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_patching_twice_and_the_way_back(name, attention, batch):
    ours, theirs = make_pair(name, attention=attention)
    expected = ours(**batch).logits
    assert patch(ours) is ours
    assert torch.equal(ours(**batch).logits, expected)
    assert unpatch(ours) is ours
    assert torch.equal(ours(**batch).logits, theirs(**batch).logits)
    for a, b in zip(ours.modules(), theirs.modules(), strict=True):
        assert type(a) is type(b)
        assert {k: v for k, v in vars(a).items() if isinstance(v, (bool, str))} == {
            k: v for k, v in vars(b).items() if isinstance(v, (bool, str))
        }
    assert [m.config._attn_implementation for m in (ours, ours.encoder, ours.decoder)] == [attention] * 3
    unpatch(ours)
    assert torch.equal(patch(ours)(**batch).logits, expected)


def test_another_implementation_chosen_later(batch):
    """It runs, and a second patch leads back."""
    ours, theirs = make_pair("umt5")
    for stack in (ours.encoder, ours.decoder):
        stack.set_attn_implementation("eager")
    got = ours(**batch, output_attentions=True)
    want = theirs(**batch, output_attentions=True)
    torch.testing.assert_close(got.decoder_attentions, want.decoder_attentions, **TOLERANCE)
    assert patch(ours).decoder.config._attn_implementation == "fat5"
    compare(ours, theirs, batch)


@pytest.mark.parametrize("name", ["t5-v1.0", "umt5"])
def test_attention_weights_on_request(name, batch, recwarn):
    """They are computed in full, as Transformers' eager attention does, with one warning that says so."""
    ours, theirs = make_pair(name)
    batch["attention_mask"][3, 4] = 0
    mask = torch.ones_like(batch["labels"])
    mask[0, 12:] = 0
    for inputs in (batch, batch | {"decoder_attention_mask": mask}):
        got, want = ours(**inputs, output_attentions=True), theirs(**inputs, output_attentions=True)
        for key in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
            assert len(got[key]) == 2
            torch.testing.assert_close(got[key], want[key], **TOLERANCE)
        compare_gradients(ours, theirs, got.loss, want.loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        ours(**batch, output_attentions=True)
    assert sum("computed in full" in str(w.message) for w in caught) == 1


def test_pickle_and_a_model_inside_another(batch):
    ours, _ = make_pair("umt5")
    expected = ours(**batch).logits
    assert torch.equal(pickle.loads(pickle.dumps(ours))(**batch).logits, expected)
    wrapper = nn.ModuleDict({"model": unpatch(copy.deepcopy(ours)), "other": nn.Linear(2, 2)})
    assert torch.equal(patch(wrapper)["model"](**batch).logits, expected)


@pytest.mark.parametrize("name", ["t5-v1.1", "umt5"])
def test_compiled_training_in_one_graph(name, batch):
    ours, theirs = make_pair(name)
    torch._dynamo.reset()
    got = torch.compile(ours, backend="aot_eager", fullgraph=True)(**batch)
    want = theirs(**batch)
    torch.testing.assert_close(got.logits, want.logits, **TOLERANCE)
    compare_gradients(ours, theirs, got.loss, want.loss)


def check_triton_kernels(monkeypatch, device, dtype):
    """Train one step and decode a few tokens on the Triton kernels, as close to float32 as Transformers' model is."""
    monkeypatch.setattr(patch_attention, "flash_attention", functools.partial(flash_attention, backend="triton"))
    sizes = {"d_kv": 16, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
    ours, reference = (m.to(device) for m in make_pair("t5-v1.1", **sizes))
    theirs = copy.deepcopy(reference).to(dtype)
    ours.to(dtype)
    mask = torch.ones(2, 37, dtype=torch.int64, device=device)
    mask[0, :5] = mask[1, 30:] = 0
    inputs = {"input_ids": torch.randint(2, 97, (2, 37), device=device), "attention_mask": mask}
    labels = torch.randint(2, 97, (2, 19), device=device)
    outputs = [m(**inputs, labels=labels) for m in (ours, theirs, reference)]
    check_errors(*(out.logits for out in outputs), factor=2)
    for out in outputs:
        out.loss.backward()
    for parameters in zip(*(m.parameters() for m in (ours, theirs, reference)), strict=True):
        check_errors(*(p.grad for p in parameters), factor=3)
    prompt = labels[:, :12]
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "output_logits": True, "return_dict_in_generate": True}
    for way in ({}, {"cache_implementation": "static", "disable_compile": True}):
        outputs = [
            m.generate(**inputs, decoder_input_ids=prompt, do_sample=False, **options, **way)
            for m in (ours, theirs, reference)
        ]
        check_errors(*(out.logits[0] for out in outputs), factor=2)
        if dtype == torch.float32:
            check_errors(*(out.logits[1] for out in outputs), factor=2)


def check_errors(got, want, reference, factor):
    error, allowed = ((x.float() - reference).norm() for x in (got, want))
    assert error <= factor * allowed + 1e-5 * reference.norm()


def test_triton_kernels_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton runs compiled where there is a GPU")
    check_triton_kernels(monkeypatch, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kernels_on_a_gpu(monkeypatch, dtype):
    check_triton_kernels(monkeypatch, "cuda", dtype)


SMALL_GPT2 = GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9)


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GPT2LMHeadModel(SMALL_GPT2), "GPT2LMHeadModel; expected a model of Transformers' T5, mT5 or UMT5"),
        (lambda: nn.Linear(2, 2), "got a Linear; expected"),
        (lambda: "google-t5/t5-small", "got a str; expected"),
        (lambda: FAT5EncoderModel(FAT5Config(**SIZES | {"decoder_start_token_id": 0})), "run on these kernels as they"),
    ],
)
def test_models_of_other_families(build, message, undo):
    with pytest.raises(ValueError, match=message):
        (unpatch if undo else patch)(build())


def test_modules_that_others_have_changed():
    class Wrapped(T5Attention):
        pass

    model = make("t5-v1.0", attention="sdpa")
    model.decoder.block[1].layer[1].EncDecAttention.__class__ = Wrapped
    with pytest.raises(ValueError, match="got a Wrapped, which derives from T5Attention"):
        patch(model)
    assert type(model.encoder.block[0].layer[0].SelfAttention) is T5Attention
    assert model.encoder.config._attn_implementation == "sdpa"


def test_a_transformers_that_makes_the_bias_otherwise(monkeypatch):
    monkeypatch.setattr(T5Attention, "compute_bias", lambda self, query_length, positions: None)
    with pytest.raises(RuntimeError, match="makes the bias of T5Attention in another way"):
        patch(make("t5-v1.0"))


def test_a_fresh_model_of_a_patched_configuration(batch):
    ours, _ = make_pair("t5-v1.0")
    fresh = SEQ2SEQ[type(ours.config)](ours.config)
    with pytest.raises(ValueError, match=r"T5Attention; it works in models given to fat5\.patch"):
        fresh(**batch)
    fresh.load_state_dict(ours.state_dict())
    assert torch.equal(patch(fresh.eval())(**batch).logits, ours(**batch).logits)


def test_masks_that_do_not_fit(batch):
    ours, _ = make_pair("t5-v1.0")
    ids, labels, mask = batch["input_ids"], batch["labels"], batch["attention_mask"]
    encoded = ours.encoder(input_ids=ids)
    for wrong in (mask[:, :30], torch.ones(4, 45)):
        wrong = wrong.clone()
        wrong[0, -1] = 0
        with pytest.raises(ValueError, match=r"got an attention mask .* for 40 keys"):
            ours(encoder_outputs=encoded, attention_mask=wrong, labels=labels)
    with pytest.raises(ValueError, match=r"got an attention mask \[2, 40\]; expected \[4, 40\]"):
        ours(input_ids=ids, attention_mask=mask[:2], labels=labels)
    with pytest.raises(ValueError, match=r"got an attention mask \[4, 40, 40\]; expected \[4, 40\]"):
        ours(input_ids=ids, attention_mask=mask[:, None].expand(-1, 40, -1), labels=labels)
    with pytest.raises(ValueError, match="got an attention mask of type list; expected a tensor"):
        ours.encoder.block[0].layer[0](encoded[0], attention_mask=[1, 1])
    with pytest.raises(ValueError, match=r"of type torch.int64 for 40 keys; expected a 2-d mask"):
        ours(input_ids=ids, attention_mask=mask[:, None, None], labels=labels)
    cached = ours(input_ids=ids, decoder_input_ids=labels.clamp_min(0), use_cache=True)
    with pytest.raises(ValueError, match=r"got an attention mask \[4, 30\]; expected \[4, 22\]"):
        ours(encoder_outputs=encoded, decoder_input_ids=ids[:, :1], decoder_attention_mask=mask[:, :30],
             **{CACHE: cached[CACHE]})  # fmt: skip
