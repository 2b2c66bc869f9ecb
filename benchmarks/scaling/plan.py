"""The runs of a model: who trains, on how large a batch, and the settings that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.scaling.launch import ROOT
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings

_CONFIGS = ROOT / "configs"
MODELS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "small": (_CONFIGS / "french-small.yaml", ()),
    "base": (_CONFIGS / "french-base.yaml", ()),
    "toy": (
        _CONFIGS / "quickstart.yaml",
        ("model.d_model=32", "model.d_kv=8", "model.d_ff=48", "model.num_heads=4", "denoising.encoder_budget=512"),
    ),
}
"""By name: a shipped configuration, 147 M and 305 M parameters, and what changes it."""

STRATEGIES = {"ddp": 1, "fsdp2": -1}
"""By name the setting `training.data_parallel_shard_degree`."""

SAME, TIMES = "same", "times"
WINDOWS = 4
"""Log windows of a run; the first, in which steps are profiled, is not timed."""

PROFILED, LEAST_WINDOW = 3, 10
"""Steps that are profiled behind the first five, and the shortest window that holds them."""


@dataclass(frozen=True)
class Scale:
    """How all runs of a model go.

    Attributes:
        model: A name in MODELS.
        processes: Of the runs that several processes make.
        steps: Optimiser steps of a run, a multiple of WINDOWS.
        tokens: Folder of token files.
        work: Folder for the runs.
        compiled: Whether to compile.
        saves: Whether to keep a checkpoint from the middle.
    """

    model: str
    processes: int
    steps: int
    tokens: Path
    work: Path
    compiled: bool
    saves: bool

    @property
    def budget(self) -> int:
        """Encoder slots of one GPU's batch in the shipped configuration."""
        budget = load_settings(PretrainConfig, *MODELS[self.model]).denoising.encoder_budget
        if budget is None:
            raise ValueError(f"the configuration of {self.model} sets no denoising.encoder_budget")
        return budget


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Who trains.
        processes: How many.
        batch: SAME: all processes together take one GPU's batch; TIMES: each takes as much as one GPU alone.
        accumulation: Batches a step of each process.
        strategy: A name in STRATEGIES; None for one process without a process group.
        resume: The checkpoint to go on from.
    """

    name: str
    processes: int
    batch: str
    accumulation: int = 1
    strategy: str | None = None
    resume: Path | None = None

    @property
    def folder(self) -> str:
        """Name of its folder."""
        by = f"-by-{self.processes}" if self.resume is not None else ""
        return f"{self.name}-{self.batch}{by}"

    def slots(self, scale: Scale) -> int:
        """Encoder slots of each process's batch."""
        return scale.budget // scale.processes if self.batch == SAME else scale.budget

    def settings(self, scale: Scale, extra: Sequence[str] = ()) -> PretrainConfig:
        """Return the settings of `fat5 pretrain` for this run."""
        path, changes = MODELS[scale.model]
        on_gpu = torch.cuda.is_available()
        output = scale.work / self.folder / "run"
        own = {
            "data.train": scale.tokens,
            "data.validation": "null",
            "training.output_dir": output,
            "training.device": "auto" if on_gpu else "cpu",
            "training.max_steps": scale.steps,
            "training.log_every": scale.steps // WINDOWS,
            "training.save_every": scale.steps // 2 if scale.saves else scale.steps,
            "training.save_total_limit": 2,
            "training.eval_at_start": "false",
            "training.report_to": "[]",
            "training.compile": str(scale.compiled).lower(),
            "training.profile": PROFILED if on_gpu and self.resume is None else 0,
            "training.gradient_accumulation_steps": self.accumulation,
            "training.data_parallel_shard_degree": STRATEGIES.get(self.strategy or "", 1),
            "training.resume": "auto" if self.resume is None else self.resume,
            "denoising.encoder_budget": self.slots(scale),
        }
        overrides = [f"{key}={value}" for key, value in own.items()]
        return load_settings(PretrainConfig, path, [*changes, *overrides, *extra])

    def checkpoint(self, scale: Scale) -> Path:
        """The checkpoint from the middle of this run."""
        return scale.work / self.folder / "run" / f"checkpoint-{scale.steps // 2}"
