"""CUDA graphs: whether a stack's forward can be one, and making it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fat5.ops.attention.backends import choose_backend, torch_attention

if TYPE_CHECKING:
    from fat5.models.modeling import FAT5ForConditionalGeneration
    from fat5.models.stack import FAT5Stack

_WARM_UP_STEPS = 2
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
LENGTH_STEP = 64
"""Lengths are rounded up to it, so that calls of similar lengths share buffers and graph."""


def rounded(length: int) -> int:
    """Return the length of the class that a length belongs to."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def can_capture(model: FAT5ForConditionalGeneration, stack: FAT5Stack) -> bool:
    """Return whether a forward of a stack can be a CUDA graph: on a GPU, with attention that never asks the host."""
    weight = model.shared.weight
    if not weight.is_cuda or model.training or torch.is_autocast_enabled("cuda"):
        return False
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return False  # a graph belongs to one device
    if any(module._forward_hooks or module._forward_pre_hooks for module in _modules(stack)):
        return False  # a graph would call them once, while it is made
    heads = weight.new_empty(1, 1, model.config.num_heads, model.config.d_kv)
    return choose_backend(model.config.attention_backend, heads) is not torch_attention


def fingerprint(stack: nn.Module) -> tuple[Any, ...]:
    """Return what a graph of a stack depends on: its modules, what they launch, and where their weights are.

    A graph reads the weights where they are, so that changed values count, and weights that have moved make a new one.
    What a module launches depends on hooks, on a `forward` that was replaced, and with modules of others on their
    settings: an adapter is switched off, changed for another or merged without any of its weights moving. Products of
    float32 stay as precise as they were recorded.
    """
    found: list[Any] = [torch.backends.cuda.matmul.fp32_precision]
    for module in _modules(stack):
        attributes = vars(module)
        hooked = bool(attributes["_forward_hooks"] or attributes["_forward_pre_hooks"])
        found += [id(module), type(module), hooked, id(attributes.get("forward"))]
        found += [weight.data_ptr() for weight in attributes["_parameters"].values() if weight is not None]
        if attributes["_buffers"]:
            found += [buffer.data_ptr() for buffer in attributes["_buffers"].values() if buffer is not None]
        if _has_settings(type(module).__module__):
            found.append(_settings({name: x for name, x in attributes.items() if name not in _OF_EVERY_MODULE}))
    return tuple(found)


@functools.cache
def _has_settings(place: str) -> bool:
    """Whether what modules defined there launch in evaluation may depend on their attributes; ours do not."""
    return place.partition(".")[0] not in ("torch", "fat5")


def _settings(x: Any) -> Hashable:
    """Return a value to compare settings by: plain ones by what they are, all others by their place."""
    if isinstance(x, dict):
        return tuple((name, _settings(value)) for name, value in x.items())
    if isinstance(x, (list, tuple)):
        return tuple(map(_settings, x))
    return x if isinstance(x, (bool, int, float, str, type(None))) else id(x)


def _modules(stack: nn.Module) -> list[nn.Module]:
    """Return a module and those inside it, without the names that `Module.modules` makes on the way."""
    found = [stack]
    for module in found:
        found += [inner for inner in module._modules.values() if inner is not None]
    return found


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Have cuBLAS take workspaces anew, in the memory of the graph that is recorded inside, and leave them to it.

    Else a graph writes to the workspace of its stream, which torch.compile's own graphs give back to the driver when
    they are recorded: an illegal access at the next replay.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def record_graph(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return what runs a function of tensors at fixed addresses as a CUDA graph, and returns its result in place.

    Raises:
        RuntimeError: The function does something that a graph cannot hold, such as waiting for the device.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):  # compiles kernels and lets libraries allocate
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # On this device's own stream: PyTorch's default one for captures is that of the first device that captured.
            # And inside it, so that the thread leaves it even where the end of a failed capture raises.
            with (
                _own_workspaces(),
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                result = function()
        except RuntimeError as error:
            reason = str(error.__context__ or error).splitlines()[0]
            raise RuntimeError(f"a step cannot be a CUDA graph ({reason}); generate without cuda_graph") from error

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
