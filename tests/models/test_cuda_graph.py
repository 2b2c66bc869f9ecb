"""`generate(cuda_graph=True)`: the same tokens as `generate`, whatever runs its steps.

On a CPU there are no graphs. `device_steps` runs steps as a graph would be captured: with the number of tokens on the
device and buffers seen whole. GPU tests capture.
"""

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

from fat5.models import decoding, encoder_graph, fused_step, step_cache
from tests.models.position_variants import ENCODINGS, make

STEPS = ["host", "device"]


@pytest.fixture
def captures(monkeypatch):
    """What was captured: the encoders, and for each decoder what fills its cache and its step."""
    captured = {"encoder": [], "decoder": []}

    def recorder(functions):
        def record(function, device):
            functions.append(function)
            function()  # what buffers hold after a capture has no meaning
            result = function()
            with torch.inference_mode(False):
                kept = torch.zeros(result.shape, dtype=result.dtype)

            def replay():
                kept.copy_(function())  # a graph returns its result in place
                return kept

            return replay

        return record

    monkeypatch.setattr(step_cache, "record_graph", recorder(captured["decoder"]))
    monkeypatch.setattr(encoder_graph, "record_graph", recorder(captured["encoder"]))
    return captured


@pytest.fixture(params=STEPS)
def steps(request, monkeypatch, captures):
    if request.param == "device":
        for module in (decoding, encoder_graph):
            monkeypatch.setattr(module, "can_capture", lambda model, stack: True)
    return request.param


def make_model(encoding, **changes):
    model = make(encoding, **changes)
    torch.nn.init.normal_(model.lm_head.weight)
    return model


def batch(holes=False):
    ids, mask = torch.randint(2, 97, (4, 40)), torch.ones(4, 40, dtype=torch.int64)
    mask[0, 25:] = 0
    mask[1, :13] = 0
    mask[3, 4:7] = 0 if holes else 1
    return {"input_ids": ids, "attention_mask": mask}


