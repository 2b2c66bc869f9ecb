"""Keys and values of all layers of a decoder from one product: equal gradients, one product, and where layers make
their own."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fat5.models import FAT5Config, FAT5ForConditionalGeneration
from fat5.nn.joined import keep_apart
from fat5.nn.shared_keys import SharedKeys
from tests.ops.kernel_checks import DEVICE

LAYERS = 3


class Products(TorchDispatchMode):
    """Count matrix products by the shapes of their factors, and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "mm":
            self.found[tuple(tuple(x.shape) for x in args)] += 1
        elif "attention" in name:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def make_model(**settings) -> FAT5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    config = FAT5Config(**sizes | {"num_decoder_layers": LAYERS} | settings)
    return FAT5ForConditionalGeneration(config).to(DEVICE).train()


def make_batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(2, 9, dtype=torch.long, device=DEVICE)
    mask[1, 5:] = 0
    ids, labels = (torch.randint(3, 64, (2, n), device=DEVICE) for n in (9, 5))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(model: nn.Module) -> nn.Module:
    """With layers that make their own keys and values."""
    for block in model.decoder.block:
        block.layer[1].EncDecAttention.k.register_forward_hook(lambda *_: None)
    return model


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-6)


def shared_calls(model: nn.Module, batch: dict[str, Tensor]) -> int:
    with Products() as seen:
        model(**batch).loss.backward()
    return sum(count for name, count in seen.found.items() if str(name).endswith("shared_attention"))


@pytest.mark.parametrize("change", [None, "packed", "dropout", "holes"])
def test_gradients_equal_those_of_layers_apart(change):
    batch = make_batch()
    if change == "packed":
        ends = {"cu_seqlens": [0, 4, 18], "decoder_cu_seqlens": [0, 3, 10]}
        batch = {"input_ids": batch["input_ids"].flatten(), "labels": batch["labels"].flatten()}
        batch |= {name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in ends.items()}
        batch |= {"max_seqlen": 14, "decoder_max_seqlen": 7}
    if change == "holes":
        batch["attention_mask"][0, 3:5] = 0
    settings = {"dropout_rate": 0.2} if change == "dropout" else {}
    results = []
    for model in (make_model(**settings), apart(make_model(**settings))):
        torch.manual_seed(2)
        results.append(gradients(model, batch))
    assert results[0].keys() == results[1].keys()
    for name, ours in results[0].items():
        torch.testing.assert_close(ours, results[1][name], rtol=1e-4, atol=1e-6)
        assert ours.any(), name


def test_one_product_forward_and_two_backward():
    model, batch = make_model(), make_batch()
    with Products() as seen:
        model(**batch).loss.backward()
    rows, width, all_layers = 18, 32, LAYERS * 2 * 32
    for factors in (
        ((rows, width), (width, all_layers)),
        ((rows, all_layers), (all_layers, width)),
        ((all_layers, rows), (rows, width)),
    ):
        assert seen.found[factors] == 1, factors
    for kind in ("_shared_attention", "_shared_attention_backward"):  # of whichever backend
        assert sum(count for name, count in seen.found.items() if str(name).endswith(kind)) == LAYERS, kind


def test_gradients_of_weights_are_contiguous():
    model = make_model()
    model(**make_batch()).loss.backward()
    for block in model.decoder.block:
        attention = block.layer[1].EncDecAttention
        assert all(linear.weight.grad.is_contiguous() for linear in (attention.k, attention.v))


def freeze(model: FAT5ForConditionalGeneration, what: str) -> None:
    modules: list[nn.Module] = [model.encoder, model.shared]
    if what == "keys":
        modules = [getattr(block.layer[1].EncDecAttention, name) for block in model.decoder.block for name in "kv"]
    if what == "stacks":
        modules.append(model.decoder)
    for module in modules:
        module.requires_grad_(False)


@pytest.mark.parametrize(("what", "calls"), [("encoder", LAYERS), ("keys", LAYERS), ("stacks", 0)])
def test_frozen_parameters(what, calls):
    results = []
    for make in (lambda x: x, apart):
        model = make(make_model())
        freeze(model, what)
        results.append(gradients(model, make_batch()))
        assert shared_calls(model, make_batch()) == (0 if make is apart else calls)
    assert results[0].keys() == results[1].keys()
    for name, ours in results[0].items():
        torch.testing.assert_close(ours, results[1][name], rtol=1e-4, atol=1e-6)
        assert ours.any(), name


