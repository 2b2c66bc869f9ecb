"""Every position encoding: training, twice the length, layouts, padding, checkpoints, compilation, types, errors."""

import pytest
import torch

from fat5 import FAT5Config, FAT5EncoderModel, FAT5ForConditionalGeneration
from fat5.optim import parameter_groups
from tests.models.conftest import SIZES
from tests.models.position_reference import reference_logits
from tests.models.position_variants import DENSE, ENCODINGS, LAYOUTS, RANDOMIZED, make
from tests.models.test_checkpoints import load
from tests.models.test_layouts import documents, gradients, pack

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
every_layout = pytest.mark.parametrize(("encoding", "layout"), LAYOUTS)


@pytest.mark.parametrize("encoding", [*ENCODINGS, *RANDOMIZED])
def test_trains_and_keeps_to_its_formula_at_twice_the_length(encoding, batch):
    """Pitfalls: ALiBi's causal form in an encoder; head counts that are no power of two; a scale of 1 / sqrt(D)."""
    model = make(encoding).train()
    short = {k: v[:, :20] for k, v in batch.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(12):
        loss = model(**short).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.double().eval()
    ids, decoder_ids = torch.randint(2, 97, (1, 40)), torch.randint(2, 97, (1, 42))
    logits = model(input_ids=ids, decoder_input_ids=decoder_ids).logits
    torch.testing.assert_close(logits[0], reference_logits(model, ids[0], decoder_ids[0]), rtol=1e-7, atol=1e-7)


@every_encoding
def test_the_encoder_knows_the_order_of_its_tokens(encoding, batch):
    model, order = make(encoding), torch.randperm(40)
    states = model.encoder(batch["input_ids"])[0]
    shuffled = model.encoder(batch["input_ids"][:, order])[0]
    same = torch.allclose(states[:, order], shuffled, atol=1e-5)
    assert same == (encoding == "none")


@every_encoding
def test_cross_attention_knows_no_positions(encoding, batch):
    """Pitfall: a position encoding put into cross-attention. The encoder's outputs may come in any order."""
    model, order = make(encoding), torch.randperm(40)
    mask = batch["attention_mask"] | 1
    encoded = model.encoder(batch["input_ids"], mask)[0]
    expected = model(encoder_outputs=(encoded,), attention_mask=mask, labels=batch["labels"]).loss
    got = model(encoder_outputs=(encoded[:, order],), attention_mask=mask[:, order], labels=batch["labels"]).loss
    torch.testing.assert_close(got, expected)
    mask = batch["attention_mask"]
    expected = model(encoder_outputs=(encoded,), attention_mask=mask, labels=batch["labels"], return_logits=True).logits
    got = model(
        encoder_outputs=(encoded[:, order],), attention_mask=mask[:, order], labels=batch["labels"], return_logits=True
    ).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@every_encoding
def test_padding_on_any_side_and_packing_equal_each_document_alone(encoding, batch):
    """Pitfalls: packed documents see each other; a row's output depends on its padding."""
    model = make(encoding)
    alone = [model(input_ids=x[None], labels=y[None], reduction="sum") for x, y in documents(batch)]
    count = sum(int(o.count) for o in alone)
    loss = sum(o.loss for o in alone) / count
    expected = gradients(model, loss)
    for inputs in [batch] + [pack(batch)] * (encoding != "fire"):
        output = model(**inputs)
        torch.testing.assert_close(output.loss, loss)
        for name, grad in gradients(model, output.loss).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
            assert grad.abs().max() > 0, name


@every_encoding
def test_a_decoder_mask_on_the_left_equals_each_row_alone(encoding, batch):
    model = make(encoding)
    ids, mask = batch["input_ids"][:2, :12], torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    logits = model(input_ids=batch["input_ids"][:2], decoder_input_ids=ids, decoder_attention_mask=mask).logits
    alone = model(input_ids=batch["input_ids"][1:2], decoder_input_ids=ids[1:2, 5:]).logits
    torch.testing.assert_close(logits[1, 5:], alone[0], rtol=1e-4, atol=1e-5)


@every_encoding
def test_holes_in_the_mask_keep_the_distances_of_the_slots(encoding, batch):
    model = make(encoding).double()
    ids, mask = batch["input_ids"][3:], batch["attention_mask"][3:]
    mask[:, 6:9] = 0
    mask[:, 30] = 0
    decoder_ids = model.shift_right(batch["labels"][3:])
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
    expected = reference_logits(model, ids[0], decoder_ids[0], mask[0])
    torch.testing.assert_close(logits[0], expected, rtol=1e-7, atol=1e-7)


@every_layout
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(encoding, layout, use_reentrant, batch):
    """Pitfall: recomputation draws new dropout, or new positions. Gradients are equal with and without."""
    model = make(encoding, dropout_rate=0.1).train()
    inputs = pack(batch) if layout == "packed" else batch

    def run():
        torch.manual_seed(3)
        return gradients(model, model(**inputs).loss)

    expected = run()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for name, grad in run().items():
        torch.testing.assert_close(grad, expected[name], msg=name)


@pytest.fixture
def compile_whole():
    """Compile in one graph; earlier tests' graphs do not count."""
    torch.compiler.reset()
    yield lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("encoding", "layout"),
    [
        ("alibi, learned", "padded"), ("alibi, one-sided", "padded"), ("alibi, one-sided", "packed"),
        ("rotary, part", "padded"), ("xpos", "packed"), ("fire", "padded"), ("none", "packed"),
        ("relative, randomized", "padded"), ("rotary, randomized", "packed"),
    ],
)  # fmt: skip
def test_compiles_whole(encoding, layout, batch, compile_whole):
    """Forward and backward in one graph without breaks; random positions are drawn inside it."""
    model = make(encoding, num_layers=1, num_decoder_layers=1)
    inputs = pack(batch) if layout == "packed" else batch
    training = encoding in RANDOMIZED
    compiled = compile_whole(model.train(training))
    expected = gradients(model, model(**inputs).loss)
    got = gradients(model, compiled(**inputs).loss)
    if training:
        assert compiled(**inputs).loss != compiled(**inputs).loss
        assert all(grad.isfinite().all() and grad.any() for grad in got.values())
        return
    for name, grad in got.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("encoding", RANDOMIZED)