PROMPT = {"decoder_input_ids": torch.randint(2, 97, (4, 5), generator=torch.Generator().manual_seed(0))}
PROMPT["decoder_input_ids"][:, 0] = 0
MASK = torch.ones(4, 5, dtype=torch.int64)
MASK[1, :2] = MASK[2, :4] = 0
WISHES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "prompt": PROMPT,
    "padded prompt": PROMPT | {"decoder_attention_mask": MASK},
    "beams of a padded prompt": PROMPT | {"decoder_attention_mask": MASK, "num_beams": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize(
    ("encoding", "holes"),
    [("relative", True), ("xpos", False), ("fire", False)]
    + [pytest.param(name, holes, marks=pytest.mark.slow) for name in ENCODINGS for holes in (False, True)],
)
def test_equals_generate(encoding, holes, steps, captures):
    model, inputs = make_model(encoding), batch(holes)
    for wish, options in WISHES.items():
        options = inputs | {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 7} | options
        torch.manual_seed(1)
        want = model.generate(**options)
        torch.manual_seed(1)
        got = model.generate(**options, cuda_graph=True)
        assert torch.equal(got, want), wish
        assert len(want.unique()) > 3, wish
    assert bool(captures["decoder"]) == (steps == "device")
    looks = holes or encoding == "fire"  # then the encoder has no graph
    assert bool(captures["encoder"]) == (steps == "device" and not looks)


@pytest.mark.parametrize("encoding", ["relative", "alibi"])
def test_one_row_alone(steps, encoding):
    """The offset of a single row must not be the counter itself, which the last layer moves on before it attends."""
    model, inputs = make_model(encoding), {name: value[1:2] for name, value in batch().items()}
    options = inputs | {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    want = model.generate(**options)
    assert torch.equal(model.generate(**options, cuda_graph=True), want)
    assert len(want.unique()) > 3
    logits = [
        model.generate(**options, cuda_graph=on, output_logits=True, return_dict_in_generate=True).logits
        for on in (False, True)
    ]
    torch.testing.assert_close(torch.stack(logits[1]), torch.stack(logits[0]))


def test_rows_end_where_they_end_in_generate(steps):
    """Each row at its EOS, the loop when all have ended, one step or many before it looks."""
    model, inputs = make_model("relative"), batch()
    free = model.generate(**inputs, max_new_tokens=60, do_sample=False, eos_token_id=None)
    lengths = set()
    for eos in (free[0, 3], free[1, 9], free[2, 20]):
        options = inputs | {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 96}
        options |= {"eos_token_id": [int(eos), *range(2, 40)]}
        want, got = model.generate(**options), model.generate(**options, cuda_graph=True)
        assert torch.equal(got, want)
        lengths.add(want.shape[1])
    assert min(lengths) < 61
    stop = StoppingCriteriaList([MaxLengthCriteria(9)])
    assert model.generate(**inputs, max_new_tokens=60, stopping_criteria=stop, cuda_graph=True).shape[1] <= 9
    assert model.generate(**inputs, max_new_tokens=1, cuda_graph=True).shape == (4, 2)


@pytest.mark.parametrize("steps", ["device"], indirect=True)
def test_steps_are_reused(steps, captures):
    model = make_model("relative")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for length, rows in ((40, 4), (33, 4), (50, 4)):
        inputs = {"input_ids": torch.randint(2, 97, (rows, length))}
        assert torch.equal(model.generate(**inputs, **options, cuda_graph=True), model.generate(**inputs, **options))
    assert (len(captures["encoder"]), len(captures["decoder"])) == (1, 2)
    attention, feed_forward = model.decoder.block[1].layer[0].SelfAttention, model.decoder.block[1].layer[2]
    with torch.no_grad():
        cross, encoder = model.decoder.block[0].layer[1].EncDecAttention, model.encoder.block[1].layer[1]
        weights = [attention.v.weight, cross.k.weight, encoder.DenseReluDense.wo.weight]
        for weight in (*weights, *(p for p in feed_forward.parameters() if p.ndim == 2)):
            weight.mul_(-3)
    assert torch.equal(model.generate(**inputs, **options, cuda_graph=True), model.generate(**inputs, **options))
    assert (len(captures["encoder"]), len(captures["decoder"])) == (1, 2), "a graph reads weights where they are"
    block = model.decoder.block[1].layer[2].DenseReluDense
    block.wo.weight = torch.nn.Parameter(-block.wo.weight.detach().clone())
    assert torch.equal(model.generate(**inputs, **options, cuda_graph=True), model.generate(**inputs, **options))
    assert (len(captures["encoder"]), len(captures["decoder"])) == (1, 4), "weights elsewhere need another graph"
    with torch.inference_mode():
        model.generate(input_ids=torch.randint(2, 97, (2, 5)), **options, cuda_graph=True)
    model.generate(input_ids=torch.randint(2, 97, (2, 5)), **options, cuda_graph=True)
    assert (len(captures["encoder"]), len(captures["decoder"])) == (2, 6)


@pytest.mark.parametrize("steps", ["device"], indirect=True)
@pytest.mark.parametrize("encoding", ["relative", "alibi, one-sided", "rotary", "fire", "none"])
def test_inputs_of_one_size_class_share_the_encoders_graph(steps, captures, encoding):
    """What an earlier, longer input left in the buffers must not be seen; a full class has a graph without padding."""
    model = make_model(encoding)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    seen = []
    for length, padding in ((60, 0), (33, 0), (50, 7), (64, 0), (64, 9)):
        inputs = {"input_ids": torch.randint(2, 97, (3, length))}
        if padding:
            inputs["attention_mask"] = torch.ones(3, length, dtype=torch.int64)
            inputs["attention_mask"][1, :padding] = inputs["attention_mask"][2, -padding:] = 0
        want = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, cuda_graph=True), want), (length, padding)
        seen.append(want)
    assert len(torch.cat(seen).unique()) > 3
    assert len(captures["encoder"]) == (1 if encoding == "fire" else 2)
    before = len(captures["encoder"])
    for length in (70, 140, 33):  # two are kept, so that the last has to be made again
        inputs = {"input_ids": torch.randint(2, 97, (3, length))}
        assert torch.equal(model.generate(**inputs, **options, cuda_graph=True), model.generate(**inputs, **options))
    if encoding != "fire":
        assert len(captures["encoder"]) == before + 3


@pytest.mark.parametrize("steps", ["device"], indirect=True)
def test_inputs_that_have_no_graph_of_the_encoder(steps, captures):
    model, inputs = make_model("relative"), batch()
    options = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(**inputs, **options)
    encoded = model.encoder(**inputs)
    for given in (
        {"inputs_embeds": model.shared(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]},
        {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]},
    ):
        assert torch.equal(model.generate(**given, **options, cuda_graph=True), want)
    wish = {"output_hidden_states": True, "return_dict_in_generate": True}
    got = model.generate(**inputs, **options, **wish, cuda_graph=True)
    assert torch.equal(got.sequences, want)
    torch.testing.assert_close(got.encoder_hidden_states[-1], encoded[0])
    assert not captures["encoder"]
    pytest.importorskip("accelerate")
    model.hf_device_map = {"": "cpu"}  # Transformers then puts a hook on what it takes for the encoder
    assert torch.equal(model.generate(**inputs, **options, cuda_graph=True), want)
    assert len(captures["encoder"]) == 1