def one_frozen(model: nn.Module) -> None:
    model.decoder.block[1].layer[1].EncDecAttention.v.requires_grad_(False)


def one_hook(model: nn.Module) -> None:
    model.decoder.block[1].layer[1].EncDecAttention.v.register_forward_hook(lambda *_: None)


def kept_apart(model: nn.Module) -> None:
    keep_apart(model.decoder.block[1])


def checkpointed(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()


class Wrapper(nn.Module):
    """As those that gather a block's weights while it runs: attributes are those of the block."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str):
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def wrapped_block(model: nn.Module) -> None:
    model.decoder.block[1] = Wrapper(model.decoder.block[1])


def wrapped_attention(model: nn.Module) -> None:
    layer = model.decoder.block[1].layer[1]
    layer.EncDecAttention = Wrapper(layer.EncDecAttention)


def without_gradients(model: nn.Module) -> None:
    block = model.decoder.block[1]
    block.forward = torch.no_grad()(block.forward)


def computed_again(model: nn.Module) -> None:
    attention = model.decoder.block[1].layer[1].EncDecAttention
    attention.forward = partial(checkpoint, attention.forward, use_reentrant=False)


CHANGES = [
    one_frozen, one_hook, kept_apart, checkpointed, wrapped_block, wrapped_attention, without_gradients, computed_again
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_where_each_layer_makes_its_own(change):
    model = make_model()
    assert shared_calls(model, make_batch()) == LAYERS
    change(model)
    assert shared_calls(model, make_batch()) == 0
    found = gradients(model, make_batch())
    expected = apart(make_model())
    change(expected)
    assert_same(found, gradients(expected, make_batch()))


@pytest.mark.parametrize("order", [[0, 2], [0, 2, 1], [0, 1, 1]])
def test_blocks_left_out_moved_and_used_twice(order):
    """A block's index is then not its place."""
    results = []
    for make in (lambda x: x, apart):
        model = make(make_model())
        model.decoder.block = nn.ModuleList([model.decoder.block[i] for i in order])
        results.append(gradients(model, make_batch()))
        assert shared_calls(model, make_batch()) == (0 if make is apart else len(order))
    assert_same(*results)


def test_a_layer_without_gradients_leaves_those_of_the_others():
    """A hook may run a layer without them."""
    results = []
    for make in (lambda x: x, apart):
        model = make(make_model())
        attention = model.decoder.block[1].layer[1].EncDecAttention
        attention.register_forward_pre_hook(lambda *_: torch._C._set_grad_enabled(False))
        attention.register_forward_hook(lambda *_: torch._C._set_grad_enabled(True))
        results.append({name: grad for name, grad in gradients(model, make_batch()).items() if grad.any()})
    assert_same(*results)
    assert "encoder.final_layer_norm.weight" in results[0]


def test_without_gradients_they_are_not_all_in_memory_at_once():
    model, batch = make_model(), make_batch()
    with torch.no_grad(), Products() as seen:
        model(**batch)
    assert not any("shared" in str(name) for name in seen.found)
    assert model.generate(batch["input_ids"], max_new_tokens=3).shape[0] == 2


def test_a_hook_may_give_a_layer_other_states():
    """Adapters put states of their own in front of the encoder's."""

    def replace(module, args, kwargs):
        return args, kwargs | {"key_value_states": 2 * kwargs["key_value_states"]}

    results = []
    for make in (lambda x: x, apart):
        model = make(make_model())
        model.decoder.block[1].layer[1].EncDecAttention.register_forward_pre_hook(replace, with_kwargs=True)
        results.append(gradients(model, make_batch()))
        if make is not apart:
            assert shared_calls(model, make_batch()) == LAYERS - 1
    plain = gradients(make_model(), make_batch())
    for name, ours in results[0].items():
        torch.testing.assert_close(ours, results[1][name], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(results[0]["encoder.final_layer_norm.weight"], plain["encoder.final_layer_norm.weight"])


def test_a_loss_on_an_inner_layer_and_a_second_pass():
    """Layers above it have no gradient; a second pass through the same graph gives the same."""
    results = []
    for make in (lambda x: x, apart):
        model = make(make_model())
        states = model(**make_batch(), output_hidden_states=True).decoder_hidden_states[2]
        keys = [block.layer[1].EncDecAttention.k.weight for block in model.decoder.block]
        wanted = [*keys, model.encoder.final_layer_norm.weight]
        first = torch.autograd.grad(states.square().sum(), wanted, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(states.square().sum(), wanted, allow_unused=True)
        for one, two in zip(first, second, strict=True):
            assert (one is None) == (two is None)
            assert one is None or torch.equal(one, two)
        results.append([torch.zeros(32, 32, device=DEVICE) if x is None else x for x in first])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert results[0][0].any()
    assert not results[0][2].any()


def test_autocast():
    model, batch = make_model(), make_batch()
    exact = gradients(model, batch)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        model.zero_grad()
        loss = model(**batch).loss
    loss.backward()
    weight = model.decoder.block[1].layer[1].EncDecAttention.v.weight
    error = (weight.grad - exact["decoder.block.1.layer.1.EncDecAttention.v.weight"]).norm() / weight.grad.norm()
    assert weight.grad.dtype == torch.float32
    assert 0 < error < 0.05


def test_a_hook_may_run_a_layer_without_autocast():
    results = []
    for make in (lambda x: x, apart):
        model, off = make(make_model()), torch.autocast(DEVICE, enabled=False)
        attention = model.decoder.block[1].layer[1].EncDecAttention
        attention.register_forward_pre_hook(lambda *_, off=off: off.__enter__() and None)
        attention.register_forward_hook(lambda *_, off=off: off.__exit__(None, None, None) or None)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(**make_batch()).loss
        loss.backward()
        results.append(model.decoder.block[1].layer[1].EncDecAttention.v.weight.grad)
    assert (results[0] - results[1]).norm() < 0.05 * results[1].norm()


def test_compiled_whole():
    model, batch = make_model(), make_batch()
    del batch["attention_mask"]
    expected = gradients(model, batch)
    model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    with profile() as seen:
        found = gradients(model, batch)
    assert sum(event.name.endswith("_shared_attention") for event in seen.function_events) >= LAYERS
    for name, ours in found.items():
        torch.testing.assert_close(ours, expected[name], rtol=1e-4, atol=1e-6)


def test_compiled_backward_of_an_eager_forward():
    attentions = [block.layer[1].EncDecAttention for block in make_model().decoder.block]
    q = torch.randn(2, 5, 2, 16, device=DEVICE)
    results = []
    for compiled in (False, True):
        states = torch.ones(2, 9, 32, device=DEVICE).tril().requires_grad_()
        shared = SharedKeys.make(attentions, states)
        loss = torch.zeros((), device=DEVICE)
        for layer in range(LAYERS):
            keys = shared.of_layer(layer)
            loss = loss + keys.attend(q).square().sum()
            shared = keys.after
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph) if compiled else nullcontext():
            results.append({"states": torch.autograd.grad(loss, states)[0]})
    assert_same(*results)
    assert results[0]["states"].any()


@pytest.mark.slow
def test_compiled_code_writes_into_one_gradient():
    """Inductor neither copies it from layer to layer nor clears it."""
    model, batch = make_model(attention_backend="torch"), make_batch()
    del batch["attention_mask"]
    expected = gradients(model, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    model.zero_grad()
    _, codes = run_fw_bw_and_get_code(lambda: compiled(**batch).loss)
    code = codes[-1]
    written = re.findall(r"torch_shared_attention_backward\.default\((\w+),", code)
    assert len(written) == LAYERS
    assert len(set(written)) == 1
    assert len(re.findall(r"room_for_shared_gradient\.default\(", code)) == 1
    assert not re.findall(rf"(?:cpp_fused|triton)\w*(?:\.run)?\([^)]*\b{written[0]}\b", code)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_layers_of_several_sizes_make_their_own():
    model = make_model()
    attentions = [block.layer[1].EncDecAttention for block in model.decoder.block]
    states = torch.randn(2, 9, 32, device=DEVICE)
    assert SharedKeys.make(attentions, states) is not None
    assert SharedKeys.make(attentions[:1], states) is None
    assert SharedKeys.make(attentions, states.to("meta")) is None
    attentions[1].num_heads, attentions[1].head_dim = 1, 32
    assert SharedKeys.make(attentions, states) is None
