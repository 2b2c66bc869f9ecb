"""Small tensors around the edges of blocks and chunks, and what an optimizer made of them."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Numbers of elements around the edges of a block of 64 and a chunk of 128, and several chunks.
SHAPES = ((5, 7), (), (0, 4), (64,), (128,), (3, 43), (0,), (1,))


def parameters_of(dtype: torch.dtype, shapes=SHAPES, size: float = 1.0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter((size * torch.randn(s, generator=generator)).to(DEVICE, dtype)) for s in shapes]


def give_gradients(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE, parameter.dtype)


def everything(parameters, optimizer) -> list[torch.Tensor]:
    return [*parameters, *(value for p in parameters for value in optimizer.state[p].values())]


def known(parameters, optimizer) -> list[dict[str, torch.Tensor]]:
    """State and values, the compensation added: by itself it says nothing where a value is between two numbers."""
    found = []
    for parameter in parameters:
        state = dict(optimizer.state[parameter])
        compensation = state.pop("compensation", None)
        value = parameter.detach().double() if compensation is None else parameter.detach().double() + compensation
        found.append(state | {"value": value})
    return found


def assert_close(got, expected, dtype, kahan: bool = True) -> None:
    """Equal within the rounding of a few steps: of a few moments in `dtype`, times the learning rate, and of values."""
    eps = torch.finfo(dtype).eps
    for x, y in zip(got, expected, strict=True):
        assert x.keys() == y.keys()
        for name, value in x.items():
            assert value.dtype == y[name].dtype
            low = name == "exp_avg" or (name == "value" and not kahan)
            rtol = eps if low else 5e-7
            atol = max(0.1 * eps, 1e-7)
            torch.testing.assert_close(value, y[name], rtol=2 * rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