class Adapter(torch.nn.Linear):
    """A layer whose weight says less than its forward does, as an adapter's."""

    def forward(self, x):
        return super().forward(x) * 1.5 + 0.1


def test_layers_that_are_no_plain_weights_are_called(steps):
    model, inputs = make_model("relative"), batch()
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False, cuda_graph=True)
    block = model.decoder.block[1]
    cross = block.layer[1].EncDecAttention
    for owner, name in (
        (cross, "o"),
        (cross, "k"),
        (block.layer[0].SelfAttention, "v"),
        (block.layer[2].DenseReluDense, "wi_0"),
    ):
        layer = getattr(owner, name)
        adapter = Adapter(layer.in_features, layer.out_features, bias=False)
        adapter.weight = layer.weight
        setattr(owner, name, adapter)
        want = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        assert not torch.equal(want, plain)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False, cuda_graph=True), want)


@pytest.mark.parametrize("steps", ["device"], indirect=True)
def test_adapters_that_are_switched_make_other_graphs(steps, captures):
    """They stay where they are; a graph of one would go on with it."""
    peft = pytest.importorskip("peft")
    model, inputs = make_model("relative"), batch()
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.add_adapter("other", settings)
    options = inputs | {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}

    def graphs():
        before = len(captures["encoder"]), len(captures["decoder"])
        want = adapted.generate(**options)
        assert torch.equal(adapted.generate(**options, cuda_graph=True), want)
        return len(captures["encoder"]) - before[0], len(captures["decoder"]) - before[1]

    assert graphs() == (1, 2)
    assert graphs() == (0, 0)
    adapted.set_adapter("other")
    assert graphs() == (1, 2)
    with adapted.disable_adapter():
        assert graphs() == (1, 2)
    adapted.merge_adapter()
    assert graphs() == (1, 2)


