"""torch.compile of the training step: one graph without breaks, specialised once on the packed batch's shapes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from torch import nn

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


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
