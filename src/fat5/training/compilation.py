"""torch.compile of the training step: one graph without breaks, specialised once on the packed batch's shapes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from fat5.data.denoising_config import DenoisingConfig
from fat5.errors import ConfigError
from fat5.models import FAT5ForConditionalGeneration
from fat5.ops.attention.backends import choose_backend, torch_attention

CompileMode = Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


class Compilation(NamedTuple):
    """How a model is compiled: torch.compile's mode, and why that one."""

    mode: str
    reason: str

    @property
    def cuda_graphs(self) -> bool:
        """Whether the step replays CUDA graphs."""
        return uses_cuda_graphs(self.mode)


def choose_compilation(
    mode: str, model: FAT5ForConditionalGeneration, denoising: DenoisingConfig, *, sharded: bool
) -> Compilation:
    """Return torch.compile's mode for `training.compile_mode`: "auto" takes CUDA graphs wherever they can be.

    Args:
        mode: The setting.
        model: The model, on its device.
        denoising: How batches are made.
        sharded: Whether the weights are spread over ranks.

    Raises:
        ConfigError: The mode replays CUDA graphs, and this run's step cannot be one.
    """
    obstacle = graph_obstacle(model, denoising, sharded=sharded)
    if mode == "auto":
        if obstacle is None:
            return Compilation("reduce-overhead", "compile_mode=auto: the step replays CUDA graphs")
        return Compilation("default", f"compile_mode=auto: no CUDA graphs, since {obstacle}")
    if uses_cuda_graphs(mode) and obstacle is not None:
        raise ConfigError(
            f"training.compile_mode is {mode}, which replays CUDA graphs, but {obstacle}; set compile_mode=auto or "
            "default"
        )
    return Compilation(mode, f"compile_mode={mode}")


def graph_obstacle(model: FAT5ForConditionalGeneration, denoising: DenoisingConfig, *, sharded: bool) -> str | None:
    """Return why the training step cannot be CUDA graphs, or None if it can: the arguments are `choose_compilation`'s.

    A graph has fixed shapes and addresses, and nothing in it may wait for the device.
    """
    weight = model.shared.weight
    if not weight.is_cuda:
        return f"the model is on the device {weight.device.type}"
    if sharded:
        return "sharded weights are gathered into other memory each time"
    if denoising.pad_to == "longest":
        return "denoising.pad_to=longest gives each batch another shape"
    heads = weight.new_empty(1, 1, model.config.num_heads, model.config.d_kv)
    if choose_backend(model.config.attention_backend, heads) is torch_attention:
        return "attention runs in plain PyTorch here, which reads the documents' ends on the host"
    return None


def compile_model(
    model: nn.Module,
    mode: str = "default",
    *,
    blocks: Iterable[nn.Module] | None = None,
    backend: str = "inductor",
) -> None:
    """Compile a model in its place, with its loss; names of weights and what is saved stay as they are.

    The graph is whole (`fullgraph`) and its shapes are static: a packed batch always has the same. An evaluation and a
    batch of another layout each make one more graph.

    Args:
        model: The model.
        mode: torch.compile's mode.
        blocks: Compile these of its modules instead, each by itself: a model whose blocks gather their parameters from
            other ranks has Python between them.
        backend: torch.compile's backend.
    """
    for module in [model] if blocks is None else blocks:
        module.compile(fullgraph=True, dynamic=False, mode=None if mode == "default" else mode, backend=backend)


def uses_cuda_graphs(mode: str) -> bool:
    """Return whether torch.compile's mode replays CUDA graphs."""
    return mode in WITH_CUDA_GRAPHS


def cache_folder() -> Path:
    """Return where Inductor keeps compiled code between runs; `TORCHINDUCTOR_CACHE_DIR` names another place."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given: Any = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(given or default_cache_dir())
