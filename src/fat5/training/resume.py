"""Which checkpoint a run goes on from, and whether it belongs to this run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fat5.errors import CheckpointError, ConfigError
from fat5.training.checkpoints import WEIGHTS, list_checkpoints, step_of, verify_checkpoint
from fat5.training.config import FREE_ON_RESUME, FREE_SECTIONS, PretrainConfig
from fat5.training.config_file import flatten


class ResumePoint(NamedTuple):
    """A whole checkpoint and the step it was taken at."""

    checkpoint: Path
    step: int


def find_resume_point(config: PretrainConfig, facts: dict[str, Any]) -> ResumePoint | None:
    """Return the checkpoint that `training.resume` asks for, or None for a new run.

    Args:
        config: The run's settings.
        facts: `checkpoint_facts` of this run.

    Raises:
        CheckpointError: The checkpoint is missing or damaged; the message names the one before it that is whole.
        ConfigError: It was made with other settings, other data or another number of batches a step, or the output
            folder holds newer checkpoints.
        FileExistsError: `resume` is false and the output folder holds checkpoints.
    """
    output_dir, resume = Path(config.training.output_dir), config.training.resume
    existing = list_checkpoints(output_dir)
    if resume is False:
        if existing:
            raise FileExistsError(
                f"{output_dir} holds {existing[-1].name} of an earlier run and training.resume is false; "
                "name another training.output_dir, or resume=auto to go on"
            )
        return None
    if resume == "auto":
        if not existing:
            return None
        checkpoint = existing[-1]
    else:
        checkpoint = Path(str(resume))
        if not checkpoint.is_dir():
            raise CheckpointError(f"training.resume names {checkpoint}, which does not exist{_offer(existing)}")
    manifest = verify_checkpoint(checkpoint)
    step = step_of(checkpoint)
    newer = [path for path in existing if step_of(path) > step]
    if newer:
        raise ConfigError(
            f"training.resume names {checkpoint}, but {output_dir} holds {newer[-1].name}, which is newer and would be "
            "taken for this run's; remove it or name another training.output_dir"
        )
    _check_facts(checkpoint, manifest, facts)
    return ResumePoint(checkpoint, step)


def checkpoint_facts(
    config: PretrainConfig, *, precision: str, batches_per_step: int, data: dict[str, Any]
) -> dict[str, Any]:
    """Return what a checkpoint must agree on with the run that goes on from it.

    Args:
        config: The run's settings.
        precision: That of the settings, "auto" looked up.
        batches_per_step: Batches of all ranks together.
        data: What tells the training text from another.
    """
    settings = {
        key: value
        for key, value in flatten(config).items()
        if key not in FREE_ON_RESUME and not key.startswith(FREE_SECTIONS)
    }
    settings["training.precision"] = precision
    return {"batches_per_step": batches_per_step, "data": data, "settings": settings}


def _check_facts(checkpoint: Path, manifest: dict[str, Any], facts: dict[str, Any]) -> None:
    then, now = manifest.get("settings", {}), facts["settings"]
    changed = [
        f"{key} was {then.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
    if manifest.get("data") != facts["data"]:
        changed.append(f"the training data was {manifest.get('data')}, now {facts['data']}")
    if manifest.get("batches_per_step") != facts["batches_per_step"]:
        changed.append(
            f"GPUs x training.gradient_accumulation_steps was {manifest.get('batches_per_step')}, "
            f"now {facts['batches_per_step']}"
        )
    if changed:
        raise ConfigError(
            f"{checkpoint} belongs to a run with other settings: {'; '.join(changed)}. Restore them to go on, or name "
            "another training.output_dir for a new run"
        )


def check_weights(checkpoint: Path, model: nn.Module) -> None:
    """Make sure that a checkpoint's weights are the model's, name by name and shape by shape.

    The Trainer loads what fits and warns about the rest; here nothing may be missing or left over.

    Raises:
        CheckpointError: A weight is missing, unexpected or has another shape.
    """
    try:
        with safe_open(checkpoint / WEIGHTS, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{checkpoint / WEIGHTS} cannot be read: {' '.join(str(error).split())}") from error
    state = model.state_dict()
    faults = [f"unexpected {name}" for name in sorted(found.keys() - state.keys())]
    # One of several names of a tied weight is enough.
    stored = {_storage(state[name]) for name in found.keys() & state.keys()}
    faults += [f"missing {name}" for name in sorted(state) if _storage(state[name]) not in stored]
    faults += [
        f"{name} is {list(found[name])}, expected {list(state[name].shape)}"
        for name in sorted(found.keys() & state.keys())
        if found[name] != tuple(state[name].shape)
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"the weights of {checkpoint} do not fit the model: {', '.join(faults[:3])}{more}")


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _offer(existing: list[Path]) -> str:
    return f"; the newest in the output folder is {existing[-1]}" if existing else ""
