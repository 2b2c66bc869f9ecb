"""The model on the kernels of norm, residual and activation, and its residual stream in plain PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from fat5.nn import FeedForward
from fat5.nn import feed_forward as feed_forward_module
from fat5.nn import norm as norm_module
from fat5.nn.position import rotary as rotary_module
from tests.models.conftest import SIZES
from tests.ops.kernel_checks import DEVICE, needs_gpu, needs_kernels

SMALL = {"vocab_size": 61, "num_layers": 1, "num_decoder_layers": 1, "d_model": 24, "d_ff": 40, "num_heads": 2}
OPERATORS = (
    (norm_module, "rms_norm"),
    (norm_module, "add_rms_norm"),
    (feed_forward_module, "gated_feed_forward"),
    (feed_forward_module, "joined_gated_gelu"),
    (rotary_module, "apply_rotary_qk"),
)


def on_backend(model, name: str):
    """The same model with norms, activations and rotary embedding on a backend."""
    config = FAT5Config(**model.config.to_dict() | {"kernel_backend": name})
    other = FAT5ForConditionalGeneration(config).to(model.device).train(model.training)
    other.load_state_dict(model.state_dict())
    return other


def step(model, batch: dict) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return {"loss": output.loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def record_backends(monkeypatch, calls: list[str]) -> None:
    """Have every operator with a backend write down the one that it is asked for."""

    def recorded(original, *args, **options):
        calls.append(options["backend"])
        return original(*args, **options)

    for module, name in OPERATORS:
        monkeypatch.setattr(module, name, functools.partial(recorded, getattr(module, name)))


def small_batch() -> dict[str, torch.Tensor]:
    inputs = torch.randint(2, 61, (2, 9), device=DEVICE)
    return {"input_ids": inputs, "labels": torch.randint(2, 61, (2, 7), device=DEVICE)}


@needs_kernels
@pytest.mark.parametrize("settings", [{}, {"dropout_rate": 0.3, "position_encoding": "rotary"}])
def test_kernels_change_nothing_but_rounding(settings, monkeypatch):
    sizes = {k: v for k, v in (SIZES | SMALL).items() if not (settings and k.startswith("relative"))}
    model = FAT5ForConditionalGeneration(FAT5Config(**sizes | settings)).to(DEVICE).train()
    batch = small_batch()
    results = []
    for name in ("torch", "triton"):
        torch.manual_seed(3)
        calls: list[str] = []
        record_backends(monkeypatch, calls)
        results.append(step(on_backend(model, name), batch))
        monkeypatch.undo()
        # Norms: three of the encoder, four of the decoder; then what each stack has once.
        assert calls == [name] * (7 + 2 + 2 * ("position_encoding" in settings))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert expected.any()


def test_the_decoder_s_later_layers_keep_their_activation():
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | {"num_layers": 2, "num_decoder_layers": 6}))
    kept = [
        [block.layer[-1].DenseReluDense.keep_inner for block in stack.block] for stack in (model.encoder, model.decoder)
    ]
    assert kept == [[False] * 2, [False] * 2 + [True] * 4]


def test_an_unknown_backend_is_named():
    with pytest.raises(Exception, match="got kernel_backend='cuda'; expected one of auto, torch, triton"):
        FAT5Config(kernel_backend="cuda")


def test_every_addition_but_none_before_a_stack_is_left_to_a_norm(monkeypatch, model, batch):
    calls = []
    original = norm_module.add_rms_norm
    monkeypatch.setattr(norm_module, "add_rms_norm", lambda *x, **o: calls.append(x[0].shape) or original(*x, **o))
    expected = model(**batch).loss
    assert len(calls) == 2 * 2 + 3 * 3
    calls.clear()
    # States on request are sums of their own, and change nothing.
    output = model(**batch, output_hidden_states=True)
    assert len(calls) == 2 * 2 + 3 * 3 - (1 + 2)
    assert torch.equal(output.loss, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_both_kinds_of_checkpointing_change_nothing(batch, use_reentrant):
    """Pitfall: recomputation under gradient checkpointing. A reentrant checkpoint sees tensors alone."""
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES)).train()
    expected = {name: value.clone() for name, value in step(model, batch).items()}
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for name, value in step(model, batch).items():
        torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")


def test_float16_that_overflows_gives_a_finite_loss(batch):
    """Pitfall: fp16 feed-forward outputs overflow."""
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES)).half()
    inner: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, FeedForward):
                module.wi_0.weight.mul_(400)
                module.wi_1.weight.mul_(400)
                module.wo.weight.mul_(100)
                module.wo.register_forward_hook(lambda m, args, out: inner.append((args[0], out)))
    output = model(**batch)
    assert any(out.isinf().any() for _, out in inner)  # what the residual stream has to bear
    assert any((states.abs() == torch.finfo(torch.float16).max).any() for states, _ in inner)
    assert output.loss.isfinite()
    assert output.encoder_last_hidden_state.isfinite().all()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_on_a_gpu(compiled):
    """The kernels are what a model on a GPU takes; they are as near float32 as plain PyTorch is."""
    settings = {"num_layers": 3, "num_decoder_layers": 3, "d_kv": 32, "d_model": 128, "d_ff": 320}
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | settings)).to(DEVICE)
    batch = {"input_ids": torch.randint(2, 97, (4, 361), device=DEVICE)}
    batch["labels"] = torch.randint(2, 97, (4, 129), device=DEVICE)
    exact = step(on_backend(model, "torch"), batch)
    errors = []
    for backend in ("torch", "auto"):
        half = on_backend(model, backend).bfloat16()
        if compiled:
            half.compile(fullgraph=True)
        got = step(half, batch)
        errors.append({n: float((got[n].float() - exact[n]).norm() / exact[n].norm()) for n in exact})
    for name, plain in errors[0].items():
        assert errors[1][name] <= 3 * plain + 1e-2, name