def test_random_positions_act_in_training_alone(encoding, batch):
    model, plain = make(encoding), make(encoding.removesuffix(", randomized"))
    plain.load_state_dict(model.state_dict())
    expected = plain(**batch).loss
    assert torch.equal(model(**batch).loss, expected)
    model.train()
    losses = [model(**batch).loss for _ in range(3)]
    assert len({x.item() for x in [expected, *losses]}) == 4
    torch.manual_seed(7)
    first = model(**batch).loss
    torch.manual_seed(7)
    assert torch.equal(model(**batch).loss, first)


@pytest.mark.parametrize("encoding", RANDOMIZED)
def test_random_positions_of_the_full_range_are_plain(encoding, batch):
    """With as many positions as tokens there is one subset: the dense path then equals the plain one."""
    batch = {k: v[:, :20] for k, v in batch.items()}
    mask = torch.ones(4, 20, dtype=torch.int64)
    batch |= {"attention_mask": mask, "labels": batch["labels"].clamp_min(2)}
    model = make(encoding, randomized_position_range=20)
    expected = gradients(model, model(**batch).loss)
    for name, grad in gradients(model, model.train()(**batch).loss).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_random_positions_of_packed_documents_are_drawn_apart(batch):
    """The same document twice in one packed batch gets two draws, and in evaluation one result."""
    encoder = FAT5EncoderModel(make("rotary, randomized").config)
    ids = batch["input_ids"][0, :8].repeat(2)
    offsets = torch.tensor([0, 8, 16])
    for training in (True, False):
        states = encoder.train(training)(ids, cu_seqlens=offsets, max_seqlen=8).last_hidden_state
        assert torch.allclose(states[:8], states[8:], atol=1e-5) == (not training)


@pytest.mark.parametrize("encoding", DENSE)
def test_packed_batches_are_refused_where_the_bias_exists_in_full(encoding, batch):
    model = make(encoding).train()
    with pytest.raises(ValueError, match=r"packed batch.*quadratic.*pad the batch"):
        model(**pack(batch))
    if not encoding.startswith("fire"):
        assert model.eval()(**pack(batch)).loss.isfinite()


