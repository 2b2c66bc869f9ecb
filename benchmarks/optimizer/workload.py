"""The tensors that a step updates: those of the French model, and 130 million numbers in large matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import Parameter

from fat5.models import FAT5ForConditionalGeneration
from fat5.optim import parameter_groups
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_NORM = 1.0
WEIGHT_DECAY = 0.1
_CONFIG = Path(__file__).resolve().parent.parent.parent / "configs" / "french-small.yaml"
_MATRIX, _MATRICES = (1024, 1024), 124

# Shapes of the tensors that decay, and of those that do not.
Shapes = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


@functools.cache
def french_small() -> Shapes:
    """Return the shapes of configs/french-small.yaml, without memory for its weights."""
    settings = load_settings(PretrainConfig, _CONFIG, [])
    with torch.device("meta"):
        model = FAT5ForConditionalGeneration(settings.model.build(settings.model.vocab_size, pad=0, eos=1))
    groups = parameter_groups(model, WEIGHT_DECAY)
    decayed, kept = ([tuple(x.shape) for x in group["params"]] for group in groups)
    return decayed, kept


def large_matrices() -> Shapes:
    """Return 124 matrices of 1,024 x 1,024: 130.0 million numbers and hardly a launch's worth of small tensors."""
    return [_MATRIX] * _MATRICES, []


LISTS: dict[str, Callable[[], Shapes]] = {"french-small": french_small, "130M": large_matrices}


@dataclass(frozen=True)
class Workload:
    """Tensors of one type.

    Args:
        tensors: A name in `LISTS`.
        dtype: A name in `DTYPES`.
    """

    tensors: str
    dtype: str

    @property
    def shapes(self) -> Shapes:
        """Shapes of the tensors that decay, and of the others."""
        return LISTS[self.tensors]()

    @property
    def numel(self) -> int:
        """Numbers of all tensors."""
        return sum(torch.Size(shape).numel() for part in self.shapes for shape in part)

    def groups(self, device: torch.device) -> list[dict]:
        """Return parameter groups with gradients, the same at each call; the sizes are a trained model's."""
        generator = torch.Generator(device).manual_seed(0)
        groups = []
        for shapes, decay in zip(self.shapes, (WEIGHT_DECAY, 0.0), strict=True):
            parameters = []
            for shape in shapes:
                values, gradients = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
                parameter = Parameter((0.05 * values).to(DTYPES[self.dtype]))
                parameter.grad = (1e-3 * gradients).to(DTYPES[self.dtype])
                parameters.append(parameter)
            if parameters:
                groups.append({"params": parameters, "weight_decay": decay})
        return groups

    def columns(self) -> dict[str, str | int]:
        """Return the columns that name the workload in every row."""
        tensors = sum(map(len, self.shapes))
        return {"table": "step", "tensors": self.tensors, "count": tensors, "numel": self.numel, "dtype": self.dtype}
