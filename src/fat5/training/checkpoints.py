"""Checkpoints that are whole or absent: staged in a hidden folder, listed in a manifest, renamed into place.

A checkpoint is `checkpoint-STEP` in the run's folder. Its manifest holds the size and the CRC-32 of every other file,
so that a file cut short or changed by a failing disk is found before any of it is trusted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from fat5.errors import CheckpointError
from fat5.files import atomic_file

MANIFEST = "checkpoint_manifest.json"
WEIGHTS = "model.safetensors"
STAGING = ".saving"
_NAME = re.compile(r"checkpoint-(\d+)")
_BLOCK = 1 << 22


def step_of(checkpoint: Path) -> int:
    """Return the step in the folder's name, `checkpoint-STEP`.

    Raises:
        CheckpointError: the name has another form.
    """
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is not a checkpoint folder; expected a name like checkpoint-1000")
    return int(match.group(1))


def list_checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoint folders of a run, oldest step first, without reading them."""
    root = Path(output_dir)
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)), key=step_of)


def seal_checkpoint(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest of a finished checkpoint: every file's size and CRC-32, and `facts` about the run.

    Every file is flushed to the disk first, so that a rename that survives a power cut has its content too.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    with atomic_file(folder / MANIFEST) as staging:
        staging.write_text(json.dumps({"files": files, **facts}, indent=1), encoding="utf-8")


def publish_checkpoint(staged: Path, target: Path) -> None:
    """Rename a sealed checkpoint into place; one of the same step, left by an earlier attempt, gives way."""
    if target.exists():
        # Hidden before it is deleted: a kill in between must not leave half a folder under a trusted name.
        old = staged.with_name(f"{target.name}.old")
        target.replace(old)
        staged.replace(target)
        shutil.rmtree(old)
    else:
        staged.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def verify_checkpoint(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of a whole checkpoint.

    Raises:
        CheckpointError: the folder is missing, was not finished, or a file is missing, cut short or changed. The
            message names the checkpoint, the file, and the newest whole checkpoint before it if there is one.
    """
    folder = Path(checkpoint)
    fault, manifest = _inspect(folder)
    if fault is None:
        return manifest
    message = f"checkpoint {folder} cannot be used: {fault}"
    good = newest_whole_checkpoint(folder.parent, before=folder)
    if good is not None:
        message += f"; remove it to go on from {good}, the newest whole checkpoint before it"
    elif folder.exists():
        message += "; no earlier checkpoint of the run is whole, so remove it to start again"
    raise CheckpointError(message)


def newest_whole_checkpoint(output_dir: Path, before: Path | None = None) -> Path | None:
    """Return the newest checkpoint of the run that passes its manifest, among those older than `before`."""
    limit = step_of(before) if before is not None and _NAME.fullmatch(before.name) else None
    for candidate in reversed(list_checkpoints(output_dir)):
        if (limit is None or step_of(candidate) < limit) and _inspect(candidate)[0] is None:
            return candidate
    return None


def rotate_checkpoints(output_dir: Path, keep: int) -> None:
    """Delete the oldest checkpoints beyond the newest `keep`."""
    for checkpoint in list_checkpoints(output_dir)[:-keep]:
        # Renamed first, so that a kill while deleting leaves nothing under a checkpoint's name.
        hidden = output_dir / STAGING / f"{checkpoint.name}.old"
        hidden.parent.mkdir(exist_ok=True)
        checkpoint.replace(hidden)
        shutil.rmtree(hidden)


def clear_staging(output_dir: Path) -> None:
    """Remove what an interrupted save left behind."""
    shutil.rmtree(output_dir / STAGING, ignore_errors=True)


def _inspect(folder: Path) -> tuple[str | None, dict[str, Any]]:
    if not folder.is_dir():
        return "there is no such folder", {}
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (int(entry["bytes"]), int(entry["crc32"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it was never finished or comes from another program", {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged", {}
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing", {}
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, expected {size}", {}
    # Sizes first: they cost nothing, and a cut file is the common fault.
    for name, (_, crc32) in files.items():
        if _crc32(folder / name) != crc32:
            return f"the content of {name} has changed since it was written", {}
    return None, manifest


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
