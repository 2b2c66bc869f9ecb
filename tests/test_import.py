"""The package imports anywhere, its command answers at once, and its floors import downwards alone."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fat5

ROOT = Path(fat5.__file__).parent
FLOORS = {"ops": 1, "nn": 2, "models": 3, "data": 3, "optim": 3, "training": 4, "tasks": 4, "cli": 5}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )


def test_import_and_attention_without_triton_and_without_a_gpu():
    """Pitfall: the import fails without a GPU or without Triton."""
    done = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fat5\n"
        "from fat5.ops import add_rms_norm, apply_rotary_qk, flash_attention, gated_gelu, rms_norm, rotary_phases\n"
        "from fat5.ops.attention.backends import BACKENDS\n"
        "q = torch.randn(1, 5, 2, 16)\n"
        "assert flash_attention(q, q, q).any()\n"
        "assert all(x.any() for x in (rms_norm(q, q[0, 0, 0]), gated_gelu(q, q), *add_rms_norm(q, q, q[0, 0, 0])))\n"
        "assert apply_rotary_qk(q, q, *rotary_phases(torch.arange(5), 16))[0].any()\n"
        "try: rms_norm(q, q[0, 0, 0], backend='triton')\n"
        "except ValueError as error: assert 'not installed' in str(error)\n"
        "assert 'not installed' in BACKENDS['triton']()\n"
        "try: flash_attention(q, q, q, backend='triton')\n"
        "except ValueError as error: print(error)\n"
        "from fat5.optim import AdamWScale\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3); optimizer = AdamWScale([p]); optimizer.step()\n"
        "assert (p < 1).all()\n"
        "try: AdamWScale([p], fused=True)\n"
        "except ValueError as error: print(error)\n",
        CUDA_VISIBLE_DEVICES="",
        TRITON_INTERPRET="0",
    )
    assert done.returncode == 0, done.stderr
    assert "the package triton is not installed; use 'auto' or 'torch'" in done.stdout
    assert "got fused=True, which does not work here: the package triton is not installed" in done.stdout


def test_import_registers_the_auto_classes():
    done = run(
        "import fat5\n"
        "from transformers import AutoConfig, AutoModelForSeq2SeqLM\n"
        "model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model('fat5', num_layers=1))\n"
        "print(type(model).__name__)\n"
    )
    assert done.stdout.strip() == "FAT5ForConditionalGeneration", done.stderr


def test_the_command_answers_without_importing_torch():
    command = Path(sys.executable).parent / "fat5"
    if not command.exists():
        pytest.skip("the fat5 command is not installed beside this Python")
    start = time.perf_counter()
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "quickstart" in done.stdout
    assert time.perf_counter() - start < 2.0


def imports_of(path: Path) -> list[str]:
    """Every module that a file imports, as absolute names."""
    package = ("fat5", *path.relative_to(ROOT).parts[:-1])
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            names += [f"{base}{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def test_floors_import_downwards_alone():
    wrong = []
    for path in ROOT.rglob("*.py"):
        floor = FLOORS.get(path.relative_to(ROOT).parts[0], 9)
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "fat5" and len(parts) > 1 and FLOORS.get(parts[1], 0) > floor:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if floor == 1 and parts[0] == "transformers":
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong
    assert any(name.startswith("fat5.ops") for name in imports_of(ROOT / "nn" / "attention.py"))


def test_files_stay_below_400_lines():
    long = {p.name: n for p in ROOT.rglob("*.py") if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}
    assert not long