@pytest.mark.parametrize("steps", ["device"], indirect=True)
def test_a_forward_that_is_replaced_makes_other_graphs(steps, captures):
    model, inputs = make_model("relative"), batch()
    options = inputs | {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    model.generate(**options, cuda_graph=True)
    for stack in (model.encoder, model.decoder):
        linear = stack.block[0].layer[0].SelfAttention.o
        linear.forward = lambda x, own=linear.forward: 2 * own(x)
    assert torch.equal(model.generate(**options, cuda_graph=True), model.generate(**options))
    assert (len(captures["encoder"]), len(captures["decoder"])) == (2, 4)


@pytest.fixture
def fused(monkeypatch):
    """Number of steps that ran in few kernels."""
    counted = []
    original = fused_step.FusedStep.__call__
    monkeypatch.setattr(fused_step.FusedStep, "__call__", lambda *arguments: counted.append(1) or original(*arguments))
    return counted


@pytest.mark.parametrize("steps", ["device"], indirect=True)
@pytest.mark.parametrize(
    ("encoding", "changes", "takes"),
    [
        ("relative", {}, True),
        ("none", {}, True),
        ("relative", {"relative_attention_per_layer": True}, True),
        ("relative", {"scale_decoder_outputs": True}, True),
        ("rotary", {}, False),
        ("relative", {"feed_forward_proj": "relu"}, False),
        ("relative", {"feed_forward_proj": "gated-silu"}, False),
        ("relative", {"kernel_backend": "torch"}, False),
    ],
)
def test_steps_of_few_kernels_where_they_are_the_models_own(steps, fused, encoding, changes, takes):
    model, inputs = make_model(encoding, **changes), batch()
    for options in ({}, {"num_beams": 2}, PROMPT | {"decoder_attention_mask": MASK}):
        options = inputs | {"max_new_tokens": 12, "do_sample": False} | options
        want = model.generate(**options)
        assert torch.equal(model.generate(**options, cuda_graph=True), want)
        assert len(want.unique()) > 3
    assert bool(fused) == takes


@pytest.mark.parametrize("steps", ["device"], indirect=True)
@pytest.mark.parametrize("few", [True, False])
def test_the_kernels_in_a_step(steps, monkeypatch, fused, few):
    """Through Triton's interpreter: the kernels that a GPU runs, with their bounds on the device."""
    pytest.importorskip("triton")
    if not few:
        monkeypatch.setattr(step_cache, "takes_model", lambda *_: False)
    model, inputs = make_model("relative", d_kv=16, num_heads=2, num_layers=1, num_decoder_layers=1), batch()
    inputs = {name: value[:2] for name, value in inputs.items()}
    options = {"max_new_tokens": 2 if few else 3, "do_sample": False, "eos_token_id": None}
    wants = [model.generate(**inputs, **options), model.generate(**inputs, **options, num_beams=2)]
    if few:
        model.config.kernel_backend = "triton"
    for block in (*model.encoder.block, *model.decoder.block):
        for layer in block.layer[:-1]:
            getattr(layer, "SelfAttention", getattr(layer, "EncDecAttention", None)).backend = "triton"
    for want, beams in zip(wants, (1, 2), strict=True):
        assert torch.equal(model.generate(**inputs, **options, num_beams=beams, cuda_graph=True), want)
    assert bool(fused) == few


def test_what_a_graph_does_not_do_is_refused():
    class Streamer:
        put = print

    model, inputs = make_model("relative"), batch()
    for wish, message in (
        ({"use_cache": False}, "got use_cache=False with cuda_graph=True"),
        ({"assistant_model": model}, "got assistant_model with cuda_graph=True"),
        ({"prompt_lookup_num_tokens": 3}, "got assisted generation with cuda_graph=True"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "whose steps make no weights"),
        ({"streamer": Streamer(), "num_beams": 2}, "got a streamer with beams"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**inputs, max_new_tokens=4, cuda_graph=True, **wish)
    model.hf_device_map = {"encoder": 0, "decoder": "cpu"}
    with pytest.raises(ValueError, match="spread over"):
        model.generate(**inputs, max_new_tokens=4, cuda_graph=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("encoding", ["relative", "alibi, learned", "xpos", "fire", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_equal_generate(encoding, dtype):
    """In float32 the same tokens. In bfloat16 rounding may choose between equals: each is the best but for that."""
    model = make_model(encoding, d_kv=64, num_heads=4, d_model=128).to("cuda", dtype)
    inputs = {name: value.cuda() for name, value in batch().items()}
    for wish, options in WISHES.items():
        options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        options = inputs | {"max_new_tokens": 100, "do_sample": False, "eos_token_id": None} | options
        got = model.generate(**options, cuda_graph=True)
        again = model.generate(**options, cuda_graph=True)
        if not options["do_sample"]:
            assert torch.equal(got, again), wish
        if dtype == torch.float32 and not options["do_sample"]:
            assert torch.equal(got, model.generate(**options)), wish
            if wish == "greedy" and encoding == "relative":  # compiled by Transformers
                assert torch.equal(got, model.generate(**options, cache_implementation="static"))
        elif wish == "greedy":
            with torch.no_grad():
                logits = model(**inputs, decoder_input_ids=got[:, :-1]).logits.float()
            chosen = logits.gather(-1, got[:, 1:, None])[..., 0]
            assert (logits.amax(-1) - chosen).max() < 0.05 * logits.std()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_outlive_the_workspaces_of_others():
    """torch.compile's graphs clear cuBLAS's workspaces when they are recorded, and give free memory back."""
    model = make_model("relative", d_kv=64, num_heads=4, d_model=128).cuda()
    inputs = {name: value.cuda() for name, value in batch().items()}
    options = inputs | {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    want = model.generate(**options, cuda_graph=True)
    for _ in range(2):
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        assert torch.equal(model.generate(**options, cuda_graph=True), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("encoding", ["relative", "alibi, one-sided", "rotary"])
def test_captured_encoders_equal_generate(encoding, fused):
    """Inputs of several lengths and paddings after each other; graphs are kept, and read trained weights."""
    model = make_model(encoding, d_kv=64, num_heads=4, d_model=128).cuda()
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    seen = []
    for length, padding in ((100, 0), (128, 0), (70, 9), (128, 30), (40, 0), (300, 1), (100, 0)):
        inputs = {"input_ids": torch.randint(2, 97, (3, length), device="cuda")}
        if padding:
            mask = torch.ones(3, length, dtype=torch.int64, device="cuda")
            mask[1, :padding] = mask[2, -padding:] = 0
            inputs["attention_mask"] = mask
        want = model.generate(**inputs, **options)
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **options, cuda_graph=True), want), (length, padding)
        seen.append(want.flatten())
        with torch.no_grad():
            model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(-1.1)
    assert len(torch.cat(seen).unique()) > 10
    assert len(encoder_graph._kept._of_model[model]) == 2
    assert bool(fused) == (encoding == "relative")
