"""What a row says about the machine and the software it was measured with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from fat5.version import __version__

COMMIT_VARIABLE = "FAT5_COMMIT"


def describe_environment() -> dict[str, str]:
    """Return the columns that end every row: device, versions, commit."""
    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "cpu_cores": str(len(os.sched_getaffinity(0))),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()) if on_gpu else "none",
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "fat5": __version__,
        "commit": commit(Path(__file__).resolve().parent.parent),
    }


def commit(root: Path) -> str:
    """Return the commit of the code: of `$FAT5_COMMIT`, or of the checkout, "-dirty" added if it has changes.

    "unknown" where there is no checkout or no git.
    """
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    if shutil.which("git") is None or not (root / ".git").exists():
        return "unknown"
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", "src", "benchmarks", ":(exclude)benchmarks/results")
    except subprocess.CalledProcessError:
        return "unknown"
    return f"{name}-dirty" if changed else name


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
