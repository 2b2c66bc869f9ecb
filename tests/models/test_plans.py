"""Plans of attention in a model: one for each kind of attention a batch, whatever the number of layers."""

from collections import Counter

import pytest
import torch

from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.nn import plans
from tests.ops.attention_comparison import reproducible
from tests.ops.kernel_checks import DEVICE, relative_error
from tests.ops.plan_counts import count_making
from tests.ops.test_hopper_kernels import launches  # noqa: F401

LAYERS = 2


@pytest.fixture
def made(monkeypatch):
    return count_making(monkeypatch)


def make_model(**settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 64, "d_ff": 48, "num_heads": 1, "dropout_rate": 0.0}
    config = FAT5Config(
        **sizes | {"num_layers": LAYERS, "num_decoder_layers": LAYERS, "attention_backend": "hopper"} | settings
    )
    return FAT5ForConditionalGeneration(config).to(DEVICE, torch.bfloat16).train()


def make_batch():
    torch.manual_seed(1)
    ids, labels = (torch.randint(3, 64, (n,), device=DEVICE) for n in (40, 30))
    ends = {"cu_seqlens": [0, 9, 33], "decoder_cu_seqlens": [0, 20, 30]}  # rows of no document among the inputs
    batch = {name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in ends.items()}
    return batch | {"input_ids": ids, "labels": labels, "max_seqlen": 24, "decoder_max_seqlen": 20}


def gradients(model):
    with reproducible("hopper"):
        loss = model(**make_batch()).loss
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()} | {"loss": loss.detach()}


def test_one_plan_a_kind_of_attention(made, monkeypatch):
    """Encoder, decoder and cross-attention have one each, and no layer makes what is in it; no bit depends on that."""
    ours = gradients(make_model())
    other_queries = 3 * LAYERS  # of the deterministic backward
    assert made == Counter(write_table=2 * 2, write_records=2 * 3 + other_queries)
    made.clear()
    monkeypatch.setattr(plans.AttentionPlans, "plan", lambda *_, **__: None)
    theirs = gradients(make_model())
    assert made == Counter(write_table=2 * 3 * LAYERS, write_records=3 * 3 * LAYERS)
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name
        assert gradient.any(), name


@pytest.mark.slow
@pytest.mark.parametrize("change", ["bias a layer", "hook", "checkpoints"])
def test_layers_that_share_no_plan_give_the_same(change, monkeypatch):
    settings = {"relative_attention_per_layer": change == "bias a layer"}
    model, other = make_model(**settings), make_model(**settings)
    if change == "hook":  # as accelerate's, which brings other tensors of equal content
        for block in (*model.encoder.block, *model.decoder.block):

            def copied(module, arguments, options):
                moved = {name: x if x is None else type(x)(cu_seqlens=x.cu_seqlens.clone(), max_seqlen=x.max_seqlen)
                         for name, x in options.items() if name.endswith("layout")}  # fmt: skip
                return arguments, options | moved

            block.register_forward_pre_hook(copied, with_kwargs=True)
    elif change == "checkpoints":  # which also round elsewhere
        model.gradient_checkpointing_enable()
        other.gradient_checkpointing_enable()
    ours = gradients(model)
    monkeypatch.setattr(plans.AttentionPlans, "plan", lambda *_, **__: None)
    want = gradients(other)
    for name, gradient in ours.items():
        assert torch.equal(gradient, want[name]), name


@pytest.mark.slow
def test_a_compiled_model_makes_one_plan_a_kind_of_attention(made):
    want, model = gradients(make_model()), make_model()
    made.clear()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    ours = gradients(model)
    assert made == Counter(write_table=2 * 2, write_records=2 * 3 + 3 * LAYERS)
    for name, gradient in ours.items():
        assert relative_error(gradient, want[name]) < 3e-2, name