def test_a_range_shorter_than_the_batch_is_refused(batch):
    model = make("rotary, randomized", randomized_position_range=30).train()
    for inputs in (batch, pack(batch)):
        with pytest.raises(ValueError, match="up to 40 tokens with randomized_position_range=30"):
            model(**inputs)


@every_encoding
def test_bf16_and_autocast_keep_their_types(encoding, batch):
    """Pitfalls: mixed types under autocast; a float32 table with bf16 input changes the output type."""
    model = make(encoding)
    expected = model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**batch)
    for name, grad in gradients(model, mixed.loss).items():
        assert grad.dtype == torch.float32, name
        assert grad.isfinite().all(), name
    torch.testing.assert_close(mixed.loss, expected.loss, rtol=0.02, atol=0)
    model.bfloat16()
    output = model(**batch)
    assert output.decoder_last_hidden_state.dtype == output.encoder_last_hidden_state.dtype == torch.bfloat16
    torch.testing.assert_close(output.loss, expected.loss, rtol=0.02, atol=0)
    for name, grad in gradients(model, output.loss).items():
        assert grad.dtype == torch.bfloat16, name
        assert grad.isfinite().all(), name
        assert grad.any(), name


@pytest.mark.parametrize("encoding", [*ENCODINGS, *RANDOMIZED])
def test_round_trip(encoding, batch, tmp_path):
    model = make(encoding)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.position_settings == model.config.position_settings
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert torch.equal(again(**batch).loss, model(**batch).loss)


def position_keys(encoding: str) -> list[str]:
    t5 = set(make("none").state_dict())
    return sorted(set(make(encoding).state_dict()) - t5)


def test_the_state_adds_to_t5s_only_what_the_encoding_learns():
    sides = ("decoder", "encoder")

    def keys(*names):
        return [f"{side}.block.0.layer.0.SelfAttention.{name}" for side in sides for name in names]

    assert position_keys("relative") == keys("relative_attention_bias.weight")
    for encoding in ("alibi", "rotary", "xpos", "none"):
        assert position_keys(encoding) == []
    assert position_keys("alibi, learned") == position_keys("alibi, one-sided") == keys("alibi.log2_slopes")
    assert position_keys("fire") == keys(
        "fire.hidden.bias", "fire.hidden.weight", "fire.output.bias", "fire.output.weight", "fire.scale",
        "fire.threshold_factor",
    )  # fmt: skip


def test_learned_slopes_start_at_the_papers_and_do_not_decay():
    model = FAT5ForConditionalGeneration(make("alibi, learned").config)
    slopes = model.encoder.block[0].layer[0].SelfAttention.alibi.log2_slopes
    assert slopes.tolist() == [-4, -8, -2]
    decayed = parameter_groups(model, 0.1)[0]["params"]
    assert not any(p is slopes for p in decayed)


def test_generation_keeps_to_the_formula(batch):
    """Every step of a greedy generation is the most likely token of the reference, past the training length too."""
    for encoding in ("rotary", "xpos", "alibi", "fire"):
        model = make(encoding).double()
        ids = batch["input_ids"][:1, :15]
        tokens = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=96)[0]
        logits = reference_logits(model, ids[0], tokens[:-1])
        assert torch.equal(logits.argmax(-1), tokens[1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_encoding": "rope"}, "position_encoding='rope'"),
        ({"position_encoding": "alibi", "rotary_theta": 100.0}, "rotary_theta=100.0 with position_encoding='alibi'"),
        ({"fire_width": 4}, "fire_width=4 with position_encoding='relative'"),
        ({"position_encoding": "fire", "relative_attention_num_buckets": 8}, "relative_attention_num_buckets=8"),
        ({"position_encoding": "alibi", "alibi_symmetric": False, "num_heads": 1}, "1 head"),
        ({"position_encoding": "rotary", "rotary_fraction": 0.1}, "heads of 12 channels.*at least 0.167"),
        ({"position_encoding": "none", "randomized_position_range": 10}, "no positions"),
        ({"position_encoding": "rotary", "randomized_position_range": "many"}, "randomized_position_range"),
    ],
)
def test_settings_that_no_model_can_have_are_named(settings, message):
    sizes = {k: v for k, v in SIZES.items() if not k.startswith("relative_")}
    with pytest.raises(Exception, match=message):
        FAT5Config(**sizes | settings)
