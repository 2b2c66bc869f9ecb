"""One process of a run: `fat5 pretrain`, and what this process can say about it.

python -m benchmarks.scaling.worker RUN.yaml FOLDER
torchrun --nproc-per-node N -m benchmarks.scaling.worker RUN.yaml FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fat5.files import atomic_file
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings
from fat5.training.pretrain import pretrain

_GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Train, and write `rank-R.json`: the peak of this process's GPU, and all log entries.

    The peak is what PyTorch reserved: the memory of CUDA graphs does not count as allocated.
    """
    settings, folder = map(Path, argv)
    result = pretrain(load_settings(PretrainConfig, settings))
    peak = torch.cuda.max_memory_reserved() / _GIB if torch.cuda.is_available() else None
    facts = {"peak_reserved_gib": peak, "log_history": result.log_history}
    with atomic_file(folder / f"rank-{os.environ.get('RANK', '0')}.json") as staging:
        staging.write_text(json.dumps(facts), encoding="utf-8")
    return 0 if result.stopped_by is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
