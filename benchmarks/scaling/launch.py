"""Starts the processes of a run and reads what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scaling.communication import communication_shares
from fat5.training.config import PretrainConfig
from fat5.training.config_file import to_yaml
from fat5.training.profiling import TRACE_NAME, read_kernels

ROOT = Path(__file__).resolve().parents[2]
_WORKER = "benchmarks.scaling.worker"
_SHOWN, _KEPT = 3000, 200  # characters of what a run that failed said last: on the screen, and in its row


class RunError(Exception):
    """A run failed; the message ends with what it said last."""


@dataclass(frozen=True)
class Outcome:
    """What a run left.

    Attributes:
        log_history: Its log entries, those before a resume included.
        peak_reserved_gib: Most GPU memory that one process had reserved; None on a CPU.
        communication: What `communication_shares` returned for the first process's profiled steps; None where nothing
            was profiled.
    """

    log_history: list[dict[str, Any]]
    peak_reserved_gib: float | None
    communication: tuple[float, float] | None

    @property
    def losses(self) -> dict[int, float]:
        """Mean training loss of each log window, by the step at its end."""
        return {entry["step"]: entry["loss"] for entry in self.log_history if "loss" in entry}


def launch(config: PretrainConfig, folder: Path, *, processes: int, torchrun: bool, seconds: float) -> Outcome:
    """Train with so many processes of this machine, and wait.

    Args:
        config: The run's settings.
        folder: Gets the settings, what the processes said, and what they report; must not exist.
        processes: How many.
        torchrun: False to start one process as `fat5 pretrain` does, without a process group.
        seconds: After which the run is ended.

    Raises:
        RunError: A process failed, or the time was over.
    """
    folder.mkdir(parents=True)
    settings = folder / "run.yaml"
    settings.write_text(to_yaml(config), encoding="utf-8")
    command = [sys.executable]
    if torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", _WORKER, str(settings), str(folder)]
    log = folder / "output.txt"
    with log.open("wb") as output:
        code = _wait(command, output, seconds)
    if code != 0:
        reason = f"was ended after {seconds:.0f} s" if code is None else f"ended with code {code}"
        said = log.read_text(encoding="utf-8", errors="replace").split("torch.distributed.elastic")[0]
        print(said[-_SHOWN:], file=sys.stderr, flush=True)
        raise RunError(f"the run in {folder.name} {reason}: ...{said.strip()[-_KEPT:]}")
    reports = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]
    peaks = [report["peak_reserved_gib"] for report in reports if report["peak_reserved_gib"] is not None]
    trace = Path(config.training.output_dir) / TRACE_NAME
    return Outcome(
        log_history=reports[0]["log_history"],
        peak_reserved_gib=max(peaks, default=None),
        communication=communication_shares(read_kernels(trace)) if trace.is_file() else None,
    )


def _wait(command: list[str], output: Any, seconds: float) -> int | None:
    """Return the exit code, or None if the time was over; no process is left behind."""
    # NCCL's settings are the user's: the environment goes on as it is.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # the time is over, or the user has stopped the benchmark
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
