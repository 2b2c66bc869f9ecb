"""What this machine can run: versions, GPUs, attention backends with a real self-check, the caches."""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

from fat5.ops import flash_attention
from fat5.ops.attention.backends import BACKENDS, HOPPER_SWITCH, hopper_by_default
from fat5.ops.attention.bias import RelativeBias
from fat5.ops.attention.reference import attention_reference
from fat5.version import __version__

_NEEDED = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "numba", "pyarrow", "numpy")
_OPTIONAL = ("triton",)
_MOST_WORKERS = 8  # of the comparison of the Hopper kernels; each holds a context of the card
_TOLERANCE = 5e-3  # of float32 inputs; a GPU may multiply them in TF32, which keeps 10 bits


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        section: Heading it stands under.
        name: What was looked at.
        detail: What was found.
        ok: False where something that FAT5 needs does not work; None where it is only information.
    """

    section: str
    name: str
    detail: str
    ok: bool | None = None


@dataclass
class Report:
    """All checks, in the order of the report."""

    checks: list[Check] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether everything that FAT5 needs works."""
        return all(check.ok is not False for check in self.checks)


def examine() -> Report:
    """Look at the machine; nothing is changed, and no check lets another one down."""
    report = Report()
    for section in (_versions, _hardware, _backends, _caches):
        report.checks += section()
    return report


def _versions() -> list[Check]:
    checks = [Check("versions", "fat5", __version__), Check("versions", "python", platform.python_version())]
    for name in (*_NEEDED, *_OPTIONAL):
        needed = name in _NEEDED
        try:
            version = metadata.version(name)
            # A distribution may be present and broken; only an import tells.
            importlib.import_module(name)
        except metadata.PackageNotFoundError:
            detail = "not installed" if needed else "not installed (only GPU kernels need it)"
            checks.append(Check("versions", name, detail, False if needed else None))
        except (ImportError, OSError) as error:
            checks.append(Check("versions", name, f"does not import: {error}", False if needed else None))
        else:
            checks.append(Check("versions", name, version, True if needed else None))
    return checks


def _hardware() -> list[Check]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    checks = [Check("hardware", "cpu", f"{cores} cores, {memory:.1f} GiB of memory, {torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        reason = "this torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU"
        return [*checks, Check("hardware", "gpu", f"none ({reason}); training runs on the CPU in fp32")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        precision = "bf16" if properties.major >= 8 else "no bf16: training runs in fp32"
        memory = properties.total_memory / 2**30
        detail = f"{properties.name}, compute capability {capability}, {memory:.1f} GiB, {precision}"
        checks.append(Check("hardware", f"gpu {index}", detail))
    return checks


def _backends() -> list[Check]:
    checks = []
    for name, reason in BACKENDS.items():
        missing = reason()
        if missing is not None:
            checks.append(Check("attention backends", name, f"not available: {missing}"))
            continue
        gpu = torch.cuda.is_available()
        if name == "hopper" and not hopper_by_default():
            checks.append(Check("attention backends", name, f"not in use: {HOPPER_SWITCH}=0 is set"))
            continue
        for device in ["cpu", "cuda"] if name == "torch" and gpu else ["cuda" if gpu else "cpu"]:
            checks.append(_self_check(name, device))
        if name == "hopper":
            checks += _hopper_kernels(torch.device("cuda", torch.cuda.current_device()))
    return checks


def _hopper_kernels(device: torch.device) -> list[Check]:
    """Compare every configuration of the Hopper kernels with the portable ones, which take over where one differs."""
    from fat5.ops.attention.hopper.comparison import examine_all, usable_cores
    from fat5.ops.attention.hopper.self_check import all_configurations

    configurations = list(all_configurations())
    workers = min(usable_cores(), _MOST_WORKERS) if device.type == "cuda" else 1
    verdicts = examine_all(configurations, device, workers)
    progress = tqdm(
        verdicts, desc="comparing the Hopper kernels", total=len(configurations), unit="kernel", disable=None
    )
    wrong = {configuration: reason for configuration, reason in progress if reason is not None}
    agreeing = len(configurations) - len(wrong)
    detail = f"{agreeing} of {len(configurations)} configurations agree with the portable kernels"
    lines = [
        f"not used, the portable kernels take over: {configuration}: {wrong[configuration]}" for configuration in wrong
    ]
    return [Check("attention backends", "hopper kernels", line) for line in (detail, *lines)]


def _self_check(backend: str, device: str) -> Check:
    """Run a small padded attention with T5's bias, forward and backward, against the reference in float64."""
    try:
        error = _largest_error(backend, torch.device(device))
    except (RuntimeError, ValueError, ImportError) as failure:
        return Check("attention backends", f"{backend} on {device}", f"fails: {' '.join(str(failure).split())}", False)
    ok = error < _TOLERANCE
    verdict = "works" if ok else "WRONG"
    detail = f"{verdict}: output and gradients differ from the reference by {error:.1e} of their largest value"
    return Check("attention backends", f"{backend} on {device}", detail, ok)


def _largest_error(backend: str, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 43, 2, 16, generator=generator, dtype=torch.float64) * 0.5 for _ in range(3)]
    values.append(torch.randn(32, 2, generator=generator, dtype=torch.float64))
    lengths = torch.tensor([43, 17])
    results = []
    for reference in (True, False):
        dtype = torch.float64 if reference else torch.float32
        leaves = [value.to(device, dtype).requires_grad_() for value in values]
        q, k, v, table = leaves
        settings = {"bias": RelativeBias(table, bidirectional=True), "key_lengths": lengths.to(device)}
        if reference:
            output = attention_reference(q, k, v, **settings)  # type: ignore[arg-type]
        else:
            output = flash_attention(q, k, v, backend=backend, **settings)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(output.square().sum(), leaves)
        results.append([output.detach(), *gradients])
    return max(float((ours - exact).abs().max() / exact.abs().max()) for exact, ours in zip(*results, strict=True))


def _caches() -> list[Check]:
    # Datasets and tokenizers land in the first, compiled data code of numba in the second.
    folders = {
        "HF_HOME": Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser(),
        "temporary": Path(tempfile.gettempdir()),
    }
    return [Check("writeable folders", name, *_writeable(folder)) for name, folder in folders.items()]


def _writeable(folder: Path) -> tuple[str, bool]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return str(folder), True
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}", False
